"""`vlaunch model push`: a model from one node, or from this machine, to all nodes, in a chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.cli import options
from launcher.cli.choose import chosen
from launcher.cli.command import Call, command
from launcher.errors import RequestError
from launcher.model import Inventory, Node, fold

if TYPE_CHECKING:
    from launcher.cli.model_programs import Programs
    from launcher.cli.session import Session
    from launcher.tools.chain import Seen

F = TypeVar("F", bound=Callable[..., Any])


def rate_of(_: click.Context, __: click.Parameter, value: str | None) -> int:
    """Read bytes a second; raises BadParameter."""
    from launcher import sizes

    if value is None:
        return 0
    try:
        return sizes.read(value)
    except ValueError:
        raise click.BadParameter("should be bytes a second, such as 500MB") from None


def how(function: F) -> F:
    """Add the flags of a transfer: `rate` and `encrypt`."""
    for option in (
        click.option(
            "--encrypt/--no-encrypt",
            default=None,
            help=(
                "Encrypt what nodes send each other (default: unless `network: {private: true}` is"
                " in the inventory)."
            ),
        ),
        click.option(
            "--rate", callback=rate_of, metavar="SIZE", help="Bytes a second of each node, at most."
        ),
    ):
        function = option(function)
    return function


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="bring a model to all nodes, from one that has it or from this machine",
)
@click.argument("name", metavar="MODEL|PATH")
@click.option("--from", "source", metavar="NODE", help="Copy from this node.")
@click.option("--here", is_flag=True, help="Copy from this machine.")
@click.option("--as", "as_", metavar="PATH", help="A folder's path on the nodes (with --here).")
@click.option(
    "--to",
    "targets",
    multiple=True,
    metavar="NODE",
    help="Only to this node (may be given several times).",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Read what is there already, instead of believing sizes and times.",
)
@click.option("--revision", default="", help="A commit, or the name of one (main).")
@how
def push(
    call: Call,
    name: str,
    source: str | None,
    here: bool,
    as_: str | None,
    targets: tuple[str, ...],
    compare: bool,
    revision: str,
    **wishes: Any,
) -> None:
    """Copy a model to every node, each node passing on to the next one what it has already got, so
    that all have it in about the time of one copy.

    MODEL is a name such as Qwen/Qwen3-8B, in the Hugging Face cache of a node, or a folder of the
    nodes as containers see it (/data/models/mine). ./FOLDER and ~/FOLDER are of this machine, as
    is whatever is named with --here.

    Nodes that have some of it get the rest. A node that fails stops no other. After Ctrl-C, or
    whatever else went wrong, the same command goes on where it was. Every byte is compared on every
    node before it counts, and a model is seen only when it is whole.
    """
    from launcher.cli import model_copying
    from launcher.cli.model_programs import check_path
    from launcher.plan.copying import plan_copy
    from launcher.tools.chain import HERE

    if (as_ or here) and source:
        raise click.UsageError("--from names a node; --here and --as are for this machine")
    here = here or name.startswith(("./", "../", "~", "."))
    if as_ and not here:
        raise click.UsageError("--as goes with a folder of this machine")
    wanted = chosen(call.inventory, targets)
    local = _Local.find(call.inventory, name, as_) if here else None
    model = local.model if local else name
    check_path(call.inventory, model)
    givers = chosen(call.inventory, [source]) if source else call.inventory.nodes
    asked = [n for n in call.inventory.nodes if n in wanted or (n in givers and not local)]
    with call.session(nodes=asked) as session, call.locked(session) as ours:
        programs = look(ours, asked, model)
        seen = programs.look(model, files=True)
        if local is not None:
            seen = {HERE: local.seen(), **seen}
        copying = plan_copy(
            model,
            seen,
            source=HERE if local else source or "",
            revision=revision,
            targets=[node.name for node in wanted],
            compare=compare,
        )
        if call.dry_run:
            model_copying.print_plan(copying)
        elif not copying.targets:
            model_copying.nothing(ours, copying)
        else:
            wishes["compare"] = compare
            model_copying.copy(programs, copying, wishes, local=local.path if local else "")


class _Local:
    """A model of this machine: `path` is its folder or cache, `model` what it is called on the
    nodes.
    """

    def __init__(self, path: str, model: str, request: Mapping[str, Any]) -> None:
        self.path, self.model, self.request = path, model, request

    @classmethod
    def find(cls, inventory: Inventory, name: str, as_: str | None) -> _Local:
        """Find what a name means here; raises RequestError."""
        from launcher.payload.chain.look import folder

        path = Path(name).expanduser()
        if path.is_dir() and (name.startswith((".", "~", "/")) or as_):
            path = path.resolve()
            homes = {node.hf_home.rstrip("/") for node in inventory.nodes}
            if not as_ and len(homes) > 1:
                raise RequestError(
                    "the nodes' hf_home differ, so the folder has no one path",
                    hint="name it: `--as PATH`",
                )
            target = as_ or f"{homes.pop()}/{path.name}"
            return cls(str(path), target, {"path": str(path)})
        if name.startswith((".", "~", "/")):
            raise RequestError(f"{name}: no such folder on this machine")
        hub = _own_hub()
        if not (hub / folder(name)).is_dir():
            raise RequestError(
                f"{name} is not in this machine's Hugging Face cache", evidence=str(hub)
            )
        return cls(str(hub / folder(name)), name, {"hub": str(hub), "name": name})

    def seen(self) -> Seen:
        """Look at it."""
        from launcher.payload.chain.look import look
        from launcher.tools import decode
        from launcher.tools.chain import Seen

        said = look({**self.request, "files": True, "room": self.path})
        seen = decode.fit(Seen, said, "what this machine has")
        return replace(seen, models=tuple(replace(each, name=self.model) for each in seen.models))


def _own_hub() -> Path:
    """Return this machine's cache, where huggingface_hub looks for it."""
    import os

    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def look(session: Session, asked: Sequence[Node], model: str) -> Programs:
    """Tell what is looked for, and return what to look with."""
    from launcher.cli.model_programs import Programs

    session.begin("look", f"Look for {model} on {fold([node.name for node in asked])}")
    return Programs(session, asked)
