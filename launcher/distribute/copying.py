"""Runner of a copy of a model or an image: a program on each node, progress and the result."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.app.session import Session
from launcher.core.domain import Inventory, fold
from launcher.core.errors import NodeError, together
from launcher.core.events import State
from launcher.core.sizes import told
from launcher.core.transport import Command
from launcher.distribute import chain, members
from launcher.distribute.chain import HERE, Where
from launcher.distribute.members import Connections, Part, Spread
from launcher.distribute.model_plan import Copying
from launcher.distribute.run_copy import spread

STREAMS = 4
_DAY = 86400.0  # seconds; a copy that moves nothing ends long before


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a copy: `rate` is bytes a second that each node sends at most (0: no limit).

    Nodes encrypt the files' bytes as `encrypt` says, or else the inventory. `compare` reads files
    that are there instead of trusting names and times; `cached` leaves files in the page cache.
    """

    rate: int = 0
    encrypt: bool | None = None
    compare: bool = False
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """One node's place in a copy: its program, its folder, and, for images, what Docker is asked to
    do with the folder's files (`chain.load`).
    """

    where: Where
    root: str
    load: Mapping[str, Any] | None = None


def called(copying: Copying) -> str:
    """Return the name of what is copied, with its revision."""
    at = f" ({copying.revision[:12]})" if copying.revision else ""
    return f"{copying.model}{at}"


def on_here(inventory: Inventory) -> Where:
    """Run a program with this machine's own Python."""
    where = chain.on_node(inventory)
    return replace(where, argv=(sys.executable, *where.argv[1:]))


def run(
    session: Session, verb: str, copying: Copying, places: Mapping[str, Place], options: Options
) -> Spread:
    """Copy, and return what came of it; `verb` names the command in the nodes' audit logs.

    Raises:
        NodeError: the source failed, or a program did not start.
        LockError: the cluster's lock was lost.
    """
    parts = _parts(session, verb, copying, places, options)
    what = f"{called(copying)}, {told(copying.manifest.bytes)}"
    if copying.targets:
        session.begin("copy", f"Copy {what}, from {copying.source}")
        session.note("copy", f"order: {' → '.join((copying.source, *copying.targets))}")
    else:
        session.begin("copy", f"Compare {what}, with the digests of the hub")

    def hold(command: Command) -> Any:
        here = command.node == HERE
        return session.fleet.hold_here(command) if here else session.fleet.hold(command)

    def tunnel(name: str, port: int) -> int:
        return session.fleet.forward(name, session.inventory.node(name).ip, port).port

    def check() -> None:
        """Stop when the lock is lost."""
        list(session.transport.run(()))

    connections = Connections(hold=hold, tunnel=tunnel, check=check)
    return session.show(spread(parts, connections, total=copying.manifest.bytes))


def _parts(
    session: Session, verb: str, copying: Copying, places: Mapping[str, Place], options: Options
) -> list[Part]:
    """Return the part of each node, the source's first."""
    from launcher.app import issue_certificates

    inventory = session.inventory
    common: dict[str, Any] = {
        "manifest": copying.manifest,
        "certificate": issue_certificates.make("vlaunch copy"),
        "encrypt": not inventory.private if options.encrypt is None else options.encrypt,
        "streams": STREAMS,
        "rate": options.rate,
        "compare": options.compare,
        "cached": options.cached,
        "alone": not copying.targets,
        "links": copying.links,
        "refs": copying.refs,
    }
    changes = {name: [f"copying {copying.model}"] for name in copying.targets}
    before = session.transport.record(verb, changes)
    parts = []
    for name in (copying.source, *copying.targets):
        here, place = name == HERE, places[name]
        host = "" if here else inventory.node(name).ip
        listens = copying.targets and not here
        request = chain.copy(
            node=name,
            root=place.root,
            listen=(host, inventory.ports.copy) if listens else None,
            source=name == copying.source,
            label="" if here or place.load else copying.label,
            load=None if name == copying.source else place.load,
            **common,
        )
        command = members.command(
            name,
            place.where,
            request,
            timeout=_DAY,
            before=before.get(name, ()),
            talk=True,
        )
        parts.append(Part(name=name, command=command, host=host, gives=here))
    return parts


def present(copying: Copying, done: Collection[str] = ()) -> list[str]:
    """Return the nodes that have it, in the inventory's order."""
    names = {*copying.complete, *done} - {HERE}
    return [name for name in copying.order if name in names]


def report(
    session: Session,
    name: str,
    data: Mapping[str, Any],
    *,
    text: str,
    seconds: float,
    last: bool,
) -> None:
    """Show the end of a copy, as that of the command if it is its `last` part; raises NodeError
    for nodes that `failed`.
    """
    failed: Mapping[str, str] = data["failed"]
    if last:
        state: State = "failed" if failed else "ok"
        session.done(text, stage="copy", state=state, seconds=seconds, data=data)
    elif not failed:
        session.note("copy", text, state="ok", data=data)
    if failed:
        hint = "run the same command again: it continues the copy"
        what = f"does not have {name}"
        errors = [NodeError(node, what, evidence=why, hint=hint) for node, why in failed.items()]
        raise together(errors, what)


def nothing(session: Session, name: str, nodes: list[str]) -> None:
    """Say that all nodes have it."""
    text = f"{name} is on {fold(nodes)} already; there was nothing to copy"
    session.done(text, stage="copy", data={"changed": 0})
