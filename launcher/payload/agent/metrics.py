"""What the head's agent knows of servers, as text for Prometheus: their state, faults, canaries and
queues, which ranks and which nodes' agents live, and the last network check.

It is made of the files alone, which the keeper writes every few seconds, so that nobody who reads
it disturbs the keeper. There is neither a secret nor a text of a log in it.

The names and units follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import state
from .desired import Desired
from .observed import OVER, STATES, VERDICTS, Observed

if TYPE_CHECKING:
    from prometheus_client import Metric

PORT = 29580  # where they are served (`ports: {metrics: …}`) unless something else is said
SILENT = 60.0  # seconds after which an agent that was not heard is not there

HELP: Mapping[str, tuple[str, str]] = {
    "agent_written_timestamp_seconds": ("gauge", "When the head's agent wrote its record last."),
    "node_agent_up": ("gauge", "1 for a node whose agent is connected to the head's."),
    "network_passed": ("gauge", "1 when the last network check reached the level it required."),
    "network_check_timestamp_seconds": ("gauge", "When the network was checked last."),
    "server_info": ("gauge", "A server that is wanted: its model, backend and task."),
    "server_state": ("gauge", "1 for the state that a server is in."),
    "server_written_timestamp_seconds": ("gauge", "When the keeper looked at a server last."),
    "server_ready_timestamp_seconds": ("gauge", "When a server's engine gave its first answer."),
    "server_first_start_seconds": ("gauge", "How long the first start of a server took."),
    "server_engine_starts_total": ("counter", "How often an engine of a server was started."),
    "server_restarts_left": ("gauge", "Restarts that are left; absent where any number is."),
    "server_faults_total": ("counter", "Faults that ended an engine of a server."),
    "server_last_fault_timestamp_seconds": ("gauge", "When a server had its last fault."),
    "server_recovery_seconds": ("gauge", "How long a server took to be ready after a fault."),
    "server_canary_seconds": ("gauge", "How long the keeper's last own request took."),
    "server_canary_timestamp_seconds": ("gauge", "When the keeper's last own request came back."),
    "server_canary_waiting_seconds": ("gauge", "For how long the present one is on its way."),
    "server_health": ("gauge", "1 for the verdict on a server, as `vlaunch status` shows it."),
    "server_still_seconds": ("gauge", "Seconds without a step while a request waits or fails."),
    "server_longest_step_seconds": ("gauge", "The longest such time that ended in progress."),
    "server_wedged": ("gauge", "1 for the rank in which a suspect server hangs."),
    "server_requests_running": ("gauge", "Requests that vLLM works on, of all endpoints."),
    "server_requests_waiting": ("gauge", "Requests that wait in vLLM, of all endpoints."),
    "server_tokens_per_second": ("gauge", "Tokens generated per second since the look before."),
    "endpoint_up": ("gauge", "1 for an endpoint whose answers the keeper hears."),
    "rank_up": ("gauge", "1 for a rank whose process lives; absent where nobody can say."),
}


class Page:
    """The samples, collected by prometheus_client."""

    def __init__(self) -> None:
        from prometheus_client import Metric  # late: the launcher wants only PORT

        self._families = {
            name: Metric(f"vlaunch_{name.removesuffix('_total')}", about, kind)
            for name, (kind, about) in HELP.items()
        }

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """Add a sample; none where the value is not known."""
        if value is not None and math.isfinite(value):
            self._families[name].add_sample(f"vlaunch_{name}", labels, float(value))

    def collect(self) -> Iterable[Metric]:
        """Return the metrics that have samples."""
        return [family for family in self._families.values() if family.samples]

    def text(self) -> str:
        """Return it all."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()


def text(now: float, folder: str = "") -> str:
    """Return what is known at a time (seconds since 1970)."""
    page, nodes = Page(), dict[str, bool]()
    for name in state.names(folder):
        seen = state.seen(name, folder)
        try:
            want = state.wanted(name, folder)
        except ValueError:
            want = None
        if want is not None:
            nodes |= dict.fromkeys((*want.addresses, *want.nodes), False)
        if seen is not None and (want is not None or seen.state not in OVER):
            _server(page, want, seen)
    _agents(page, nodes, now, folder)
    _network(page, folder)
    return page.text()


def _agents(page: Page, nodes: dict[str, bool], now: float, folder: str) -> None:
    """Add which agents are connected; `nodes` are those that should be."""
    said = state.read(os.path.join(folder or state.FOLDER, state.MEMBERS))
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        written = float(said["written"])
        age = max(0.0, now - written)
        heard = {str(node): float(ago) + age < SILENT for node, ago in said["members"].items()}
        page.add("agent_written_timestamp_seconds", written)
        for node, up in sorted({**nodes, **heard}.items()):
            page.add("node_agent_up", up, node=node)


def _network(page: Page, folder: str) -> None:
    """Add the last verdict, which the launcher writes."""
    file = os.path.join(folder or state.FOLDER, state.NETWORK)
    said: Any = state.read(file)
    if isinstance(said, Mapping) and isinstance(said.get("passed"), bool):
        page.add("network_passed", said["passed"], required=str(said.get("required")))
        with contextlib.suppress(OSError):
            page.add("network_check_timestamp_seconds", os.stat(file).st_mtime)


def _server(page: Page, want: Desired | None, seen: Observed) -> None:
    name = seen.name
    backend = want.backend if want is not None else ""
    page.add("server_info", 1, server=name, model=seen.model, backend=backend, task=seen.task)
    for each in STATES:
        page.add("server_state", each == seen.state, server=name, state=each)
    for each in VERDICTS:
        page.add("server_health", each == seen.verdict, server=name, verdict=each)
    if seen.wedge is not None and seen.verdict == "suspect":
        rank, node, gpu = seen.wedge.rank or "unknown", seen.wedge.node, seen.wedge.gpu
        page.add("server_wedged", 1, server=name, rank=rank, node=node, gpu=gpu)
    last, load = seen.last_fault, seen.load
    known = seen.state == "ready"
    values: Mapping[str, float | None] = {
        "server_written_timestamp_seconds": seen.written,
        "server_ready_timestamp_seconds": seen.ready_at,
        "server_first_start_seconds": seen.first_start,
        "server_engine_starts_total": seen.generation,
        "server_restarts_left": seen.restarts_left,
        "server_faults_total": seen.fault_count,
        "server_last_fault_timestamp_seconds": last.at if last is not None else None,
        "server_recovery_seconds": last.ready_again_after if last is not None else None,
        "server_canary_seconds": seen.seconds,
        "server_canary_timestamp_seconds": seen.answered,
        "server_canary_waiting_seconds": seen.asking if known else None,
        "server_still_seconds": seen.still if known else None,
        "server_longest_step_seconds": seen.longest_step if known else None,
        "server_requests_running": load.running if load is not None else None,
        "server_requests_waiting": load.waiting if load is not None else None,
        "server_tokens_per_second": load.tokens_per_s if load is not None else None,
    }
    for metric, value in values.items():
        page.add(metric, value, server=name)
    if want is not None:
        for api in want.apis:
            page.add("endpoint_up", known, server=name, node=api.node, port=str(want.port))
    for node, ranks in seen.alive.items():
        for rank, lives in ranks.items():
            page.add("rank_up", lives, server=name, node=node, rank=rank)
