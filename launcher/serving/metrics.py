"""Server metrics over successive samples: requests, tokens, latencies and KV cache from vLLM's
counters, and the state of each rank from the supervisor's record.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher import upstream
from launcher.agent.observed import Observed
from launcher.core.transport import Command
from launcher.serving import endpoints, prometheus
from launcher.serving.prometheus import Buckets
from launcher.tools import agent_queries
from launcher.tools.site import Site
from launcher.tools.site.servers import OLD, Server, ServersState, server_health
from launcher.tools.site.serving_judges import SILENT

_QUERY_TIMEOUT = 5.0  # seconds for vLLM's `/metrics`
_LATENCY_WINDOW = 60.0  # seconds
_HISTORY_LENGTH = 120  # samples in a sparkline

# Counters, which only grow while an engine runs (vLLM 0.32, v1/metrics/loggers.py).
_TOTALS = {
    "tokens": upstream.text("vllm.generation-tokens"),
    "prompt_tokens": upstream.text("vllm.prompt-tokens"),
    "requests": upstream.text("vllm.requests-finished"),
    "preemptions": upstream.text("vllm.preemptions"),
    "cache_queries": upstream.text("vllm.cache-queries"),
    "cache_hits": upstream.text("vllm.cache-hits"),
}
_RATES = ("tokens", "prompt_tokens", "requests", "preemptions")
_LATENCIES = {
    "first_token": upstream.text("vllm.first-token"),
    "between_tokens": upstream.text("vllm.between-tokens"),
}

Reports = Mapping[str, Mapping[str, Any]]  # the answer of each node


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterValues:
    """Sums of the counters of all APIs of a server. `at` is in seconds of a monotonic clock."""

    at: float
    running: int
    waiting: int
    kv_used: float | None
    totals: Mapping[str, float]
    latencies: Mapping[str, Buckets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Median and 99th percentile of a latency, in seconds. `over` is the window in seconds, None
    for the engine's whole lifetime.
    """

    p50: float | None = None
    p99: float | None = None
    count: int = 0
    over: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Load of a server. Rates are per second since the previous sample, None in the first one.

    `kv_used` is the used fraction of the KV cache (of several replicas, the fullest one's), and
    `prefix_hits` the fraction of prompt tokens found in it.
    """

    running: int
    waiting: int
    kv_used: float | None = None
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    preemptions_per_s: float | None = None
    prefix_hits: float | None = None
    first_token: Latency = field(default_factory=Latency)
    between_tokens: Latency = field(default_factory=Latency)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """A rank of a server; `alive` is None if unknown."""

    node: str
    rank: str
    alive: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """One server in a sample.

    `state` is the supervisor's, or `unknown`; `trouble` is the reason for missing figures. `canary`
    is the duration of the supervisor's last own request in seconds, `canary_age` the seconds since
    its answer, and `asking` the seconds that the present one has taken so far. `history` has the
    figures of all samples, the newest last.
    """

    name: str
    state: str
    detail: str = ""
    model: str = ""
    backend: str = ""
    nodes: tuple[str, ...] = ()
    figures: Figures | None = None
    trouble: str = ""
    canary: float | None = None
    canary_age: float | None = None
    asking: float = 0.0
    restarts: int = 0
    restarts_left: int | None = None
    faults: int = 0
    ranks: tuple[RankStatus, ...] = ()
    history: tuple[Figures | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSample:
    """All servers at one moment. `trouble` is the reason if the head could not be queried."""

    cluster: str
    servers: tuple[ServerMetrics, ...] = ()
    trouble: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the sample ready for JSON: times in seconds, shares between 0 and 1."""
        servers = [asdict(server) for server in self.servers]
        for server in servers:
            del server["history"]
        return {"cluster": self.cluster, "servers": servers, "trouble": self.trouble}


def query_metrics(site: Site, servers: Sequence[Server]) -> list[Command]:
    """Return one query per node: the head's servers, and the counters of the APIs on each node."""
    apis: dict[str, list[str]] = {site.head.name: []}
    for server in servers:
        for name, api in _api_addresses(site, server):
            apis.setdefault(name, []).append(api)
    queries = {node: agent_queries.metrics(api, _QUERY_TIMEOUT) for node, api in apis.items()}
    node = site.inventory.node
    return [site.in_container(node(name), argv, timeout=30) for name, argv in queries.items()]


def _api_addresses(site: Site, server: Server) -> Iterator[tuple[str, str]]:
    """Yield the node and the local address of each API of a running server."""
    spec = server.desired
    if spec is not None and server.state in ("starting", "ready"):
        for endpoint in endpoints.list_endpoints(site.inventory, spec):
            yield endpoint.node, agent_queries.address(spec.api_host(endpoint.node), spec.port)


class MetricsCollector:
    """Successive samples of a cluster; rates and latencies come from the differences."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._histories: dict[tuple[str, str, int], _EngineHistory] = {}

    def build_sample(
        self, state: ServersState, reports: Reports, only: str | None, now: float
    ) -> MetricsSample:
        """Build one sample.

        Args:
            state: the servers as the head reports them.
            reports: the answer of each node that could be queried.
            only: the only server or group to include; None: all.
            now: seconds of a monotonic clock.
        """
        running = [server for server in state.running if only in (None, server.name, server.group)]
        servers = tuple(self._server_metrics(server, state, reports, now) for server in running)
        return MetricsSample(cluster=self._site.inventory.cluster, servers=servers)

    def _server_metrics(
        self, server: Server, state: ServersState, reports: Reports, now: float
    ) -> ServerMetrics:
        record = server.observed or Observed(name=server.name, id=server.id, asked=0.0)
        counters, trouble = _merge_counters(self._site, server, reports, now)
        engine = (server.name, server.id, record.generation)
        history = self._histories.setdefault(engine, _EngineHistory())
        figures = history.add_counters(counters)
        verdict, detail = server_health(server, state.agent)
        canary_age = None
        if record.answered is not None:
            canary_age = round(max(0.0, record.written - record.answered + server.age), 1)
        return ServerMetrics(
            name=server.name,
            state=verdict,
            detail=detail,
            model=server.model,
            backend=server.desired.backend if server.desired is not None else "",
            nodes=tuple(node.name for node in self._site.nodes if node.name in server.nodes),
            figures=figures,
            trouble=trouble,
            canary=record.seconds,
            canary_age=canary_age,
            asking=record.asking,
            restarts=len(record.restarts),
            restarts_left=record.restarts_left,
            faults=record.fault_count,
            ranks=tuple(_rank_statuses(record, state, server.age)),
            history=tuple(history.figures),
        )


def _rank_statuses(record: Observed, state: ServersState, age: float) -> Iterator[RankStatus]:
    """Yield the ranks; unknown if the record or the node's report is old."""
    for node, ranks in record.ranks.items():
        is_recent = age < OLD and state.members.get(node, math.inf) < SILENT
        for rank in ranks:
            alive = record.alive.get(node, {}).get(rank) if is_recent else None
            yield RankStatus(node=node, rank=rank, alive=alive)


def _merge_counters(
    site: Site, server: Server, reports: Reports, now: float
) -> tuple[CounterValues | None, str]:
    """Return the counters of all APIs of a server in sum, or the reason why some are unknown."""
    texts, missing = [], []
    for node, api in _api_addresses(site, server):
        report = reports.get(node, {})
        counters = report.get("apis", {}).get(api, {})
        reason = str(report.get("error") or "not queried yet")
        if text := counters.get("text"):
            texts.append(text)
            continue
        if counters:
            error = counters.get("error") or counters["status"]
            reason = f"cannot read the metrics of its API: {error}"
            if counters["status"] == 200:
                reason = "vLLM records no statistics (`--disable-log-stats`)"
        missing.append(f"{node}: {reason.removeprefix(f'{node}: ')}")
    if missing or not texts:
        return None, "; ".join(missing) or "no engine is running"
    try:
        return parse_counters(texts, now), ""
    except (ValueError, OverflowError) as error:
        return None, f"cannot parse its metrics: {error}"


def parse_counters(texts: Sequence[str], at: float) -> CounterValues:
    """Parse the `/metrics` output of a server's APIs; raises ValueError."""
    samples = prometheus.parse_metrics(*texts)
    if not samples.values(upstream.text("vllm.requests-running")):
        raise ValueError(f"`{upstream.text('vllm.requests-running')}` is missing")
    return CounterValues(
        at=at,
        running=int(samples.total(upstream.text("vllm.requests-running"))),
        waiting=int(samples.total(upstream.text("vllm.requests-waiting"))),
        kv_used=max(samples.values(upstream.text("vllm.kv-cache-usage")), default=None),
        totals={name: samples.total(metric) for name, metric in _TOTALS.items()},
        latencies={name: samples.histogram(metric) for name, metric in _LATENCIES.items()},
    )


class _EngineHistory:
    """Counters and figures of one engine over time."""

    def __init__(self) -> None:
        self._recent: deque[CounterValues] = deque()
        self.figures: deque[Figures | None] = deque(maxlen=_HISTORY_LENGTH)

    def add_counters(self, counters: CounterValues | None) -> Figures | None:
        figures = None if counters is None else self._compute_figures(counters)
        self.figures.append(figures)
        return figures

    def _compute_figures(self, counters: CounterValues) -> Figures:
        recent = self._recent
        # A restarted engine counts from 0.
        if recent and any(counters.totals[name] < n for name, n in recent[-1].totals.items()):
            recent.clear()
        while len(recent) > 1 and counters.at - recent[1].at >= _LATENCY_WINDOW:
            recent.popleft()
        first, last = (recent[0], recent[-1]) if recent else (None, None)
        recent.append(counters)
        seconds = counters.at - last.at if last is not None else 0.0
        figures: dict[str, Any] = {
            f"{name}_per_s": round((counters.totals[name] - last.totals[name]) / seconds, 2)
            for name in _RATES
            if last is not None and seconds > 0
        }
        figures |= {name: _compute_latency(name, first, counters) for name in _LATENCIES}
        return Figures(
            running=counters.running,
            waiting=counters.waiting,
            kv_used=counters.kv_used,
            prefix_hits=_prefix_hit_rate(first, counters),
            **figures,
        )


def _prefix_hit_rate(oldest: CounterValues | None, current: CounterValues) -> float | None:
    """Return the cached share of prompt tokens since `oldest`, else over the engine's lifetime."""
    for previous in (oldest.totals if oldest else {}, dict[str, float]()):
        queries = current.totals["cache_queries"] - previous.get("cache_queries", 0.0)
        hits = current.totals["cache_hits"] - previous.get("cache_hits", 0.0)
        if queries > 0:
            return round(hits / queries, 4)
    return None


def _compute_latency(name: str, oldest: CounterValues | None, current: CounterValues) -> Latency:
    """Return a latency since `oldest`, or without requests since, over the engine's lifetime."""
    for previous in (oldest, None):
        previous_buckets = previous.latencies[name] if previous is not None else {}
        buckets = {
            bound: max(0.0, count - previous_buckets.get(bound, 0.0))
            for bound, count in current.latencies[name].items()
        }
        p50, p99 = prometheus.quantile(0.5, buckets), prometheus.quantile(0.99, buckets)
        if p50 is not None and p99 is not None:
            window = round(current.at - previous.at, 1) if previous is not None else None
            count = int(buckets[max(buckets)])
            return Latency(p50=round(p50, 4), p99=round(p99, 4), count=count, over=window)
    return Latency()
