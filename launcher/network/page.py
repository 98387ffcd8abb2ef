"""Self-contained HTML page of the network check: heat maps, findings, and every pair's figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from launcher.app.findings_view import LABELS
from launcher.core import untrusted
from launcher.core.check import fold_findings
from launcher.network import network_view
from launcher.network.network_shape import Cell, Verdict, format_rate
from launcher.network.probe_command import Collective

# Shares of the median at which a colour begins, worst first; a half and a quarter are where the
# verdict begins to doubt a pair.
_STEPS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.25)
_LEGEND = (
    ("s5", "over 1.25× as fast as the median"),
    ("s4", "0.9× to 1.25×"),
    ("s3", "0.75× to 0.9×"),
    ("s2", "0.5× to 0.75×"),
    ("s1", "0.25× to 0.5×"),
    ("s0", "under 0.25×"),
    ("none", "no data"),
)
_SIGNS = {"fail": "✕", "warn": "▲", "skip": "–", "pass": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCell:
    """Cell of a heat map: its text, colour class and status, and the details for the tooltip."""

    text: str
    colour: str
    status: str
    sign: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A heat map: rows send, columns receive; `None` is the diagonal.

    The legend has (class, text) pairs.
    """

    id: str
    name: str
    unit: str
    rows: tuple[tuple[str, tuple[MapCell | None, ...]], ...]
    legend: tuple[tuple[str, str], ...]


def render_page(verdict: Verdict, *, cluster: str, measured_at: str, version: str) -> str:
    """Return the page as text.

    Args:
        verdict: the results; text from nodes is escaped.
        cluster: the cluster's name.
        measured_at: local time of the measurement, with its UTC offset.
        version: this program's.
    """
    from jinja2 import Environment, StrictUndefined

    # Words of nodes lose their control characters, which HTML has no place for; autoescape does the
    # rest.
    def clean(value: Any) -> Any:
        return untrusted.sanitize(value) if type(value) is str else value

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.from_string(
        resources.files("launcher.network")
        .joinpath("network_page.html")
        .read_text(encoding="utf-8")
    )
    findings = sorted(
        fold_findings(verdict.findings),
        key=lambda finding: ("fail", "wait", "warn", "skip", "pass").index(finding.status),
    )
    return template.render(
        verdict=verdict,
        cluster=cluster,
        taken=measured_at,
        version=version,
        line=network_view.verdict_line(verdict),
        maps=heat_maps(verdict),
        figures=_figures(verdict),
        findings=[finding for finding in findings if finding.status != "pass"],
        words=LABELS,
        signs=_SIGNS,
        tall=len(verdict.nodes) > 12 or max(map(len, verdict.nodes), default=0) > 8,
        rate=format_rate,
        span=network_view.format_latency,
        mark=network_view.transport_mark,
    )


def heat_maps(verdict: Verdict) -> tuple[HeatMap, ...]:
    """Return the heat maps of bandwidth, latency and transport."""
    return (
        _metric_map(verdict, "bandwidth"),
        _metric_map(verdict, "latency"),
        _transport_map(verdict),
    )


def scale_step(value: float, median: float, *, less_is_better: bool) -> int:
    """Return a value's step on the colour scale, from 0 (far below the median) to 5."""
    if less_is_better:
        value, median = median, value
    ratio = float("inf") if value else 1.0
    if median:
        ratio = value / median
    return max(step for step, begin in enumerate(_STEPS) if ratio >= begin)


def _metric_map(verdict: Verdict, field: str) -> HeatMap:
    less_is_better = field == "latency"
    format_value = network_view.format_latency if less_is_better else format_rate
    extreme = network_view.find_extremes(verdict.cells, field)
    median = extreme[1] if extreme else 0.0
    unit = format_value(median).split()[1] if extreme else ""

    def shown(cell: Cell) -> tuple[str, str]:
        value = getattr(cell, field)
        if value is None:
            return "none", "–"
        number, cell_unit = format_value(value).split()
        # Figures in another unit than the table's say so: a 12 among 25s must not be megabytes
        # unseen.
        return (
            f"s{scale_step(value, median, less_is_better=less_is_better)}",
            number if cell_unit == unit else f"{number} {cell_unit}",
        )

    return HeatMap(
        id=field,
        name=field.capitalize(),
        unit=unit,
        rows=_map_rows(verdict, shown),
        legend=_LEGEND if extreme else _LEGEND[-1:],
    )


