"""Terminal view of the network check: a matrix if it fits, else a summary and its exceptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from launcher.app import findings_view
from launcher.app.terminal import Line, make_table, text_line
from launcher.core import untrusted
from launcher.core.domain import LEVEL_LABELS
from launcher.network.network_shape import Cell, Verdict, by_node, format_rate

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
_MATRIX_NODES = 8  # nodes in a matrix that a person can still read line by line
_MAX_PAIRS = 16


def render(verdict: Verdict) -> RenderableType:
    """Return the measurements, findings and verdict, laid out for the console that prints them."""
    return _VerdictView(verdict)


def transport_mark(cell: Cell) -> str:
    """Return the label of a cell's transport, one of `MARKS`."""
    if cell.transport.endswith("MNNVL"):
        return "MNNVL"
    return {"any": "TCP", "rdma": "RDMA", "gdrdma": "GDR", None: "?"}[cell.level]


def format_latency(seconds: float) -> str:
    """Format a latency: `8.2 µs`, `231 µs`, `12.5 ms`."""
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-2 else (seconds * 1e3, "ms")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def verdict_line(verdict: Verdict) -> str:
    """Return the verdict in one line: the required level, its reason, and the all_reduce."""
    parts = [
        f"required: {LEVEL_LABELS[verdict.required]}" + (f" ({verdict.why})" if verdict.why else "")
    ]
    if not verdict.cells:
        parts.append("nothing was measured")
    outcome = verdict.collective
    if outcome is not None and outcome.algbw is not None and outcome.busbw is not None:
        parts.append(
            f"all_reduce over {outcome.ranks} ranks: {format_rate(outcome.algbw)} algbw,"
            f" {format_rate(outcome.busbw)} busbw"
        )
    elif outcome is not None and outcome.latency is not None:
        parts.append(f"all_reduce over {outcome.ranks} ranks: {format_latency(outcome.latency)}")
    return "; ".join(parts)


def find_extremes(cells: Iterable[Cell], field: str) -> tuple[Cell, float, Cell] | None:
    """Return the cell with the least `bandwidth` or `latency`, the median, and the most."""
    measured = sorted(
        (cell for cell in cells if getattr(cell, field) is not None),
        key=lambda cell: float(getattr(cell, field)),
    )
    if not measured:
        return None
    return measured[0], median(float(getattr(cell, field)) for cell in measured), measured[-1]


def list_problems(verdict: Verdict) -> list[tuple[str, str, Cell]]:
    """Return failed directions as (from, to, cell), the worst first; a dead node is one row."""
    dead = _unreachable_nodes(verdict)
    rows = [(name, "every node, both ways", cell) for name, cell in dead.items()]
    bad = [
        cell
        for cell in verdict.cells
        if cell.status != "pass" and cell.source not in dead and cell.target not in dead
    ]
    bad.sort(key=lambda cell: (_ORDER[cell.status], cell.bandwidth or 0.0))
    return rows + [(cell.source, cell.target, cell) for cell in bad]


