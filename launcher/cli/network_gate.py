"""The network before and after a start: proven in the containers that will serve, then confirmed by the engine's own logs."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.apply import apply
from launcher.checks import crossing, levels
from launcher.checks.shape import worst
from launcher.cli import expected
from launcher.cli.check_nccl import now
from launcher.errors import GateError
from launcher.events import Event
from launcher.plan import engine_log, network, running
from launcher.plan.stop import plan_stop
from launcher.ui.progress import show_all
from launcher.watch import by_node

if TYPE_CHECKING:
    from launcher.cli.session import Session
    from launcher.model import Inventory
    from launcher.plan.serve import Request, Seen, Start
    from launcher.plan.shape import Stage


def prove(inventory: Inventory, seen: Seen, request: Request) -> tuple[tuple[Stage, ...], str]:
    """Return the stages that prove the network, and what is known of it already.

    What was proven for this very incarnation of the cluster is not proven again; `mp` ranks are new containers every time.
    """
    placed = request.placement
    if len(placed.nodes) == 1:
        return (), ""
    split = network.split(inventory, placed, seen.config)
    known = network.proven(inventory, seen.facts, seen.network, require=None, collective=placed.crosses)
    if request.backend == "ray" and known:
        figures = crossing.kept(seen.network)
        cost = f"; {crossing.judge(split, figures).text}" if split is not None and figures is not None else ""
        return (), f"network proven {seen.network['taken']}: {seen.network['summary']}{cost}"
    nonce = secrets.token_hex(4) if seen.facts else "NONCE"
    ask = network.Ask(nonce=nonce, collective=placed.crosses, crossing=split, known=expected.load())
    return network.stages(inventory, seen.facts, ask, network.Proof(), taken=now()), ""


def noted(start: Start, known: str) -> Start:
    """Add what is known of the network to what is said before a start."""
    if start.attached or not known:
        return start
    return replace(start, plan=replace(start.plan, notes=(*start.plan.notes, known)))


def confirm(session: Session, seen: Seen, request: Request, start: Start, *, allow: bool) -> str:
    """Return what the server's ranks talk over, in words; empty when it has one node.

    Raises:
        GateError: their own logs show less than is required, and that is not allowed; a server just started is stopped.
    """
    inventory = session.inventory
    nodes = [name for name, _ in request.placement.nodes]
    if len(nodes) == 1:
        return ""
    asked = [network.ask_record(inventory, seen.facts), *engine_log.ask(inventory, request.backend, nodes, start.job or "rank")]
    answers = by_node(session.transport, asked)
    kept = network.parse_record(answers[inventory.head.name].pop(0))
    before = f"{kept['summary']} (proven before the start)" if kept.get("passed") else "not proven"
    if inventory.accelerator == "cpu":
        return before
    reading = engine_log.read({name: said for name, said in answers.items() if said})
    found = levels.judge(reading, kept.get("required") or inventory.require)
    worst_link = levels.worst(reading)
    text = f"{worst_link.title}, {reading.network_links} links" if worst_link is not None else "not known"
    if worst(found) != "fail":
        return f"{text} (from the engine's own logs)"
    failures = [each for each in found if each.status == "fail"]
    if not allow:
        if not start.attached:
            _stop(session)
        raise GateError(
            f"the server answered, but its network is below what is required: {failures[0].text}",
            evidence=[line for each in failures for line in each.evidence.splitlines()],
            hint="\n".join(dict.fromkeys(each.fix for each in failures if each.fix)),
        )
    session.to.show(Event(kind="warning", stage="network", text=failures[0].text, state="warn"))
    return text


def _stop(session: Session) -> None:
    from launcher.cli.server import look

    seen = look(session)
    found = running.find(session.inventory, seen.facts, seen.said)
    show_all(apply(plan_stop(session.inventory, seen.facts, found, grace=15), session.transport), session.to)
