"""`vlaunch model copy`: copy a model from one node, or from this machine, to all nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.app import options
from launcher.app.choose import chosen
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.core import decode, sizes
from launcher.core.domain import Inventory, Node, fold
from launcher.core.errors import RequestError
from launcher.core.sizes import told
from launcher.distribute import chain
from launcher.distribute import copying as copies
from launcher.distribute.chain import HERE, Seen
from launcher.distribute.copying import Options
from launcher.distribute.model_plan import Copying, plan_copy
from launcher.distribute.model_programs import Programs, check_path
from launcher.distribute.node import look as scan

F = TypeVar("F", bound=Callable[..., Any])

SOURCE = click.option("--from", "source", metavar="NODE", help="Copy from this node.")
REVISION = click.option("--revision", default="", help="A commit, or the name of one (main).")


def _rate(_: click.Context, __: click.Parameter, value: str | None) -> int:
    """Parse bytes a second; raises BadParameter."""
    if value is None:
        return 0
    try:
        return sizes.read(value)
    except ValueError:
        raise click.BadParameter("should be bytes a second, such as 500MB") from None


def transfer(function: F) -> F:
    """Add the flags of a transfer: `targets`, `rate` and `encrypt`."""
    for option in (
        click.option(
            "--encrypt/--no-encrypt",
            default=None,
            help=(
                "Encrypt the files' bytes between nodes (default: unless `network: {private: true}`"
                " is in the inventory)."
            ),
        ),
        click.option(
            "--rate", callback=_rate, metavar="SIZE", help="Bytes a second of each node, at most."
        ),
        click.option(
            "--to",
            "targets",
            multiple=True,
            metavar="NODE",
            help="Only to this node (may be given several times).",
        ),
    ):
        function = option(function)
    return function


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Copy a model from a node or this machine to all nodes",
)
@click.argument("name", metavar="MODEL|PATH")
@SOURCE
@click.option("--here", is_flag=True, help="Copy from this machine.")
@click.option("--as", "as_", metavar="PATH", help="A folder's path on the nodes (with --here).")
@click.option(
    "--compare",
    is_flag=True,
    help="Read files that are there already, instead of trusting sizes and times.",
)
@REVISION
@transfer
def copy(
    call: Call,
    name: str,
    source: str | None,
    here: bool,
    as_: str | None,
    targets: tuple[str, ...],
    compare: bool,
    revision: str,
    **limits: Any,
) -> None:
    """Copy a model to every node. Each node passes on what it has received to the next one, so all
    have it in about the time of one copy.

    MODEL is a name such as Qwen/Qwen3-8B, in the Hugging Face cache of a node, or a folder of the
    nodes as containers see it (/data/models/mine). ./FOLDER and ~/FOLDER are of this machine, as
    is whatever is named with --here.

    Nodes that have some of it get the rest. A node that fails stops no other. After an
    interruption, the same command continues the copy. Every byte is compared on every node before
    it counts, and a model is seen only when it is complete.
    """
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
            print_plan(copying)
        else:
            given = Options(compare=compare, **limits)
            bring(programs, copying, given, local=local.path if local else "")


def print_plan(copying: Copying) -> None:
    """Print what would be done."""
    size = told(copying.manifest.bytes)
    files = len(copying.manifest.files)
    click.echo(f"{copies.called(copying)}: {size} in {files} files, from {copying.source}")
    before = copying.source
    for name in copying.targets:
        click.echo(f"  {name} would get {told(copying.missing[name])}, from {before}")
        before = name
    if there := [name for name in copies.present(copying) if name != copying.source]:
        click.echo(f"  {fold(there)} has it already")


def bring(
    programs: Programs,
    copying: Copying,
    given: Options,
    *,
    local: str = "",
    last: bool = True,
    verify: bool = False,
) -> None:
    """Copy a model, and show the result.

    Args:
        programs: where each node's program runs.
        copying: the plan.
        given: the options of the copy.
        local: the folder, where this machine is the source.
        last: whether the command ends with it.
        verify: whether the source's files are compared although no node lacks them.

    Raises:
        NodeError: a node does not have it.
        LockError: the cluster's lock was lost.
    """
    session, name = programs.session, copies.called(copying)
    if not copying.targets and not verify:
        if last:
            copies.nothing(session, name, copies.present(copying))
        return
    places = {
        node.name: copies.Place(
            where=programs.where(node), root=chain.root(programs.where(node), node, copying.model)
        )
        for node in programs.nodes
    }
    if local:
        where = copies.on_here(session.inventory)
        places[HERE] = copies.Place(where=where, root=local)
    came = copies.run(session, "model copy", copying, places, given)
    done = [name for name in copying.targets if name not in came.failed]
    for node in done:
        member = came.members[node]
        if not member.shared:
            text = f"{told(member.received)} received, every byte compared"
            session.step("copy", text, node=node, seconds=member.seconds)
    received = {node: came.members[node].received for node in done}
    most = max(received.values(), default=0)
    rate = f", {told(round(most / max(came.seconds, 0.001)))}/s" if most else ""
    total, nodes = copying.manifest.bytes, copies.present(copying, [copying.source, *done])
    data = {
        "bytes": total,
        "nodes": nodes,
        "failed": came.failed,
        "received": received,
        "changed": len(done),
    }
    text = f"{name} is on {fold(nodes)}: {told(total)}{rate}"
    copies.report(session, copying.model, data, text=text, seconds=came.seconds, last=last)


class _Local:
    """A model of this machine: `path` is its folder or cache, `model` what it is called on the
    nodes.
    """

    def __init__(self, path: str, model: str, request: Mapping[str, Any]) -> None:
        self.path, self.model, self.request = path, model, request

    @classmethod
    def find(cls, inventory: Inventory, name: str, as_: str | None) -> _Local:
        """Find what a name means here; raises RequestError."""
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
        if not (hub / scan.folder(name)).is_dir():
            raise RequestError(
                f"{name} is not in this machine's Hugging Face cache", evidence=str(hub)
            )
        return cls(str(hub / scan.folder(name)), name, {"hub": str(hub), "name": name})

    def seen(self) -> Seen:
        """Look at it."""
        said = scan.look({**self.request, "files": True, "room": self.path})
        seen = decode.fit(Seen, said, "what this machine has")
        return replace(seen, models=tuple(replace(each, name=self.model) for each in seen.models))


def _own_hub() -> Path:
    """Return this machine's cache, where huggingface_hub looks for it."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def look(session: Session, asked: Sequence[Node], model: str) -> Programs:
    """Tell what is looked for, and return what to look with."""
    session.begin("look", f"Look for {model} on {fold([node.name for node in asked])}")
    return Programs(session, asked)