def _unreachable_nodes(verdict: Verdict) -> dict[str, Cell]:
    """Return the nodes that reach no other, each with one of its directions; of two nodes, the
    failing one is unknown.
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
class _VerdictView:
    verdict: Verdict

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        yield from _render_measurements(self.verdict, console, options)
        problems = [finding for finding in self.verdict.findings if finding.status != "pass"]
        if problems:
            yield ""
            yield from findings_view.render(problems)
        yield ""
        label, style = findings_view.LABELS["pass" if self.verdict.passed else "fail"]
        yield Line(_literal(f"{label}  {verdict_line(self.verdict)}", style), len(label) + 2)


def _render_measurements(
    verdict: Verdict, console: Console, options: ConsoleOptions
) -> Iterable[RenderableType]:
    if not verdict.cells:
        return
    matrix = _render_matrix(verdict)
    width = console.measure(matrix, options=options.update(width=10_000)).maximum
    if len(verdict.nodes) > _MATRIX_NODES or width > options.max_width:
        yield from _render_summary(verdict)
        return
    yield matrix
    marks = {transport_mark(cell) for cell in verdict.cells if cell.bandwidth is not None}
    legend = [f"{name}: {MARKS[name]}" for name in MARKS if name in marks]
    yield text_line("; ".join(["rows send, columns receive", *legend]), "dim")


def _render_matrix(verdict: Verdict) -> Table:
    from rich.table import Table

    table = Table(
        box=None, pad_edge=False, header_style="bold", padding=(0, 2, 1, 0), collapse_padding=True
    )
    table.add_column("FROM ↓ TO →", no_wrap=True, style="bold")
    for name in verdict.nodes:
        table.add_column(_literal(name), no_wrap=True)
    cells = {(cell.source, cell.target): cell for cell in verdict.cells}
    for source in verdict.nodes:
        row = (
            _render_cell(cells.get((source, target))) if source != target else _literal("·", "dim")
            for target in verdict.nodes
        )
        table.add_row(_literal(source), *row)
    return table


def _render_cell(cell: Cell | None) -> Text:
    """Return a cell on two lines: bandwidth, then latency and transport; a failure has a label, and
    a reason in place of a missing figure.
    """
    if cell is None:
        return _literal("-", "dim")
    label = "" if cell.status == "pass" else f"{cell.status.upper()} "
    if cell.bandwidth is None:
        reason = (
            untrusted.sanitize(cell.text or "no figures").split("\n", 1)[0].removeprefix("was ")
        )
        short = reason if len(reason) <= 14 else reason[:13].rstrip() + "…"
        return _literal(f"{label.strip()}\n{short}".strip(), _STYLES[cell.status])
    latency = f"{format_latency(cell.latency)} " if cell.latency is not None else ""
    return _literal(
        f"{label}{format_rate(cell.bandwidth)}\n{latency}{transport_mark(cell)}",
        _STYLES[cell.status],
    )


def _render_summary(verdict: Verdict) -> Iterable[RenderableType]:
    kinds = Counter(transport_mark(cell) for cell in verdict.cells)
    yield _literal(f"{len(verdict.cells)} directions between {len(verdict.nodes)} nodes")
    yield _render_extremes(verdict.cells)
    transports = ", ".join(f"{kinds[name]} × {MARKS[name]}" for name in MARKS if kinds[name])
    yield text_line(transports, lead="transport  ")
    rows = list_problems(verdict)
    if rows:
        yield ""
        yield _literal("outliers:")
        yield _render_pairs(rows[:_MAX_PAIRS])
    omitted = f"{len(rows) - _MAX_PAIRS} more; " if len(rows) > _MAX_PAIRS else ""
    yield text_line(f"{omitted}`vlaunch check-nccl --html FILE` shows every pair", "dim")


def _render_extremes(cells: Sequence[Cell]) -> Table:
    table = make_table("", "LEAST", "MEDIAN", "MOST")
    for field, format_value in (("bandwidth", format_rate), ("latency", format_latency)):
        extreme = find_extremes(cells, field)
        if extreme is None:
            table.add_row(field, "-", "-", "-")
            continue
        least, most = (
            f"{format_value(getattr(c, field))}  {c.source} → {c.target}"
            for c in (extreme[0], extreme[2])
        )
        table.add_row(field, _literal(least), format_value(extreme[1]), _literal(most))
    return table


def _render_pairs(rows: Iterable[tuple[str, str, Cell]]) -> Table:
    table = make_table("", "FROM", "TO", "BANDWIDTH", "LATENCY", "TRANSPORT")
    for source, target, cell in rows:
        label, style = findings_view.LABELS[cell.status]
        figures = (
            format_rate(cell.bandwidth) if cell.bandwidth is not None else "-",
            format_latency(cell.latency) if cell.latency else "-",
        )
        table.add_row(
            _literal(label, style),
            _literal(source),
            _literal(target),
            *figures,
            transport_mark(cell) if cell.transport else "-",
        )
    return table


def _literal(text: str, style: str = "") -> Text:
    """Return text without rich's markup and terminal codes: nodes can influence it."""
    from rich.text import Text

    return Text(untrusted.sanitize(text), style=style)
