"""Copy of a model or an image within a session: starts the programs, shows progress and result."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.app.session import Session
from launcher.core.domain import Inventory, fold
from launcher.core.errors import NodeError, combine_errors
from launcher.core.events import State
from launcher.core.sizes import format_size
from launcher.core.transport import Command
from launcher.distribute import chain, members
from launcher.distribute.chain import THIS_MACHINE, ProgramRuntime
from launcher.distribute.coordinator import coordinate_copy
from launcher.distribute.members import Connections, CopyResult, MemberSpec
from launcher.distribute.model_plan import CopyPlan

STREAMS = 4
_DAY = 86400.0  # seconds; a stalled copy stops long before


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """Options of a copy: `rate` limits the bytes per second that each node sends (0: unlimited).

    `encrypt` encrypts the files' bytes between nodes; None: as the inventory says. `compare` reads
    existing files instead of trusting names and times; `cached` leaves files in the page cache.
    """

    rate: int = 0
    encrypt: bool | None = None
    compare: bool = False
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class CopyLocation:
    """Folder of one node in a copy, and the runtime of its program; `load` are the request fields
    that load an image into Docker.
    """

    runtime: ProgramRuntime
    root: str
    load: Mapping[str, Any] | None = None


_Locations = Mapping[str, CopyLocation]  # by node


def display_name(plan: CopyPlan) -> str:
    """Return the model's or image's name with its revision."""
    suffix = f" ({plan.revision[:12]})" if plan.revision else ""
    return f"{plan.model}{suffix}"


def local_runtime(inventory: Inventory) -> ProgramRuntime:
    """Return the runtime of this machine's own Python."""
    runtime = chain.node_runtime(inventory)
    return replace(runtime, argv=(sys.executable, *runtime.argv[1:]))


def run_copy(
    session: Session, verb: str, plan: CopyPlan, locations: _Locations, options: CopyOptions
) -> CopyResult:
    """Run a copy and return its result; `verb` names the command in the nodes' audit logs.

    Raises:
        NodeError: the source failed, or a program did not start.
        LockError: the cluster's lock was lost.
    """
    specs = _build_specs(session, verb, plan, locations, options)
    subject = f"{display_name(plan)}, {format_size(plan.manifest.total_bytes)}"
    if plan.targets:
        session.begin("copy", f"Copy {subject}, from {plan.source}")
        session.note("copy", f"order: {' → '.join((plan.source, *plan.targets))}")
    else:
        session.begin("copy", f"Compare {subject}, with the digests of the hub")

    def hold(command: Command) -> Any:
        local = command.node == THIS_MACHINE
        return session.fleet.hold_local(command) if local else session.fleet.hold(command)

    def tunnel(name: str, port: int) -> int:
        return session.fleet.forward(name, session.inventory.node(name).ip, port).port

    def check() -> None:
        """Raise LockError when the lock is lost."""
        list(session.transport.run(()))

    connections = Connections(start=hold, tunnel=tunnel, check=check)
    return session.show(coordinate_copy(specs, connections, total=plan.manifest.total_bytes))


def _build_specs(
    session: Session, verb: str, plan: CopyPlan, locations: _Locations, options: CopyOptions
) -> list[MemberSpec]:
    """Return the members' specs, the source first."""
    from launcher.app import certificates

    inventory = session.inventory
    common: dict[str, Any] = {
        "manifest": plan.manifest,
        "certificate": certificates.make_certificate("vlaunch copy"),
        "encrypt": not inventory.private if options.encrypt is None else options.encrypt,
        "streams": STREAMS,
        "rate": options.rate,
        "compare": options.compare,
        "cached": options.cached,
        "alone": not plan.targets,
        "links": plan.links,
        "refs": plan.refs,
    }
    changes = {name: [f"copying {plan.model}"] for name in plan.targets}
    before = session.transport.record(verb, changes)
    specs = []
    for name in (plan.source, *plan.targets):
        is_local, location = name == THIS_MACHINE, locations[name]
        host = "" if is_local else inventory.node(name).ip
        listens = plan.targets and not is_local
        request = chain.copy_request(
            node=name,
            root=location.root,
            listen=(host, inventory.ports.copy) if listens else None,
            source=name == plan.source,
            label="" if is_local or location.load else plan.label,
            load=None if name == plan.source else location.load,
            **common,
        )
        command = members.program_command(
            name,
            location.runtime,
            request,
            timeout=_DAY,
            preamble=before.get(name, ()),
            interactive=True,
        )
        specs.append(MemberSpec(name=name, command=command, host=host, pushes=is_local))
    return specs


def nodes_with_copy(plan: CopyPlan, finished: Collection[str] = ()) -> list[str]:
    """Return the nodes with a complete copy, in the inventory's order."""
    complete = {*plan.complete_nodes, *finished} - {THIS_MACHINE}
    return [name for name in plan.all_nodes if name in complete]


def report_result(
    session: Session,
    name: str,
    data: Mapping[str, Any],
    *,
    text: str,
    seconds: float,
    last: bool,
) -> None:
    """Show the result of a copy, as the command's result if it is its `last` step; raises NodeError
    for nodes that failed.
    """
    failed: Mapping[str, str] = data["failed"]
    if last:
        state: State = "failed" if failed else "ok"
        session.done(text, stage="copy", state=state, seconds=seconds, data=data)
    elif not failed:
        session.note("copy", text, state="ok", data=data)
    if failed:
        hint = "run the same command again: it continues the copy"
        problem = f"does not have {name}"
        errors = [NodeError(node, problem, evidence=why, hint=hint) for node, why in failed.items()]
        raise combine_errors(errors, problem)


def report_unchanged(session: Session, name: str, nodes: list[str]) -> None:
    """Report that all nodes have a complete copy already."""
    text = f"{name} is on {fold(nodes)} already; there was nothing to copy"
    session.done(text, stage="copy", data={"changed": 0})
