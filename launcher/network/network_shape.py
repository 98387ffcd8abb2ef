"""The shape of a proven network: a cell for each direction between two nodes, and the verdict on
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from launcher.core.check import Finding
from launcher.core.domain import Inventory, Level
from launcher.network.probe_command import Collective, Report


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
        statuses = {each.status for each in self.cells} | {each.status for each in self.findings}
        return bool(self.cells) and "fail" not in statuses


def by_node(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells from and to each node; a cell is in two of them."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.source, []).append(cell)
        found.setdefault(cell.target, []).append(cell)
    return found


def rate(bandwidth: float) -> str:
    """Return bytes per second in words: `24.9 GB/s`, `11.8 MB/s` (powers of ten, as nccl-tests
    counts).
    """
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bandwidth >= size:
            value = bandwidth / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{bandwidth:.0f} B/s"
