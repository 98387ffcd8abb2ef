"""What `vlaunch export` is told of a server: the flags, and the request that they make, as `serve`
would have it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.errors import VlaunchError
from launcher.model import Backend, Inventory

if TYPE_CHECKING:
    from launcher.payload.agent.desired import Policy
    from launcher.plan.request import Request

_WRITTEN = ".vlaunch-export"  # in a folder: what exports have written there, a line each
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that is to be written down, and how it is to be kept."""

    inventory: Inventory
    request: Request
    policy: Policy


def flags(function: F) -> F:
    """Add the flags of every export of a server."""
    for option in (
        click.argument("args", metavar="[-- VLLM ARGS]", nargs=-1, type=click.UNPROCESSED),
        click.option(
            "--timeout",
            type=click.FloatRange(1, 86400),
            metavar="SECONDS",
            help="Time for the first answer (default: the inventory's).",
        ),
        click.option("--dp", type=click.IntRange(1), help="Replicas (default: the inventory's)."),
        click.option("--pp", type=click.IntRange(1), help="Pipeline parallel size."),
        click.option("--tp", type=click.IntRange(1), help="Tensor parallel size."),
        click.option("--model", metavar="MODEL", help="What to serve (default: the inventory's)."),
    ):
        function = option(function)
    return function


def read(named: str | None, backend: Backend, said: dict[str, Any]) -> Server:
    """Read the inventory and place the server of these flags; raises RequestError."""
    from launcher.cli import session
    from launcher.cli.choose import chosen_model
    from launcher.cli.start import Asked, policy
    from launcher.cli.vllm_args import arguments

    wanted, args = session.read(None, named), said["args"]
    model = chosen_model(said["model"], wanted)
    if args and not args[0].startswith("-"):
        raise click.UsageError(
            f"`{args[0]}` is no argument of `vllm serve`; the inventory is named with -i"
        )
    limit = wanted.serve.timeout if said["timeout"] is None else said["timeout"]
    kept = policy(wanted, limit)
    asked = Asked(
        name="default",
        model=model,
        tp=said["tp"],
        pp=said["pp"],
        dp=said["dp"],
        backend=backend,
        host=wanted.serve.bind,
        port=wanted.ports.api,
        args=arguments(wanted, args),
        policy=kept,
        replace_other=False,
    )
    return Server(inventory=wanted, request=asked.request(wanted, None), policy=kept)


def write(folder: str, files: Mapping[str, str]) -> None:
    """Write files into a folder, and say so, with what an earlier export has left there, of which
    nothing is removed; raises VlaunchError.
    """
    base = Path(folder)
    try:
        left = [name for name in _written(base) if name not in files and (base / name).is_file()]
        for name, text in {**files, _WRITTEN: _listed([*files, *left])}.items():
            path = base / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VlaunchError(
            f"{folder}: {getattr(error, 'strerror', error)}",
            hint="name a folder that you can write: `-o DIR`",
        ) from None
    click.echo(f"{len(files)} {'file' if len(files) == 1 else 'files'} in {folder}", err=True)
    if left:
        gone = " ".join(shlex.quote(str(base / name)) for name in left)
        click.echo(f"of an earlier export, and no part of this one: `rm {gone}`", err=True)


def _written(base: Path) -> list[str]:
    """Return what exports have written into a folder."""
    file = base / _WRITTEN
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [each for each in lines if each and not each.startswith("#")]


def _listed(names: Iterable[str]) -> str:
    said = "# What `vlaunch export` has written here: the next export names what is not its own."
    return "\n".join([said, *sorted(names), ""])
