"""Results of the network check: a cell for each direction between two nodes, and the verdict."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from launcher.core.check import Finding
from launcher.core.domain import Inventory, Level, Secret
from launcher.core.expectations import Expectations
from launcher.network.probe_command import Collective, Report
from launcher.tools.site import Site
from launcher.tools.site.network_verdict import (
    MeasuredLink,
    NetworkRecord,
    ServerLinks,
    incarnation,
    narrow_site,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Probe reports by node; nodes without a readable one are in `missing`, with the reason."""

    inventory: Inventory
    reports: Mapping[str, Report]
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One direction between two nodes.

    `transport` is such as `NET/IB/GDRDMA` or `Gloo/TCP`, `level` its level (None: unknown),
    `device` such as `mlx5_0:1/RoCE`. `bandwidth` is the sum over local ranks in bytes/s, `latency`
    their median in seconds, at `size` bytes each. `slow`: it works, but slower than the others.
    """

    source: str
    target: str
    status: Literal["pass", "warn", "fail", "skip"]
    transport: str = ""
    device: str = ""
    level: Level | None = None
    bandwidth: float | None = None
    latency: float | None = None
    size: int = 0
    text: str = ""
    slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on the network between the nodes.

    `required` is the level after resolving `auto`, `why` the reason for it, `ranks` the number of
    ranks.
    """

    backend: str
    nodes: tuple[str, ...]
    required: Level
    why: str
    cells: tuple[Cell, ...]
    findings: tuple[Finding, ...]
    collective: Collective | None = None
    ranks: int = 0
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if something was measured and nothing failed."""
        statuses = {item.status for item in self.cells} | {item.status for item in self.findings}
        return bool(self.cells) and "fail" not in statuses


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of a check: the required level (`None`: the inventory's), ranks per node (`None`: its
    GPUs), and deadlines in seconds.

    `nonce` identifies the ranks of this run, `certificate` (PEM, with the private key)
    authenticates its probes. `nodes` limits the measurement (empty: all nodes). `collective` means
    that collectives will cross nodes. `expectations` are the expected figures of GPUs and network
    cards.
    """

    nonce: str
    certificate: Secret = field(default=Secret(""))
    nodes: tuple[str, ...] = ()
    require: Level | Literal["auto"] | None = None
    ranks_per_node: int | None = None
    deadline: float | None = None
    pair_timeout: float = 20.0
    collective: bool = True
    expectations: Expectations = field(default_factory=Expectations)


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """Results of the gate, for the step that saves them and for printing.

    `servers` are the links of servers from the saved record: they stay when a new verdict replaces
    it.
    """

    verdict: Verdict | None = None
    servers: Mapping[str, ServerLinks] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    options: CheckOptions | None = None


def by_node(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells from and to each node; a cell belongs to two nodes."""
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.source, []).append(cell)
        by_name.setdefault(cell.target, []).append(cell)
    return by_name


def format_rate(bandwidth: float) -> str:
    """Format bytes per second: `24.9 GB/s`, `11.8 MB/s` (powers of ten, as in nccl-tests)."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bandwidth >= size:
            value = bandwidth / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{bandwidth:.0f} B/s"


def to_record(site: Site, result: CheckResult, *, measured_at: str) -> NetworkRecord:
    """Return the verdict as a record for the head."""
    verdict = result.verdict
    if verdict is None:
        return NetworkRecord()
    options, collective = result.options or CheckOptions(nonce=""), verdict.collective
    measured_site = narrow_site(site, options.nodes)
    return NetworkRecord(
        incarnation=incarnation(measured_site),
        nodes=tuple(node.name for node in measured_site.nodes),
        taken=measured_at,
        passed=verdict.passed,
        asked=options.require or site.inventory.require,
        required=verdict.required,
        ranks_per_node=options.ranks_per_node or 0,
        collective=collective is not None and not collective.error and collective.correct,
        summary=summarize(verdict),
        servers=result.servers,
        link=_measured_link(verdict),
    )


def _measured_link(verdict: Verdict) -> MeasuredLink | None:
    cells = [cell for cell in verdict.cells if cell.latency and cell.bandwidth]
    bandwidth = min((cell.bandwidth or 0.0 for cell in cells), default=0.0)
    latency = median(cell.latency or 0.0 for cell in cells) if cells else 0.0
    if not (0 < bandwidth < math.inf and 0 < latency < math.inf):
        return None
    tcp = any(cell.level == "any" for cell in verdict.cells)
    return MeasuredLink(gbps=bandwidth / 1e9, latency_us=latency * 1e6, tcp=tcp)


def summarize(verdict: Verdict) -> str:
    """Summarize the measurement in one line."""
    rates = [cell.bandwidth for cell in verdict.cells if cell.bandwidth is not None]
    times = [cell.latency for cell in verdict.cells if cell.latency is not None]
    count = len(verdict.cells) // 2
    kinds = sorted({cell.transport for cell in verdict.cells if cell.transport}) or ["nothing"]
    parts = [f"{count} {'pair' if count == 1 else 'pairs'} over {', '.join(kinds)}"]
    if rates:
        parts.append(_format_range(format_rate(min(rates)), format_rate(max(rates))))
    if times:
        parts.append(_format_range(f"{min(times) * 1e6:.0f}", f"{max(times) * 1e6:.0f}") + " µs")
    return ", ".join(parts)


def _format_range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict for JSON: bandwidth in bytes per second, latency in seconds."""
    return {**asdict(verdict), "passed": verdict.passed, "summary": summarize(verdict)}
