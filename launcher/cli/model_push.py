"""`vlaunch model push`: a model from one node, or from this machine, to all nodes, in a chain."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli import options
from launcher.cli.choose import chosen
from launcher.cli.command import Call, command
from launcher.errors import NodeError, RequestError, together
from launcher.model import Inventory, Node, fold

if TYPE_CHECKING:
    from launcher.cli.model_programs import Programs
    from launcher.cli.session import Session
    from launcher.plan.copying import Copying
    from launcher.spread import Part, Spread
    from launcher.tools.chain import Seen

STREAMS = 4


def _rate(_: click.Context, __: click.Parameter, value: str | None) -> int:
    from launcher import sizes

    if value is None:
        return 0
    try:
        return sizes.read(value)
    except ValueError:
        raise click.BadParameter("should be bytes a second, such as 500MB") from None


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
@click.option(
    "--rate", callback=_rate, metavar="SIZE", help="Bytes a second of each node, at most."
)
def push(
    call: Call,
    name: str,
    source: str | None,
    here: bool,
    as_: str | None,
    targets: tuple[str, ...],
    compare: bool,
    revision: str,
    rate: int,
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
        programs = _look(ours, asked, model)
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
            _print(copying)
        elif not copying.targets:
            _nothing(ours, copying)
        else:
            _run(ours, programs, copying, local, {"rate": rate, "compare": compare})


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


def _look(session: Session, asked: Sequence[Node], model: str) -> Programs:
    from launcher.cli.model_programs import Programs

    session.begin("look", f"Look for {model} on {fold([node.name for node in asked])}")
    return Programs(session, asked)


def _print(copying: Copying) -> None:
    """Print what would be done."""
    from launcher.sizes import told

    size = told(copying.manifest.bytes)
    files = len(copying.manifest.files)
    click.echo(f"{_called(copying)}: {size} in {files} files, from {copying.source}")
    before = copying.source
    for name in copying.targets:
        click.echo(f"  {name} would get {told(copying.missing[name])}, from {before}")
        before = name
    if there := [name for name in _on(copying) if name != copying.source]:
        click.echo(f"  {fold(there)} has it already")


def _called(copying: Copying) -> str:
    at = f" ({copying.revision[:12]})" if copying.revision else ""
    return f"{copying.model}{at}"


def _on(copying: Copying, done: Sequence[str] = ()) -> list[str]:
    """Return the nodes that have it, in the inventory's order."""
    from launcher.tools.chain import HERE

    there = {*copying.complete, *done} - {HERE}
    return [name for name in copying.order if name in there]


def _nothing(session: Session, copying: Copying) -> None:
    names = fold(_on(copying))
    text = f"{_called(copying)} is on {names} already; there was nothing to copy"
    session.done(text, stage="copy", data={"changed": 0})


def _run(
    session: Session,
    programs: Programs,
    copying: Copying,
    local: _Local | None,
    wishes: Mapping[str, Any],
) -> None:
    """Copy, and tell what came of it; raises NodeError when a node does not have it."""
    from launcher.sizes import told
    from launcher.spread import Connections, spread

    parts = _parts(programs, copying, local, wishes)
    text = f"Copy {_called(copying)}, {told(copying.manifest.bytes)}, from {copying.source}"
    session.begin("copy", text)
    session.note("copy", f"order: {' → '.join((copying.source, *copying.targets))}")

    def tunnel(name: str, port: int) -> int:
        address = session.inventory.node(name).ip
        return session.fleet.forward(name, address, port).port

    def hold(command: Any) -> Any:
        here = local is not None and command.node == copying.source
        return session.fleet.hold_here(command) if here else session.fleet.hold(command)

    def check() -> None:
        """Stop when the lock is lost."""
        list(session.transport.run(()))

    connections = Connections(hold=hold, tunnel=tunnel, check=check)
    fill = STREAMS * copying.manifest.chunk
    came = session.show(spread(parts, connections, total=copying.manifest.bytes, fill=fill))
    _tell(session, copying, came)


def _parts(
    programs: Programs, copying: Copying, local: _Local | None, wishes: Mapping[str, Any]
) -> list[Part]:
    """Return everybody's part, the source's first."""
    from launcher.spread import Part
    from launcher.tools import chain
    from launcher.transport import Command

    inventory = programs.session.inventory
    about = {
        "model": copying.model,
        "revision": copying.revision,
        "from": copying.source,
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    common: dict[str, Any] = {
        "manifest": copying.manifest,
        "key": secrets.token_hex(32),
        "streams": STREAMS,
        **wishes,
        "about": about,
    }
    names = [name for name in (copying.source, *copying.targets) if name != chain.HERE]
    words = {name: [f"copying {copying.model}"] for name in names if name != copying.source}
    before = programs.session.transport.record("model push", words)
    parts = []
    if local is not None:
        request = chain.copy(node=chain.HERE, root=local.path, listen=None, source=True, **common)
        own = Command(
            node=chain.HERE,
            argv=(sys.executable, *chain.on_node(inventory).argv[1:]),
            timeout=_DAY,
            stdin=lambda: chain.program(request),
            hold_stdin=True,
            talk=True,
        )
        parts.append(Part(name=chain.HERE, command=own, gives=True))
    for name in names:
        node = inventory.node(name)
        request_of = chain.copy(
            node=name,
            root=chain.root(programs.where(node), node, copying.model),
            listen=(node.ip, inventory.ports.copy),
            source=name == copying.source,
            label=copying.label,
            links=copying.links,
            refs=copying.refs,
            **common,
        )
        started = programs.command(
            node, request_of, timeout=_DAY, before=before.get(name, ()), talk=True
        )
        parts.append(Part(name=name, command=started, host=node.ip))
    return parts


_DAY = 86400.0  # seconds; a copy that moves nothing ends long before


def _tell(session: Session, copying: Copying, came: Spread) -> None:
    from launcher.sizes import told

    total, seconds = copying.manifest.bytes, max(came.seconds, 0.001)
    done = [name for name in copying.targets if name not in came.failed]
    for name in done:
        each = came.members[name]
        text = f"{told(each.received)} received, every byte compared"
        session.step("copy", text, node=name, seconds=each.seconds)
    received = max((came.members[name].received for name in done), default=0)
    rate = f", {told(round(received / seconds))}/s" if received else ""
    text = f"{_called(copying)} is on {fold(_on(copying, done))}: {told(total)}{rate}"
    data = {
        "bytes": total,
        "nodes": _on(copying, done),
        "failed": came.failed,
        "moved": dict(came.moved),
        "received": {name: came.members[name].received for name in done},
        "changed": len(done),
    }
    failed = bool(came.failed)
    session.done(
        text, stage="copy", state="failed" if failed else "ok", seconds=came.seconds, data=data
    )
    if failed:
        raise together(
            [
                NodeError(
                    name,
                    f"does not have {copying.model}",
                    evidence=why,
                    hint="the same command goes on where it was",
                )
                for name, why in came.failed.items()
            ]
        )
