"""Network checks around a start: before it in the containers that will serve, after it in the
engine's own logs.
"""

import secrets
from collections.abc import Mapping, Sequence

from launcher.app import certificates
from launcher.app.apply import apply
from launcher.app.progress import show_all
from launcher.app.servers import query_cluster
from launcher.app.session import Session
from launcher.core import expectations_file, untrusted
from launcher.core.check import Finding
from launcher.core.domain import Inventory, Level, Secret, fold
from launcher.core.errors import GateError, VlaunchError
from launcher.core.expectations import required_level
from launcher.core.plan import Stage
from launcher.core.transport import run_by_node
from launcher.network import engine_log, levels, nccl_log, network_plan
from launcher.network.check_nccl_command import timestamp
from launcher.network.nccl_log import Reading
from launcher.network.network_shape import CheckOptions, CheckResult
from launcher.serving import server_spec
from launcher.serving.serve_plan import StartPlan
from launcher.serving.serve_request import ServeRequest
from launcher.serving.stop_plan import plan_stop
from launcher.tools import network_verdict
from launcher.tools.network_verdict import NetworkRecord
from launcher.tools.placement import Placement
from launcher.tools.snapshot import ClusterSnapshot

_INDEPENDENT_REPLICAS = (
    "replicas of a dense model exchange no data: only requests and answers cross the network"
)


def plan_network_check(
    inventory: Inventory, snapshot: ClusterSnapshot, request: ServeRequest, *, pair_timeout: float
) -> tuple[tuple[Stage, ...], tuple[str, ...]]:
    """Return the stages that check the network, and notes on earlier results.

    A result for these very containers is not repeated. `mp` ranks stay on their nodes; Ray may
    place ranks on any node. `pair_timeout` is in seconds.
    """
    placement = request.placement
    if not placement.networked:
        note = f"{_INDEPENDENT_REPLICAS}; no network check needed"
        return (), (note,) if len(placement.nodes) > 1 else ()
    notes = _explain_exchange(placement, request.args)
    if _is_verified(snapshot, request, snapshot.network):
        earlier = f"network verified {snapshot.network.taken}: {snapshot.network.summary}"
        return (), (*notes, earlier)
    options = CheckOptions(
        nonce=secrets.token_hex(4) if snapshot.site.facts else "NONCE",
        certificate=Secret(certificates.make_certificate("vlaunch serve")),
        nodes=_checked_nodes(request),
        pair_timeout=pair_timeout,
        collective=placement.crosses or placement.coupled,
        expectations=expectations_file.load_for_user(),
    )
    result = CheckResult(servers=snapshot.network.servers)
    stages = network_plan.check_stages(snapshot.site, options, result, measured_at=timestamp())
    return stages, notes


def _checked_nodes(request: ServeRequest) -> tuple[str, ...]:
    return tuple(name for name, _ in request.placement.nodes) if request.backend == "mp" else ()


def _explain_exchange(placement: Placement, args: Sequence[str]) -> tuple[str, ...]:
    """Explain why coupled replicas need the network; empty for others."""
    if not placement.coupled or len(placement.nodes) == 1:
        return ()
    if placement.experts is None:
        text = (
            "cannot tell whether the model is a mixture of experts; assuming that its replicas"
            " exchange tokens"
        )
        return (text,)
    flags = {arg.replace("_", "-") for arg in args}
    verb = "are spread over" if flags & {"--enable-expert-parallel", "-ep"} else "are split over"
    text = (
        f"the model's {placement.experts} experts {verb} all {placement.dp * placement.tp} ranks of"
        " a stage and exchange tokens between the nodes: the network check includes collectives"
        " over all ranks"
    )
    return (text,)


def confirm_transport(
    session: Session,
    snapshot: ClusterSnapshot,
    request: ServeRequest,
    start: StartPlan,
    *,
    allow: bool,
) -> str:
    """Describe the transport between the server's ranks; empty for a server on one node.

    Raises GateError if the ranks' own logs show less than is required and `allow` is false; a
    server that was just started is stopped.
    """
    inventory = session.inventory
    nodes = [name for name, _ in request.placement.nodes]
    if not request.placement.networked:
        return _INDEPENDENT_REPLICAS if len(nodes) > 1 else ""
    log, site = server_spec.log_name(start.spec.name, start.spec.id), snapshot.site
    queries = [network_verdict.query_record(site), *engine_log.query_logs(site, nodes, log)]
    answers = run_by_node(session.transport, queries)
    record = network_verdict.parse_record(answers[inventory.head.name].pop(0))
    # Only a gate that has just passed, or these very containers, make the record current.
    current = (not start.attached and not allow) or _is_verified(snapshot, request, record)
    earlier, level = _earlier_result(inventory, snapshot, record if current else NetworkRecord())
    if inventory.accelerator == "cpu":
        return untrusted.sanitize(earlier)
    logs = {name: engine_log.parse_logs({name: answers.get(name, [])}) for name in nodes}
    unconfirmed = _unconfirmed_nodes(session, logs)
    reading = nccl_log.merge_readings(logs.values())
    link = levels.find_worst_link(reading)
    if link is None:
        summary = f"{earlier}; not confirmed by the engine's logs"
    else:
        _enforce_level(session, snapshot, start, reading, level, allow=allow)
        summary = f"{link.title}, {reading.network_links} links (from the engine's logs)"
        summary += f"; {fold(unconfirmed)} not confirmed" if unconfirmed else ""
    return _save_confirmation(session, snapshot, record, start, summary)


