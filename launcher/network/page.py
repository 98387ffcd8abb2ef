"""The network between nodes as one HTML page that needs nothing else: heat maps, findings, and
every pair's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from launcher.app.findings_view import WORDS
from launcher.core import untrusted
from launcher.core.check import folded
from launcher.network import network_view
from launcher.network.network_shape import Cell, Verdict, rate
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
    ("none", "no figure"),
)
_SIGNS = {"fail": "✕", "warn": "▲", "skip": "–", "pass": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One cell of a heat map: its text, the colour's class, its status, and everything that is
    known of it for the title.
    """

    text: str
    colour: str
    status: str
    sign: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """A heat map: rows send, columns receive; `None` is the diagonal.

    The legend has (class, words) pairs.
    """

    id: str
    name: str
    unit: str
    rows: tuple[tuple[str, tuple[Field | None, ...]], ...]
    legend: tuple[tuple[str, str], ...]


def page(verdict: Verdict, *, cluster: str, measured_at: str, version: str) -> str:
    """Return the page as text.

    Args:
        verdict: what was proven; its words come from nodes and are escaped.
        cluster: the cluster's name.
        taken: when it was measured, as people and machines read it.
        version: this program's.
    """
    from jinja2 import Environment, StrictUndefined

    # Words of nodes lose their control characters, which HTML has no place for; autoescape does the
    # rest.
    def clean(value: Any) -> Any:
        return untrusted.plain(value) if type(value) is str else value

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
        folded(verdict.findings),
        key=lambda finding: ("fail", "wait", "warn", "skip", "pass").index(finding.status),
    )
    return template.render(
        verdict=verdict,
        cluster=cluster,
        taken=measured_at,
        version=version,
        line=network_view.summary(verdict),
        maps=maps(verdict),
        figures=_figures(verdict),
        findings=[finding for finding in findings if finding.status != "pass"],
        words=WORDS,
        signs=_SIGNS,
        tall=len(verdict.nodes) > 12 or max(map(len, verdict.nodes), default=0) > 8,
        rate=rate,
        span=network_view.span,
        mark=network_view.mark,
    )


def maps(verdict: Verdict) -> tuple[Map, ...]:
    """Return the heat maps of bandwidth, latency and transport."""
    return (_measured(verdict, "bandwidth"), _measured(verdict, "latency"), _transports(verdict))


def share(value: float, median: float, *, less_is_better: bool) -> int:
    """Return which step of the scale a value is on, 0 (far worse than the median) to 5 (clearly
    better).
    """
    if less_is_better:
        value, median = median, value
    ratio = float("inf") if value else 1.0
    if median:
        ratio = value / median
    return max(step for step, begin in enumerate(_STEPS) if ratio >= begin)


def _measured(verdict: Verdict, field: str) -> Map:
    less_is_better = field == "latency"
    format_value = network_view.span if less_is_better else rate
    extreme = network_view.extremes(verdict.cells, field)
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
            f"s{share(value, median, less_is_better=less_is_better)}",
            number if cell_unit == unit else f"{number} {cell_unit}",
        )

    return Map(
        id=field,
        name=field.capitalize(),
        unit=unit,
        rows=_rows(verdict, shown),
        legend=_LEGEND if extreme else _LEGEND[-1:],
    )


def _transports(verdict: Verdict) -> Map:
    colours = {name: f"t{step}" for step, name in enumerate(network_view.MARKS)}
    used = {network_view.mark(cell) for cell in verdict.cells}
    return Map(
        id="transport",
        name="Transport",
        unit="",
        rows=_rows(
            verdict, lambda cell: (colours[network_view.mark(cell)], network_view.mark(cell))
        ),
        legend=tuple(
            (colours[name], f"{name}: {meaning}")
            for name, meaning in network_view.MARKS.items()
            if name in used
        ),
    )


def _rows(
    verdict: Verdict, colour_and_text: Callable[[Cell], tuple[str, str]]
) -> tuple[tuple[str, tuple[Field | None, ...]], ...]:
    cells: Mapping[tuple[str, str], Cell] = {
        (cell.source, cell.target): cell for cell in verdict.cells
    }

    def entry(source: str, target: str) -> Field | None:
        if source == target:
            return None
        cell = cells.get((source, target)) or Cell(
            source=source, target=target, status="skip", text="nothing is known"
        )
        colour, text = colour_and_text(cell)
        return Field(
            text=text,
            colour=colour,
            status=cell.status,
            sign=_SIGNS[cell.status],
            title=_title(cell),
        )

    return tuple(
        (source, tuple(entry(source, target) for target in verdict.nodes))
        for source in verdict.nodes
    )


def _title(cell: Cell) -> str:
    measurements = [
        rate(cell.bandwidth) if cell.bandwidth is not None else "",
        network_view.span(cell.latency) if cell.latency else "",
    ]
    details = ", ".join(detail for detail in (*measurements, cell.transport, cell.device) if detail)
    return f"{cell.source} → {cell.target}: {WORDS[cell.status][0]} {details}" + (
        f" ({cell.text})" if cell.text else ""
    )


def _figures(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return the figures on top as (name, figure, remark)."""
    figures: list[tuple[str, str, str]] = []
    for field, format_value, worst in (
        ("bandwidth", rate, "least"),
        ("latency", network_view.span, "most"),
    ):
        ends = network_view.extremes(verdict.cells, field)
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
        figures += _all_reduce(verdict.collective)
    bad = [sum(cell.status == status for cell in verdict.cells) for status in ("fail", "warn")]
    figures.append(
        (
            "directions that pass",
            f"{sum(c.status == 'pass' for c in verdict.cells)} of {len(verdict.cells)}",
            f"{bad[0]} fail, {bad[1]} warn",
        )
    )
    return figures


def _all_reduce(collective: Collective) -> list[tuple[str, str, str]]:
    """Return the figure of all ranks together, if it was measured."""
    if collective.algbw is None or collective.busbw is None:
        return []
    latency = (
        f", {network_view.span(collective.latency)} at 8 bytes"
        if collective.latency is not None
        else ""
    )
    name = f"all_reduce, {collective.ranks} ranks"
    return [(name, f"{rate(collective.busbw)} busbw", f"{rate(collective.algbw)} algbw{latency}")]
