"""The network before and after a start: proven in the containers that will serve, then confirmed by
the engine's own logs.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from launcher.app import issue_certificates
from launcher.app.apply import apply
from launcher.app.progress import show_all
from launcher.app.servers import look
from launcher.app.session import Session
from launcher.core import expectations_read, untrusted
from launcher.core.check import Finding
from launcher.core.domain import Inventory, Level, Secret, fold
from launcher.core.errors import GateError, VlaunchError
from launcher.core.expectations import required_level
from launcher.core.plan import Stage
from launcher.core.transport import by_node
from launcher.network import engine_log, levels, nccl_log, network_plan
from launcher.network.check_nccl_command import now
from launcher.network.nccl_log import Reading
from launcher.network.network_shape import Ask, Proof
from launcher.serving import wanted
from launcher.serving.serve_plan import Start
from launcher.serving.serve_request import Request
from launcher.serving.stop_plan import plan_stop
from launcher.tools import network_verdict
from launcher.tools.network_verdict import Record
from launcher.tools.placement import Placement
from launcher.tools.snapshot import ClusterSnapshot

_APART = (
    "replicas of a dense model exchange nothing: only requests and answers pass between the nodes"
)


def prove(
    inventory: Inventory, seen: ClusterSnapshot, request: Request, *, pair_timeout: float
) -> tuple[tuple[Stage, ...], tuple[str, ...]]:
    """Return the stages that prove the network, and what is known of it already, in words.

    What was proven for these very containers is not proven again. `mp` ranks are where they are
    placed; Ray may place them on any node. `pair_timeout` is in seconds.
    """
    placed = request.placement
    if not placed.networked:
        return (), (f"{_APART}, and its network needs no proof",) if len(placed.nodes) > 1 else ()
    if _proven(seen, request, seen.network):
        return (), (
            *_exchange(placed, request.args),
            f"network proven {seen.network.taken}: {seen.network.summary}",
        )
    nonce = secrets.token_hex(4) if seen.site.facts else "NONCE"
    ask = Ask(
        nonce=nonce,
        certificate=Secret(issue_certificates.make("vlaunch serve")),
        nodes=_between(request),
        pair_timeout=pair_timeout,
        collective=placed.crosses or placed.coupled,
        known=expectations_read.load_for_user(),
    )
    proof = Proof(servers=seen.network.servers)
    return network_plan.stages(seen.site, ask, proof, taken=now()), _exchange(placed, request.args)


def _between(request: Request) -> tuple[str, ...]:
    return tuple(name for name, _ in request.placement.nodes) if request.backend == "mp" else ()


def _exchange(placed: Placement, args: Sequence[str]) -> tuple[str, ...]:
    """Say why replicas need the network, where they do."""
    if not placed.coupled or len(placed.nodes) == 1:
        return ()
    if placed.experts is None:
        return (
            (
                "whether the model is a mixture of experts is not known, so its replicas are taken"
                " to exchange tokens"
            ),
        )
    spread = any(word.replace("_", "-") in ("--enable-expert-parallel", "-ep") for word in args)
    how = "are spread over" if spread else "are split over"
    return (
        (
            f"the model's {placed.experts} experts {how} all {placed.dp * placed.tp} ranks of a"
            " stage: every such layer exchanges tokens between the nodes, so the network is proven"
            " with collectives over all ranks"
        ),
    )


def confirm(
    session: Session, seen: ClusterSnapshot, request: Request, start: Start, *, allow: bool
) -> str:
    """Return what the server's ranks talk over, in words; empty when it has one node.

    Raises:
        GateError: their own logs show less than is required, and that is not allowed; a server just
            started is stopped.
    """
    inventory = session.inventory
    nodes = [name for name, _ in request.placement.nodes]
    if not request.placement.networked:
        return _APART if len(nodes) > 1 else ""
    log = wanted.log_name(start.desired.name, start.desired.id)
    answers = by_node(
        session.transport,
        [network_verdict.query_record(seen.site), *engine_log.ask(seen.site, nodes, log)],
    )
    kept = network_verdict.parse_record(answers[inventory.head.name].pop(0))
    # A gate has just been passed, or the record is of these very containers; any other record is of
    # something else.
    ours = (not start.attached and not allow) or _proven(seen, request, kept)
    before, level = _before(inventory, seen, kept if ours else Record())
    if inventory.accelerator == "cpu":
        return untrusted.plain(before)
    logs = {name: engine_log.read({name: answers.get(name, [])}) for name in nodes}
    silent = _silent(session, logs)
    reading = nccl_log.merge(logs.values())
    link = levels.worst(reading)
    if link is None:
        said = f"{before}; not confirmed by the engine's own logs"
    else:
        _require(session, seen, start, reading, level, allow=allow)
        said = f"{link.title}, {reading.network_links} links (from the engine's own logs)"
        said += f"; {fold(silent)} not confirmed" if silent else ""
    return _keep(session, seen, kept, start, said)


def _proven(seen: ClusterSnapshot, request: Request, kept: Record) -> bool:
    """True when the kept verdict is about these very containers and covers what the server
    needs.
    """
    return network_verdict.proven(
        seen.site,
        kept,
        require=None,
        collective=request.placement.crosses or request.placement.coupled,
        nodes=_between(request),
    )


def _before(inventory: Inventory, seen: ClusterSnapshot, kept: Record) -> tuple[str, Level]:
    """Say what was proven before the start, and return the level that links must reach."""
    if kept.passed:
        return f"{kept.summary} (proven before the start)", kept.required
    level, _ = required_level(
        inventory, gpus=_gpus(seen), rdma=(), known=expectations_read.load_for_user()
    )
    return "not proven", level


def _gpus(seen: ClusterSnapshot) -> list[str]:
    """Return the names of the cluster's GPUs."""
    return sorted({gpu.name for each in seen.site.facts.values() for gpu in each.gpus or ()})