def _is_verified(snapshot: ClusterSnapshot, request: ServeRequest, record: NetworkRecord) -> bool:
    """True if the stored verdict is for these very containers and covers the server's needs."""
    return network_verdict.is_verified(
        snapshot.site,
        record,
        require=None,
        collective=request.placement.crosses or request.placement.coupled,
        nodes=_checked_nodes(request),
    )


def _earlier_result(
    inventory: Inventory, snapshot: ClusterSnapshot, record: NetworkRecord
) -> tuple[str, Level]:
    """Describe the result from before the start, and return the level that links must reach."""
    if record.passed:
        return f"{record.summary} (verified before the start)", record.required
    gpus, expectations = _gpu_names(snapshot), expectations_file.load_for_user()
    level, _ = required_level(inventory, gpus=gpus, rdma=(), expectations=expectations)
    return "not verified", level


def _gpu_names(snapshot: ClusterSnapshot) -> list[str]:
    return sorted({gpu.name for facts in snapshot.site.facts.values() for gpu in facts.gpus or ()})


def _unconfirmed_nodes(session: Session, logs: Mapping[str, Reading]) -> list[str]:
    """Return the nodes whose ranks log no link, and warn about them."""
    links = {name: levels.find_worst_link(reading) for name, reading in logs.items()}
    unconfirmed = [name for name, link in links.items() if link is None]
    if unconfirmed:
        text = (
            f"{fold(unconfirmed)}: no link between nodes in the ranks' logs; the transport in use"
            " is not confirmed"
        )
        session.warn("network", text + _logging_hint(session.inventory))
    return unconfirmed


def _enforce_level(
    session: Session,
    snapshot: ClusterSnapshot,
    start: StartPlan,
    reading: Reading,
    level: Level,
    *,
    allow: bool,
) -> None:
    """Warn about links below the level; unless allowed, stop a new server and raise GateError."""
    findings = levels.judge(reading, level, ", ".join(_gpu_names(snapshot)))
    problems = [finding for finding in findings if finding.status != "pass"]
    failures = [finding for finding in problems if finding.status == "fail"]
    if failures and not allow:
        raise _level_error(failures, "" if start.attached else _stop_server(session, start))
    for finding in problems:
        session.warn("network", finding.text)


def _level_error(failures: Sequence[Finding], stop_error: str) -> GateError:
    """Return the error for links below the level; `stop_error` tells why the server still runs."""
    return GateError(
        f"the server answered, but its network is below the required level: {failures[0].text}",
        evidence=[line for finding in failures for line in finding.evidence.splitlines()]
        + [stop_error] * bool(stop_error),
        hint="\n".join(dict.fromkeys(finding.fix for finding in failures if finding.fix)),
    )


def _save_confirmation(
    session: Session, snapshot: ClusterSnapshot, record: NetworkRecord, start: StartPlan, text: str
) -> str:
    """Store the confirmed transport for `status`; return it, safe for a terminal."""
    summary = untrusted.sanitize(text)
    if record.taken:
        server = start.spec
        step = network_plan.record_confirmation(
            snapshot.site, record, server=server.name, id=server.id, links=summary
        )
        for _ in session.transport.run([step.command]):
            pass
    return summary


def _logging_hint(inventory: Inventory) -> str:
    names = {name for node in inventory.nodes for name in node.env if name.startswith("NCCL_DEBUG")}
    return f": remove {', '.join(sorted(names))} from `env:`" if names else ""


def _stop_server(session: Session, start: StartPlan) -> str:
    """Stop the new server; return the reason if that failed, else an empty string."""
    try:
        snapshot = query_cluster(session, head_only=True)
        started = [
            server
            for server in snapshot.servers_state.running
            if server.name == start.spec.name
            and server.desired
            and server.desired.asked == start.spec.asked
        ]
        show_all(
            apply(plan_stop(snapshot.site, started, grace=15), session.transport),
            session.printer,
        )
    except VlaunchError as error:
        return f"stopping the server failed: {error.message}"
    return ""
