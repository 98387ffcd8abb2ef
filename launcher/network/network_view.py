"""The network between nodes in a terminal: a matrix while it fits, else a summary and the pairs
unlike the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from launcher.app import findings_view
from launcher.app.terminal import Line, line, make_table
from launcher.core import untrusted
from launcher.core.domain import LEVEL_WORDS
from launcher.network.network_shape import Cell, Verdict, by_node, rate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

# What a transport's mark in a matrix stands for, best first.
MARKS = {
    "MNNVL": "multi-node NVLink",
    "GDR": "RDMA with GPUDirect",
    "RDMA": "RDMA without GPUDirect",
    "TCP": "TCP sockets",
    "?": "unknown",
}
_ORDER = {"fail": 0, "warn": 1, "skip": 2, "pass": 3}
_STYLES = {"fail": "red bold", "warn": "yellow", "skip": "dim", "pass": ""}
_MOST = 8  # nodes in a matrix that a person can still read line by line
_PAIRS = 16


def render(verdict: Verdict) -> RenderableType:
    """Return what was measured, the findings and the verdict's line, laid out for the console that
    prints it.
    """
    return _Page(verdict)


def mark(cell: Cell) -> str:
    """Return the word for a cell's transport, one of `MARKS`."""
    if cell.transport.endswith("MNNVL"):
        return "MNNVL"
    return {"any": "TCP", "rdma": "RDMA", "gdrdma": "GDR", None: "?"}[cell.level]


def span(seconds: float) -> str:
    """Return a latency in words: `8.2 µs`, `231 µs`, `12.5 ms`."""
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-2 else (seconds * 1e3, "ms")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def summary(verdict: Verdict) -> str:
    """Return the verdict in one line, without its word: what is required and why, and what all
    ranks together reached.
    """
    parts = [
        f"required: {LEVEL_WORDS[verdict.required]}" + (f" ({verdict.why})" if verdict.why else "")
    ]
    if not verdict.cells:
        parts.append("nothing was measured")
    collective = verdict.collective
    if collective is not None and collective.algbw is not None and collective.busbw is not None:
        parts.append(
            f"all_reduce over {collective.ranks} ranks: {rate(collective.algbw)} algbw,"
            f" {rate(collective.busbw)} busbw"
        )
    elif collective is not None and collective.latency is not None:
        parts.append(f"all_reduce over {collective.ranks} ranks: {span(collective.latency)}")
    return "; ".join(parts)


def extremes(cells: Iterable[Cell], field: str) -> tuple[Cell, float, Cell] | None:
    """Return the cell with the least of `bandwidth` or `latency`, the median, and the cell with the
    most.
    """
    measured = sorted(
        (cell for cell in cells if getattr(cell, field) is not None),
        key=lambda cell: float(getattr(cell, field)),
    )
    if not measured:
        return None
    return measured[0], median(float(getattr(cell, field)) for cell in measured), measured[-1]


def unlike(verdict: Verdict) -> list[tuple[str, str, Cell]]:
    """Return the directions that did not pass as (from, to, cell), the worst first; a dead node is
    one row.
    """
    unreachable = _dead(verdict)
    rows = [(name, "every node, both ways", cell) for name, cell in unreachable.items()]
    bad = [
        cell
        for cell in verdict.cells
        if cell.status != "pass"
        and cell.source not in unreachable
        and cell.target not in unreachable
    ]
    bad.sort(key=lambda cell: (_ORDER[cell.status], cell.bandwidth or 0.0))
    return rows + [(cell.source, cell.target, cell) for cell in bad]


def _dead(verdict: Verdict) -> dict[str, Cell]:
    """Return the nodes that reach nobody, each with one of its directions; of two nodes nobody
    knows which it is.
    """
    if len(verdict.nodes) <= 2:
        return {}
    of_node = by_node(verdict.cells)
    return {
        name: of_node[name][0]
        for name in verdict.nodes
        if name in of_node
        and all(cell.status == "fail" and cell.bandwidth is None for cell in of_node[name])
    }


@dataclass(frozen=True, slots=True)
class _Page:
    verdict: Verdict

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        yield from _measured(self.verdict, console, options)
        problems = [finding for finding in self.verdict.findings if finding.status != "pass"]
        if problems:
            yield ""
            yield from findings_view.render(problems)
        yield ""
        label, style = findings_view.WORDS["pass" if self.verdict.passed else "fail"]
        yield Line(_text(f"{label}  {summary(self.verdict)}", style), len(label) + 2)


