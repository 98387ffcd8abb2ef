"""Plans that stop servers or remove their records, with gates that verify it."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.agent import state
from launcher.core.check import Finding, judge_removal, waiting
from launcher.core.errors import UnreadableAnswer
from launcher.core.plan import Gate, Plan, Stage, Step
from launcher.core.sizes import format_count
from launcher.core.transport import Answers, Command
from launcher.tools import agent_queries
from launcher.tools.site import Site, servers, serving_judges
from launcher.tools.site.ray_judges import parse_payload
from launcher.tools.site.servers import Server, shown_state

_MARGIN = 60.0  # seconds beyond the drain and grace until a server must be gone


def plan_stop(site: Site, stopping: Sequence[Server], grace: float) -> Plan:
    """Remove the specs of servers, and wait until the supervisor has stopped them; `grace` is in
    seconds.

    The files are on the head's disk, so it works without a running container; but then there is
    nothing to wait for.
    """
    if not stopping:
        return Plan(verb="stop", stages=())
    steps = tuple(_removal_step(site, server.name, state.DESIRED) for server in stopping)
    gates = (_stopped_gate(site, stopping, grace),) if site.head_runs else ()
    title = "Stop the server" if len(stopping) == 1 else f"Stop {len(stopping)} servers"
    return Plan(verb="stop", stages=(Stage(id="stop", title=title, steps=steps, gates=gates),))


def plan_forget(site: Site, names: Sequence[str]) -> Plan:
    """Remove the records of failed servers with their reasons; the history of answers stays."""
    steps = tuple(_removal_step(site, name, state.DESIRED, state.OBSERVED) for name in names)
    stage = Stage(id="forget", title="Remove records of failed servers", steps=steps)
    return Plan(verb="stop", stages=(stage,))


def _removal_step(site: Site, name: str, *files: str) -> Step:
    folder = servers.server_dir(site, name)
    argv = ("rm", "-f", *(f"{folder}/{file}" for file in files))
    title = f"removing the {'spec' if len(files) == 1 else 'record'} of server `{name}`"
    return Step(title=title, command=Command(node=site.head.name, argv=argv, timeout=30))


def _stopped_gate(site: Site, stopping: Sequence[Server], grace: float) -> Gate:
    """Wait until the supervisor reports the servers as stopped, their ports are closed, and Ray has
    their GPUs back.

    Ports are probed from the head's container, so that no other node must be reachable.
    """
    head, names = site.head, {server.name for server in stopping}
    specs = [server.desired for server in stopping if server.desired is not None]
    in_ray = any(spec.ray is not None for spec in specs)
    addresses = {node.name: node.ip for node in site.nodes if node is not head}
    ports = [
        (spec.port, api.node, addresses.get(api.node, spec.api_host(api.node)))
        for spec in specs
        for api in spec.apis
    ]

    def judge(answers: Answers) -> Sequence[Finding]:
        answer, *probes = answers[head.name]
        try:
            report = parse_payload(answer)
        except UnreadableAnswer as error:
            return [waiting(head, error.message, fix="see `vlaunch status`")]
        running_servers = servers.parse_servers(report).running
        alive = []
        for server in running_servers:
            if server.name in names:
                doing = server.observed.doing if server.observed is not None else ""
                alive.append(f"{server.label}: {doing or shown_state(server.state)}")
        open_ports = [
            f"port {port} on {node}"
            for (port, node, _), probe in zip(ports, probes, strict=True)
            if probe.ok
        ]
        others = sum(server.gpus for server in running_servers if server.name not in names)
        return judge_stopped(alive, open_ports, report if in_ray else None, others)

    grace = max([grace, *(spec.policy.grace + spec.policy.drain for spec in specs)])
    probes = (agent_queries.port_open(address, port) for port, _, address in ports)
    return Gate(
        id="server-gone",
        what="the server is gone; its GPUs and port are free",
        queries=(
            serving_judges.query_jobs(site) if in_ray else servers.query_servers(site),
            *(site.in_container(head, probe, timeout=20) for probe in probes),
        ),
        judge=judge,
        deadline=grace + _MARGIN,
        every=0.3,
    )


def judge_stopped(
    alive: Sequence[str],
    ports: Sequence[str],
    payload: Mapping[str, Any] | None,
    others: float,
) -> list[Finding]:
    """Check that servers have stopped, their ports are closed, and their GPUs are free in Ray.

    Args:
        alive: the states of those that still run, in words.
        ports: the ports that are still open, in words.
        payload: the head's answer about Ray, or its `error`; None if they used no Ray GPUs.
        others: the GPUs of servers that keep running.
    """
    remaining = [*alive, *(f"{port} is still open" for port in ports)]
    if payload is not None and "jobs" not in payload:
        remaining.append(f"cannot query Ray: {payload.get('error', 'no answer')}")
    # GPUs of other work, such as a batch job, stay in use.
    elif (
        payload is not None
        and all(job["status"] in serving_judges.OVER for job in payload["jobs"])
        and (busy := serving_judges.busy_gpus(payload) - others) > 0
    ):
        remaining.append(f"Ray still reserves {format_count(busy, 'GPU')}")
    text = "the server is gone; its GPUs and port are free"
    return [judge_removal(remaining, text)]
