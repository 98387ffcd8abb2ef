"""What `vlaunch export` is told of a server: the flags, and the request that they make, as `serve`
would have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.errors import RequestError
from launcher.model import Backend, Inventory

if TYPE_CHECKING:
    from launcher.payload.agent.desired import Policy
    from launcher.plan.request import Request

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
    from launcher.cli.start import Asked, policy
    from launcher.cli.vllm_args import arguments

    wanted, args = session.read(None, named), said["args"]
    model = said["model"] or wanted.serve.model
    if model is None:
        raise RequestError(
            "no model is named", hint="add `--model MODEL`, or `serve: {model: …}` in the inventory"
        )
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