def _silent(session: Session, logs: Mapping[str, Reading]) -> list[str]:
    """Return the nodes whose ranks tell of no link, and warn of them."""
    silent = [name for name, reading in logs.items() if levels.worst(reading) is None]
    if silent:
        text = (
            f"{fold(silent)}: the ranks' own logs tell of no link between nodes; what they use is"
            " not confirmed"
        )
        session.warn("network", text + _silenced(session.inventory))
    return silent


def _require(
    session: Session,
    seen: ClusterSnapshot,
    start: Start,
    reading: Reading,
    level: Level,
    *,
    allow: bool,
) -> None:
    """Warn of links that are below the level; unless that is allowed, stop a server that was just
    started, and raise GateError.
    """
    judged = levels.judge(reading, level, ", ".join(_gpus(seen)))
    told = [each for each in judged if each.status != "pass"]
    failures = [each for each in told if each.status == "fail"]
    if failures and not allow:
        raise _below(failures, "" if start.attached else _stop(session, start))
    for each in told:
        session.warn("network", each.text)


def _below(failures: Sequence[Finding], left: str) -> GateError:
    """Return the error that links are below the level; `left` says why the server still runs, if it
    could not be stopped.
    """
    return GateError(
        f"the server answered, but its network is below what is required: {failures[0].text}",
        evidence=[line for each in failures for line in each.evidence.splitlines()]
        + [left] * bool(left),
        hint="\n".join(dict.fromkeys(each.fix for each in failures if each.fix)),
    )


def _keep(session: Session, seen: ClusterSnapshot, kept: Record, start: Start, text: str) -> str:
    """Keep what the engine's logs say beside the verdict, for `status`; returns it, fit for a
    terminal.
    """
    said = untrusted.plain(text)
    if kept.taken:
        server = start.desired
        step = network_plan.confirmed(seen.site, kept, server=server.name, id=server.id, said=said)
        for _ in session.transport.run([step.command]):
            pass
    return said


def _silenced(inventory: Inventory) -> str:
    """Name the user's own variables that may have kept NCCL from writing."""
    names = {name for node in inventory.nodes for name in node.env if name.startswith("NCCL_DEBUG")}
    return f": take {', '.join(sorted(names))} out of `env:`" if names else ""


def _stop(session: Session, start: Start) -> str:
    """Stop the server that was just started; return why it could not be stopped, or nothing."""
    try:
        seen = look(session, head_only=True)
        found = [
            each
            for each in seen.kept.running
            if each.desired and each.desired.asked == start.desired.asked
        ]
        show_all(
            apply(plan_stop(seen.site, found, grace=15), session.transport),
            session.to,
        )
    except VlaunchError as error:
        return f"it could not be stopped: {error.message}"
    return ""