def _transport_map(verdict: Verdict) -> HeatMap:
    colours = {name: f"t{step}" for step, name in enumerate(network_view.MARKS)}
    used = {network_view.transport_mark(cell) for cell in verdict.cells}
    return HeatMap(
        id="transport",
        name="Transport",
        unit="",
        rows=_map_rows(
            verdict,
            lambda cell: (
                colours[network_view.transport_mark(cell)],
                network_view.transport_mark(cell),
            ),
        ),
        legend=tuple(
            (colours[name], f"{name}: {meaning}")
            for name, meaning in network_view.MARKS.items()
            if name in used
        ),
    )


def _map_rows(
    verdict: Verdict, colour_and_text: Callable[[Cell], tuple[str, str]]
) -> tuple[tuple[str, tuple[MapCell | None, ...]], ...]:
    cells: Mapping[tuple[str, str], Cell] = {
        (cell.source, cell.target): cell for cell in verdict.cells
    }

    def entry(source: str, target: str) -> MapCell | None:
        if source == target:
            return None
        cell = cells.get((source, target)) or Cell(
            source=source, target=target, status="skip", text="no data"
        )
        colour, text = colour_and_text(cell)
        return MapCell(
            text=text,
            colour=colour,
            status=cell.status,
            sign=_SIGNS[cell.status],
            title=_tooltip(cell),
        )

    return tuple(
        (source, tuple(entry(source, target) for target in verdict.nodes))
        for source in verdict.nodes
    )


def _tooltip(cell: Cell) -> str:
    measurements = [
        format_rate(cell.bandwidth) if cell.bandwidth is not None else "",
        network_view.format_latency(cell.latency) if cell.latency else "",
    ]
    details = ", ".join(detail for detail in (*measurements, cell.transport, cell.device) if detail)
    return f"{cell.source} → {cell.target}: {LABELS[cell.status][0]} {details}" + (
        f" ({cell.text})" if cell.text else ""
    )


def _figures(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return the key figures as (name, figure, remark)."""
    figures: list[tuple[str, str, str]] = []
    for field, format_value, worst in (
        ("bandwidth", format_rate, "least"),
        ("latency", network_view.format_latency, "most"),
    ):
        ends = network_view.find_extremes(verdict.cells, field)
        if ends is not None:
            cell = ends[0] if worst == "least" else ends[2]
            figures.append(
                (
                    f"{field}, median",
                    format_value(ends[1]),
                    f"{worst} {format_value(getattr(cell, field))}, {cell.source} → {cell.target}",
                )
            )
    if verdict.collective is not None:
        figures += _all_reduce_figure(verdict.collective)
    bad = [sum(cell.status == status for cell in verdict.cells) for status in ("fail", "warn")]
    figures.append(
        (
            "directions that pass",
            f"{sum(c.status == 'pass' for c in verdict.cells)} of {len(verdict.cells)}",
            f"{bad[0]} fail, {bad[1]} warn",
        )
    )
    return figures


def _all_reduce_figure(outcome: Collective) -> list[tuple[str, str, str]]:
    """Return the figure of the all_reduce, if it was measured."""
    if outcome.algbw is None or outcome.busbw is None:
        return []
    latency = (
        f", {network_view.format_latency(outcome.latency)} at 8 bytes"
        if outcome.latency is not None
        else ""
    )
    name = f"all_reduce, {outcome.ranks} ranks"
    return [
        (
            name,
            f"{format_rate(outcome.busbw)} busbw",
            f"{format_rate(outcome.algbw)} algbw{latency}",
        )
    ]
