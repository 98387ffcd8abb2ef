"""A copy of a model as a command runs it: everybody's part, what is shown meanwhile, and what came
of it.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from launcher.errors import NodeError, together
from launcher.model import fold

if TYPE_CHECKING:
    from launcher.cli.model_programs import Programs
    from launcher.cli.session import Session
    from launcher.plan.copying import Copying
    from launcher.plan.members import Part, Spread

STREAMS = 4
_DAY = 86400.0  # seconds; a copy that moves nothing ends long before


def print_plan(copying: Copying) -> None:
    """Print what would be done."""
    from launcher.sizes import told

    size = told(copying.manifest.bytes)
    files = len(copying.manifest.files)
    click.echo(f"{called(copying)}: {size} in {files} files, from {copying.source}")
    before = copying.source
    for name in copying.targets:
        click.echo(f"  {name} would get {told(copying.missing[name])}, from {before}")
        before = name
    if there := [name for name in _on(copying) if name != copying.source]:
        click.echo(f"  {fold(there)} has it already")


def called(copying: Copying) -> str:
    at = f" ({copying.revision[:12]})" if copying.revision else ""
    return f"{copying.model}{at}"


def _on(copying: Copying, done: Sequence[str] = ()) -> list[str]:
    """Return the nodes that have it, in the inventory's order."""
    from launcher.tools.chain import HERE

    there = {*copying.complete, *done} - {HERE}
    return [name for name in copying.order if name in there]


def nothing(session: Session, copying: Copying) -> None:
    names = fold(_on(copying))
    text = f"{called(copying)} is on {names} already; there was nothing to copy"
    session.done(text, stage="copy", data={"changed": 0})


def copy(
    programs: Programs,
    copying: Copying,
    wishes: Mapping[str, Any],
    *,
    local: str = "",
    last: bool = True,
) -> None:
    """Copy, and tell what came of it.

    Args:
        programs: where each node's program runs.
        copying: who gets what from whom.
        wishes: more that programs are asked, see `chain.copy`; `encrypt` says whether what nodes
            send each other is encrypted, and the inventory where it does not.
        local: the folder, where this machine is the source.
        last: whether the command ends with it.

    Raises:
        NodeError: a node does not have it.
        LockError: the cluster's lock was lost.
    """
    from launcher.plan.members import Connections
    from launcher.sizes import told
    from launcher.spread import spread

    session = programs.session
    parts = _parts(programs, copying, local, wishes)
    what = f"{called(copying)}, {told(copying.manifest.bytes)}"
    if not copying.targets:
        session.begin("copy", f"Compare {what}, with the digests of the hub")
    else:
        session.begin("copy", f"Copy {what}, from {copying.source}")
        session.note("copy", f"order: {' → '.join((copying.source, *copying.targets))}")

    def tunnel(name: str, port: int) -> int:
        address = session.inventory.node(name).ip
        return session.fleet.forward(name, address, port).port

    def hold(command: Any) -> Any:
        here = bool(local) and command.node == copying.source
        return session.fleet.hold_here(command) if here else session.fleet.hold(command)

    def check() -> None:
        """Stop when the lock is lost."""
        list(session.transport.run(()))

    came = session.show(
        spread(
            parts,
            Connections(hold=hold, tunnel=tunnel, check=check),
            total=copying.manifest.bytes,
        )
    )
    _tell(session, copying, came, last=last)


def _parts(
    programs: Programs,
    copying: Copying,
    local: str,
    wishes: Mapping[str, Any],
) -> list[Part]:
    """Return everybody's part, the source's first."""
    from launcher.plan.members import Part
    from launcher.remote import certificate
    from launcher.tools import chain
    from launcher.transport import Command

    session = programs.session
    inventory = session.inventory
    encrypt = wishes.get("encrypt")
    if encrypt is None:
        encrypt = not inventory.private
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
        "cipher": certificate.make() if encrypt and copying.targets else None,
        **{key: wishes[key] for key in wishes if key != "encrypt"},
        "about": about,
    }
    names = [name for name in (copying.source, *copying.targets) if name != chain.HERE]
    words = {name: [f"copying {copying.model}"] for name in copying.targets}
    before = session.transport.record("model push", words)
    parts = []
    if local:
        request = chain.copy(node=chain.HERE, root=local, listen=None, source=True, **common)
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
            listen=(node.ip, inventory.ports.copy) if copying.targets else None,
            source=name == copying.source,
            alone=not copying.targets,
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


def _tell(session: Session, copying: Copying, came: Spread, *, last: bool) -> None:
    from launcher.sizes import told

    total, seconds = copying.manifest.bytes, max(came.seconds, 0.001)
    done = [name for name in copying.targets if name not in came.failed]
    for name in done:
        each = came.members[name]
        if not each.shared:
            text = f"{told(each.received)} received, every byte compared"
            session.step("copy", text, node=name, seconds=each.seconds)
    received = max((came.members[name].received for name in done), default=0)
    rate = f", {told(round(received / seconds))}/s" if received else ""
    there = fold(_on(copying, [copying.source, *done]))
    text = f"{called(copying)} is on {there}: {told(total)}{rate}"
    data = {
        "bytes": total,
        "nodes": _on(copying, [copying.source, *done]),
        "failed": came.failed,
        "received": {name: came.members[name].received for name in done},
        "changed": len(done),
    }
    failed = bool(came.failed)
    if last:
        session.done(
            text, stage="copy", state="failed" if failed else "ok", seconds=came.seconds, data=data
        )
    elif not failed:
        session.note("copy", text, state="ok", data=data)
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
