"""Network checks around a start: before it in the containers that will serve, after it in the
engine's own logs.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.app import certificates
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
from launcher.tools.site import Site, network_verdict
from launcher.tools.site.network_verdict import NetworkRecord
from launcher.tools.site.placement import Placement
from launcher.tools.site.snapshot import ClusterSnapshot

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
    if _is_verified(snapshot.site, request, snapshot.network):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTransport:
    """The transport between a server's ranks: a description, empty for a server on one node; the
    links that are not as required; and the network's record, if that is to name it.
    """

    summary: str = ""
    problems: tuple[Finding, ...] = ()
    record: NetworkRecord | None = None


def read_transport(
    session: Session,
    site: Site,
    request: ServeRequest,
    start: StartPlan,
    *,
    allow: bool,
) -> ServerTransport:
    """Read the transport from the logs of a server's ranks, and warn about nodes that do not show
    it. With `allow`, any will do: the network was not checked before the start.
    """
    inventory = session.inventory
    nodes = [name for name, _ in request.placement.nodes]
    if not request.placement.networked:
        return ServerTransport(summary=_INDEPENDENT_REPLICAS if len(nodes) > 1 else "")
    log = server_spec.log_name(start.spec.name, start.spec.id)
    queries = [network_verdict.query_record(site), *engine_log.query_logs(site, nodes, log)]
    answers = run_by_node(session.transport, queries)
    record = network_verdict.parse_record(answers[inventory.head.name].pop(0))
    # Only a gate that has just passed, or these very containers, make the record current.
    current = (not start.attached and not allow) or _is_verified(site, request, record)
    earlier, level = _earlier_result(site, record if current else NetworkRecord())
    if inventory.accelerator == "cpu":
        return ServerTransport(summary=untrusted.sanitize(earlier))
    logs = {name: engine_log.parse_logs({name: answers.get(name, [])}) for name in nodes}
    unconfirmed = _unconfirmed_nodes(session, logs)
    reading = nccl_log.merge_readings(logs.values())
    link = levels.find_worst_link(reading)
    findings: Sequence[Finding] = ()
    summary = f"{earlier}; not confirmed by the engine's logs"
    if link is not None:
        findings = levels.judge(reading, level, ", ".join(_gpu_names(site)))
        summary = f"{link.title}, {reading.network_links} links (from the engine's logs)"
        summary += f"; {fold(unconfirmed)} not confirmed" if unconfirmed else ""
    return ServerTransport(
        summary=untrusted.sanitize(summary),
        problems=tuple(finding for finding in findings if finding.status != "pass"),
        record=record if record.taken else None,
    )


def enforce_transport(
    session: Session, site: Site, start: StartPlan, transport: ServerTransport, *, allow: bool
) -> None:
    """Warn about links that are not as required, and store the transport for `status`.

    Raises GateError if a link is below the required level and `allow` is false; a server that was
    just started is stopped.
    """
    failures = [finding for finding in transport.problems if finding.status == "fail"]
    if failures and not allow:
        error = GateError(
            f"the server answered, but its network is below the required level: {failures[0].text}",
            evidence=[line for finding in failures for line in finding.evidence.splitlines()],
            hint="\n".join(dict.fromkeys(finding.fix for finding in failures if finding.fix)),
        )
        if not start.attached:
            _stop_server(session, start, error)
        raise error
    for finding in transport.problems:
        session.warn("network", finding.text)
    if transport.record is not None:
        step = network_plan.record_confirmation(
            site,
            transport.record,
            server=start.spec.name,
            id=start.spec.id,
            links=transport.summary,
        )
        for _ in session.transport.run([step.command]):
            pass


def _is_verified(site: Site, request: ServeRequest, record: NetworkRecord) -> bool:
    """True if the stored verdict is for these very containers and covers the server's needs."""
    return network_verdict.is_verified(
        site,
        record,
        require=None,
        collective=request.placement.crosses or request.placement.coupled,
        nodes=_checked_nodes(request),
    )


def _earlier_result(site: Site, record: NetworkRecord) -> tuple[str, Level]:
    """Describe the result from before the start, and return the level that links must reach."""
    if record.passed:
        return f"{record.summary} (verified before the start)", record.required
    gpus, expectations = _gpu_names(site), expectations_file.load_for_user()
    level, _ = required_level(site.inventory, gpus=gpus, rdma=(), expectations=expectations)
    return "not verified", level


def _gpu_names(site: Site) -> list[str]:
    return sorted({gpu.name for facts in site.facts.values() for gpu in facts.gpus or ()})


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


def _logging_hint(inventory: Inventory) -> str:
    names = {name for node in inventory.nodes for name in node.env if name.startswith("NCCL_DEBUG")}
    return f": remove {', '.join(sorted(names))} from `env:`" if names else ""


def _stop_server(session: Session, start: StartPlan, error: VlaunchError) -> None:
    """Stop the new server; if that fails, add the reason to the error's evidence."""
    try:
        snapshot = query_cluster(session, head_only=True)
        started = [
            server
            for server in snapshot.servers_state.running
            if server.name == start.spec.name
            and server.desired
            and server.desired.asked == start.spec.asked
        ]
        session.apply(plan_stop(snapshot.site, started, grace=15))
    except VlaunchError as failure:
        text = f"stopping the server failed: {failure.message}"
        error.evidence = "\n".join(filter(None, [error.evidence, text]))