def _measured(
    verdict: Verdict, console: Console, options: ConsoleOptions
) -> Iterable[RenderableType]:
    if not verdict.cells:
        return
    matrix = _matrix(verdict)
    width = console.measure(matrix, options=options.update(width=10_000)).maximum
    if len(verdict.nodes) > _MOST or width > options.max_width:
        yield from _folded(verdict)
        return
    yield matrix
    marks = {mark(cell) for cell in verdict.cells if cell.bandwidth is not None}
    legend = [f"{name}: {MARKS[name]}" for name in MARKS if name in marks]
    yield line("; ".join(["rows send, columns receive", *legend]), "dim")


def _matrix(verdict: Verdict) -> Table:
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, 2, 1, 0),
        collapse_padding=True,
    )
    table.add_column("FROM ↓ TO →", no_wrap=True, style="bold")
    for name in verdict.nodes:
        table.add_column(_text(name), no_wrap=True)
    cells = {(cell.source, cell.target): cell for cell in verdict.cells}
    for source in verdict.nodes:
        row = (
            _entry(cells.get((source, target))) if source != target else _text("·", "dim")
            for target in verdict.nodes
        )
        table.add_row(_text(source), *row)
    return table


def _entry(cell: Cell | None) -> Text:
    """Return a cell on two lines: bandwidth, then latency and transport; what is wrong is a word in
    front, and a reason where there is no figure.
    """
    if cell is None:
        return _text("-", "dim")
    label = "" if cell.status == "pass" else f"{cell.status.upper()} "
    if cell.bandwidth is None:
        reason = untrusted.plain(cell.text or "no figures").split("\n", 1)[0].removeprefix("was ")
        short = reason if len(reason) <= 14 else reason[:13].rstrip() + "…"
        return _text(f"{label.strip()}\n{short}".strip(), _STYLES[cell.status])
    latency = f"{span(cell.latency)} " if cell.latency is not None else ""
    return _text(f"{label}{rate(cell.bandwidth)}\n{latency}{mark(cell)}", _STYLES[cell.status])


def _folded(verdict: Verdict) -> Iterable[RenderableType]:
    kinds = Counter(mark(cell) for cell in verdict.cells)
    yield _text(f"{len(verdict.cells)} directions between {len(verdict.nodes)} nodes")
    yield _extremes(verdict.cells)
    transports = ", ".join(f"{kinds[name]} × {MARKS[name]}" for name in MARKS if kinds[name])
    yield line(transports, lead="transport  ")
    rows = unlike(verdict)
    if rows:
        yield ""
        yield _text("not like the others:")
        yield _pairs(rows[:_PAIRS])
    omitted = f"{len(rows) - _PAIRS} more; " if len(rows) > _PAIRS else ""
    yield line(f"{omitted}`vlaunch check-nccl --html FILE` shows every pair", "dim")


def _extremes(cells: Sequence[Cell]) -> Table:
    table = make_table("", "LEAST", "MEDIAN", "MOST")
    for field, format_value in (("bandwidth", rate), ("latency", span)):
        extreme = extremes(cells, field)
        if extreme is None:
            table.add_row(field, "-", "-", "-")
            continue
        least, most = (
            f"{format_value(getattr(c, field))}  {c.source} → {c.target}"
            for c in (extreme[0], extreme[2])
        )
        table.add_row(field, _text(least), format_value(extreme[1]), _text(most))
    return table


def _pairs(rows: Iterable[tuple[str, str, Cell]]) -> Table:
    table = make_table("", "FROM", "TO", "BANDWIDTH", "LATENCY", "TRANSPORT")
    for source, target, cell in rows:
        label, style = findings_view.WORDS[cell.status]
        figures = (
            rate(cell.bandwidth) if cell.bandwidth is not None else "-",
            span(cell.latency) if cell.latency else "-",
        )
        table.add_row(
            _text(label, style),
            _text(source),
            _text(target),
            *figures,
            mark(cell) if cell.transport else "-",
        )
    return table


def _text(text: str, style: str = "") -> Text:
    """Return words as they are: neither rich's markup nor a terminal's codes, for nodes have had a
    hand in them.
    """
    from rich.text import Text

    return Text(untrusted.plain(text), style=style)
