"""Metrics of servers as rows of figures, each with a sparkline, the newest value on the right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.app.terminal import Line, plain_text, text_line
from launcher.core.domain import fold
from launcher.serving.metrics import Figures, Latency, MetricsSample, RankStatus, ServerMetrics
from launcher.serving.status_view import format_count, state_line
from launcher.tools.site.servers import DEFAULT

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_MARGIN, _NAMES, _FIGURES = 4, 10, 38  # columns: margin, names of rows, figures
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_MAX_NAMED_RANKS = 8

FigureGetter = Callable[[Figures], float | None]


@dataclass(frozen=True, slots=True)
class _Row:
    """One row: figures, and a sparkline of `values` as wide as the terminal allows. `maximum` fills
    the sparkline's height; None: the largest value.
    """

    name: str
    text: str
    values: Sequence[float | None] = ()
    maximum: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lead = f"{' ' * _MARGIN}{self.name:<{_NAMES}}"
        width = options.max_width - len(lead) - _FIGURES - 1
        text = plain_text(lead + self.text)
        # Two samples are too few for a sparkline.
        if width < 8 or len(self.text) > _FIGURES or len(self.values) < 3:
            yield Line(text, len(lead))
            return
        text.pad_right(_FIGURES - len(self.text) + 1)
        bars = _ASCII_BARS if options.ascii_only else _BARS
        text.append(render_sparkline(self.values[-width:], bars, self.maximum), "cyan")
        yield Line(text, len(lead))


def render_sparkline(
    values: Sequence[float | None], bars: str = _BARS, maximum: float | None = None
) -> str:
    """Return one bar per value, a space for None. `maximum` (None: the largest) is the highest."""
    top = maximum or max((value for value in values if value is not None), default=0.0)
    last = len(bars) - 1

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        return bars[min(last, round(last * max(0.0, value) / top))] if top > 0 else bars[0]

    return "".join(map(bar, values))


def render_metrics(sample: MetricsSample, *, when: str = "") -> RenderableType:
    """Return all servers; `when` follows the cluster's name."""
    from rich.console import Group

    title = plain_text(f"cluster {sample.cluster}", "bold")
    if when:
        title.append(f"  {when}", "dim")
    rows: list[RenderableType] = [title]
    if sample.trouble:
        rows.append(text_line(sample.trouble, "red"))
    for server in sample.servers:
        rows += _server_rows(server)
    if not sample.servers and not sample.trouble:
        rows.append(plain_text("server: none", "dim"))
    return Group(*rows)


def _server_rows(server: ServerMetrics) -> list[RenderableType]:
    name = "" if server.name == DEFAULT else f" {server.name}"
    nodes = f" on {fold(server.nodes)}" if server.nodes else ""
    text = f"{server.model} ({server.backend}{nodes})"
    heading = state_line(f"server{name}: ", server.state, text, server.detail)
    return [heading, *_figure_rows(server), *_supervision_rows(server)]


def _figure_rows(server: ServerMetrics) -> Iterator[RenderableType]:
    figures, history = server.figures, server.history
    if figures is None:
        yield text_line(server.trouble, lead=f"{' ' * _MARGIN}{'metrics':<{_NAMES}}")
        return

    def values(get_value: FigureGetter) -> list[float | None]:
        return [None if sample is None else get_value(sample) for sample in history]

    yield _Row(
        "requests",
        f"{figures.running:,} running, {figures.waiting:,} waiting",
        values(lambda f: float(f.running + f.waiting)),
    )
    yield _Row(
        "tokens/s",
        f"{_format_rate(figures.tokens_per_s)} out, {_format_rate(figures.prompt_tokens_per_s)} in",
        values(lambda f: f.tokens_per_s),
    )
    yield _Row("TTFT", _format_latency(figures.first_token), values(lambda f: f.first_token.p99))
    yield _Row(
        "ITL", _format_latency(figures.between_tokens), values(lambda f: f.between_tokens.p99)
    )
    hits = f", {figures.prefix_hits:.0%} prefix hits" if figures.prefix_hits is not None else ""
    used = "-" if figures.kv_used is None else f"{figures.kv_used:.1%} used"
    yield _Row("KV cache", used + hits, values(lambda f: f.kv_used), 1.0)


def _format_rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _format_latency(latency: Latency) -> str:
    if latency.p50 is None or latency.p99 is None:
        return "no requests yet"
    window = "so far" if latency.over is None else f"{latency.over:.0f} s"
    return f"p50 {_format_seconds(latency.p50)}, p99 {_format_seconds(latency.p99)} ({window})"


def _format_seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _supervision_rows(server: ServerMetrics) -> Iterator[RenderableType]:
    if server.canary is not None and server.canary_age is not None:
        pending = f", one waiting for {server.asking:.0f} s" if server.asking >= 1 else ""
        canary = f"{_format_seconds(server.canary)}, {server.canary_age:.0f} s ago{pending}"
        yield text_line(canary, lead=f"{' ' * _MARGIN}{'canary':<{_NAMES}}")
    if server.ranks:
        style = "red" if any(rank.alive is False for rank in server.ranks) else ""
        text = _describe_ranks(server.ranks)
        yield text_line(text, style, lead=f"{' ' * _MARGIN}{'ranks':<{_NAMES}}")
    remaining = "" if server.restarts_left is None else f", {server.restarts_left} left"
    faults = format_count(server.faults, "fault")
    yield text_line(
        f"{server.restarts:,}{remaining}, {faults}", lead=f"{' ' * _MARGIN}{'restarts':<{_NAMES}}"
    )


def _describe_ranks(ranks: Sequence[RankStatus]) -> str:
    """Describe which ranks are alive; for many, count them and name only the others."""
    labels = {True: "up", False: "DOWN", None: "unknown"}
    alive_count = sum(rank.alive is True for rank in ranks)
    shown = [rank for rank in ranks if len(ranks) <= _MAX_NAMED_RANKS or rank.alive is not True]
    by_node: dict[str, list[str]] = {}
    for rank in shown:
        by_node.setdefault(rank.node, []).append(f"{rank.rank} {labels[rank.alive]}")
    text = "; ".join(f"{node}: {', '.join(rank)}" for node, rank in by_node.items())
    if len(ranks) <= _MAX_NAMED_RANKS:
        return text
    return f"{alive_count} of {len(ranks)} up" + (f"; {text}" if text else "")
