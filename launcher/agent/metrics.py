"""State of servers for Prometheus: faults, canaries and queues, living ranks and agents, and the
last network check.

It reads the servers' files, which the supervisor writes every few seconds, so that scraping does
not disturb the supervisor. It contains neither secrets nor log text.

The names and units follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest

from . import state
from .desired import Desired
from .observed import OVER, STATES, VERDICTS, Observed

SILENT = 60.0  # seconds without a report after which an agent counts as down

HELP: Mapping[str, str] = {
    "agent_written_timestamp_seconds": "Time of the agent's last record written on schedule.",
    "node_agent_up": "1 if the node's agent is connected to the head's agent.",
    "network_passed": "1 if the last network check reached the required level.",
    "network_check_timestamp_seconds": "Time of the last network check.",
    "server_info": "Server with a spec: model, backend and task as labels.",
    "server_state": "1 for the server's current state.",
    "server_written_timestamp_seconds": "Time when the supervisor last checked the server.",
    "server_ready_timestamp_seconds": "Time of the engine's first answer.",
    "server_first_start_seconds": "Duration of the server's first start.",
    "server_engine_starts_total": "Number of engine starts of the server.",
    "server_restarts_left": "Restarts left; absent if unlimited.",
    "server_faults_total": "Faults that stopped the server's engine.",
    "server_last_fault_timestamp_seconds": "Time of the server's last fault.",
    "server_recovery_seconds": "Time from a fault until the server was ready again.",
    "server_canary_seconds": "Duration of the supervisor's last canary request.",
    "server_canary_timestamp_seconds": "Time when the last canary was answered.",
    "server_canary_waiting_seconds": "Time that the current canary has waited.",
    "server_health": "1 for the server's health, by its key in `vlaunch status --json`.",
    "server_still_seconds": "Seconds without an engine step while a canary waits or fails.",
    "server_longest_step_seconds": "The longest such time that ended in progress.",
    "server_wedged": "1 for the rank in which a suspect server hangs.",
    "server_requests_running": "Requests that vLLM is running, over all endpoints.",
    "server_requests_waiting": "Requests queued in vLLM, over all endpoints.",
    "server_tokens_per_second": "Tokens generated per second since the previous check.",
    "endpoint_up": "1 if the endpoint answers the supervisor.",
    "rank_up": "1 if the rank's process is alive; absent if unknown.",
}


class Page:
    """Samples, collected by prometheus_client."""

    def __init__(self) -> None:
        self._families = {
            name: Metric(
                f"vlaunch_{name.removesuffix('_total')}",
                description,
                "counter" if name.endswith("_total") else "gauge",
            )
            for name, description in HELP.items()
        }

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """Add a sample, unless its value is unknown."""
        if value is not None and math.isfinite(value):
            self._families[name].add_sample(f"vlaunch_{name}", labels, float(value))

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with samples."""
        return [family for family in self._families.values() if family.samples]


def render_metrics(now: float, age: float, agents: Mapping[str, float], folder: str = "") -> str:
    """Render the page at a time (seconds since 1970); `age` is the seconds since the main loop's
    last round, `agents` the seconds since each node's report.
    """
    page, nodes, late, registry = Page(), set[str](), age, CollectorRegistry()
    registry.register(page)
    for name in state.server_names(folder):
        status = state.read_status(name, folder)
        try:
            spec = state.read_spec(name, folder)
        except ValueError:
            spec = None
        if spec is not None:
            nodes |= {*spec.addresses, *spec.nodes}
            if status is not None:  # a full disk delays a record
                late = max(late, now - status.written - spec.policy.canary)
        if status is not None and (spec is not None or status.state not in OVER):
            _add_server(page, spec, status)
    page.add("agent_written_timestamp_seconds", now - late)
    for node in sorted(nodes | agents.keys()):
        page.add("node_agent_up", agents.get(node, SILENT) + age < SILENT, node=node)
    _add_network(page, folder)
    return generate_latest(registry).decode()


def _add_network(page: Page, folder: str) -> None:
    """Add the last verdict, which the launcher writes."""
    file = os.path.join(folder or state.FOLDER, state.NETWORK)
    verdict: Any = state.read_json(file)
    if isinstance(verdict, Mapping) and isinstance(verdict.get("passed"), bool):
        page.add("network_passed", verdict["passed"], required=str(verdict.get("required")))
        with contextlib.suppress(OSError):
            page.add("network_check_timestamp_seconds", os.stat(file).st_mtime)


def _add_server(page: Page, spec: Desired | None, status: Observed) -> None:
    name, is_ready = status.name, status.state == "ready"
    backend = spec.backend if spec is not None else ""
    page.add("server_info", 1, server=name, model=status.model, backend=backend, task=status.task)
    for state_ in STATES:
        page.add("server_state", state_ == status.state, server=name, state=state_)
    for verdict in VERDICTS:
        page.add("server_health", verdict == status.verdict, server=name, verdict=verdict)
    if status.wedge is not None and status.verdict == "suspect":
        rank, node, gpu = status.wedge.rank or "unknown", status.wedge.node, status.wedge.gpu
        page.add("server_wedged", 1, server=name, rank=rank, node=node, gpu=gpu)
    last, load = status.last_fault, status.load
    values: Mapping[str, float | None] = {
        "server_written_timestamp_seconds": status.written,
        "server_ready_timestamp_seconds": status.ready_at,
        "server_first_start_seconds": status.first_start,
        "server_engine_starts_total": status.generation,
        "server_restarts_left": status.restarts_left,
        "server_faults_total": status.fault_count,
        "server_last_fault_timestamp_seconds": last.at if last else None,
        "server_recovery_seconds": last.ready_again_after if last else None,
        "server_canary_seconds": status.seconds,
        "server_canary_timestamp_seconds": status.answered,
        "server_canary_waiting_seconds": status.asking if is_ready else None,
        "server_still_seconds": status.still if is_ready else None,
        "server_longest_step_seconds": status.longest_step if is_ready else None,
        "server_requests_running": load.running if load else None,
        "server_requests_waiting": load.waiting if load else None,
        "server_tokens_per_second": load.tokens_per_s if load else None,
    }
    for metric, value in values.items():
        page.add(metric, value, server=name)
    if spec is not None:
        for api in spec.apis:
            page.add("endpoint_up", is_ready, server=name, node=api.node, port=str(spec.port))
    for node, ranks in status.alive.items():
        for rank, lives in ranks.items():
            page.add("rank_up", lives, server=name, node=node, rank=rank)
