"""The shape of a proven network: a cell for each direction between two nodes, and the verdict on
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from launcher.core.check import Finding
from launcher.core.domain import Inventory, Level, Secret
from launcher.core.expectations import Expectations
from launcher.network.probe_command import Collective, Report
from launcher.tools.network_verdict import MeasuredLink, Record, ServerLinks, incarnation, only
from launcher.tools.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The report of each node's probe; nodes without a readable report are in `missing`, with the
    reason.
    """

    inventory: Inventory
    reports: Mapping[str, Report]
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One direction between two nodes.

    `transport` such as `NET/IB/GDRDMA` or `Gloo/TCP`, `level` what that is worth (None: not known),
    `device` such as `mlx5_0:1/RoCE`; `bandwidth` is the sum over local ranks in bytes/s, `latency`
    their median in seconds, at `size` bytes each; `slow`: it works, but not as the others do.
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
    """The network between the nodes, as proven.

    `required` is the level after `auto` was resolved, `why` says how.

    `ranks` is the number of ranks, `passed` is false as soon as one finding is a failure.
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
        """True when nothing failed and something was measured."""
        statuses = {item.status for item in self.cells} | {item.status for item in self.findings}
        return bool(self.cells) and "fail" not in statuses


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The options of a check: the required level (`None`: the inventory's), ranks a node (`None`:
    its GPUs), and deadlines in seconds.

    `nonce` tells this run's ranks from those of another, `certificate` lets its probes know each
    other (PEM, with the private key); `nodes` are those between which to measure
    (none named: all). `collective` means that collectives will cross nodes. `known` is what GPUs
    and network cards should do.
    """

    nonce: str
    certificate: Secret = field(default=Secret(""))
    nodes: tuple[str, ...] = ()
    require: Level | Literal["auto"] | None = None
    ranks_per_node: int | None = None
    deadline: float | None = None
    pair_timeout: float = 20.0
    collective: bool = True
    known: Expectations = field(default_factory=Expectations)


@dataclass(slots=True, kw_only=True)
class Proof:
    """The results of the gate, for the step that keeps them and for those who print them.

    `servers` is what the kept record says of servers' own logs: that stays when another verdict
    takes its place.
    """

    verdict: Verdict | None = None
    servers: Mapping[str, ServerLinks] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    ask: Ask | None = None


def by_node(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells from and to each node; a cell is in two of them."""
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.source, []).append(cell)
        by_name.setdefault(cell.target, []).append(cell)
    return by_name


def rate(bandwidth: float) -> str:
    """Return bytes per second in words: `24.9 GB/s`, `11.8 MB/s` (powers of ten, as nccl-tests
    counts).
    """
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bandwidth >= size:
            value = bandwidth / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{bandwidth:.0f} B/s"


def as_record(site: Site, result: Proof, *, measured_at: str) -> Record:
    """Return a verdict as it is kept."""
    verdict = result.verdict
    if verdict is None:
        return Record()
    options, collective = result.ask or Ask(nonce=""), verdict.collective
    measured_site = only(site, options.nodes)
    return Record(
        incarnation=incarnation(measured_site),
        nodes=tuple(node.name for node in measured_site.nodes),
        taken=measured_at,
        passed=verdict.passed,
        asked=options.require or site.inventory.require,
        required=verdict.required,
        ranks_per_node=options.ranks_per_node or 0,
        collective=collective is not None and not collective.error and collective.correct,
        summary=summary(verdict),
        servers=result.servers,
        link=_link(verdict),
    )


def _link(verdict: Verdict) -> MeasuredLink | None:
    cells = [cell for cell in verdict.cells if cell.latency and cell.bandwidth]
    bandwidth = min((cell.bandwidth or 0.0 for cell in cells), default=0.0)
    latency = median(cell.latency or 0.0 for cell in cells) if cells else 0.0
    if not (0 < bandwidth < math.inf and 0 < latency < math.inf):
        return None
    tcp = any(cell.level == "any" for cell in verdict.cells)
    return MeasuredLink(gbps=bandwidth / 1e9, latency_us=latency * 1e6, tcp=tcp)


def summary(verdict: Verdict) -> str:
    """Return what was proven in one line."""
    rates = [cell.bandwidth for cell in verdict.cells if cell.bandwidth is not None]
    times = [cell.latency for cell in verdict.cells if cell.latency is not None]
    count = len(verdict.cells) // 2
    kinds = sorted({cell.transport for cell in verdict.cells if cell.transport}) or ["nothing"]
    parts = [f"{count} {'pair' if count == 1 else 'pairs'} over {', '.join(kinds)}"]
    if rates:
        parts.append(_span(rate(min(rates)), rate(max(rates))))
    if times:
        parts.append(_span(f"{min(times) * 1e6:.0f}", f"{max(times) * 1e6:.0f}") + " µs")
    return ", ".join(parts)


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict ready for JSON: bandwidth in bytes per second, latency in seconds."""
    return {**asdict(verdict), "passed": verdict.passed, "summary": summary(verdict)}
