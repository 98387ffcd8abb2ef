"""What servers do, as rows of figures with a line of bars beside them, the newest on the right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.app.terminal import Line, line, plain
from launcher.core.domain import fold
from launcher.serving.metrics import Figures, Latency, Look, RankLife, ServerMetrics
from launcher.serving.status_view import count, state_line
from launcher.tools.servers import DEFAULT

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_MARGIN, _NAMES, _FIGURES = 4, 10, 38  # columns: before the names of rows, of these, of figures
_BARS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_FEW = 8  # ranks that are all named

Of = Callable[[Figures], float | None]


@dataclass(frozen=True, slots=True)
class _Row:
    """One row: figures, and what of the looks so far is drawn beside them as wide as there is room;
    what fills a row is `full`, None for the largest of what is drawn.
    """

    name: str
    text: str
    drawn: Sequence[float | None] = ()
    full: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        before = f"{' ' * _MARGIN}{self.name:<{_NAMES}}"
        room = options.max_width - len(before) - _FIGURES - 1
        told = plain(before + self.text)
        if (
            room < 8 or len(self.text) > _FIGURES or len(self.drawn) < 3
        ):  # of two looks nothing can be seen
            yield Line(told, len(before))
            return
        told.pad_right(_FIGURES - len(self.text) + 1)
        bars = _ASCII if options.ascii_only else _BARS
        told.append(spark(self.drawn[-room:], bars, self.full), "cyan")
        yield Line(told, len(before))


def spark(values: Sequence[float | None], bars: str = _BARS, full: float | None = None) -> str:
    """Return a bar for each value, a space for one that is not known; the largest, or `full`, has
    the highest bar.
    """
    most = full or max((each for each in values if each is not None), default=0.0)
    high = len(bars) - 1

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        return bars[min(high, round(high * max(0.0, value) / most))] if most > 0 else bars[0]

    return "".join(map(bar, values))


def render(look: Look, *, when: str = "") -> RenderableType:
    """Return all servers; `when` is told beside the cluster's name."""
    from rich.console import Group

    head = plain(f"cluster {look.cluster}", "bold")
    if when:
        head.append(f"  {when}", "dim")
    rows: list[RenderableType] = [head]
    if look.trouble:
        rows.append(line(look.trouble, "red"))
    for each in look.servers:
        rows += _server(each)
    if not look.servers and not look.trouble:
        rows.append(plain("server: none", "dim"))
    return Group(*rows)


def _server(server: ServerMetrics) -> list[RenderableType]:
    name = "" if server.name == DEFAULT else f" {server.name}"
    where = f" on {fold(server.nodes)}" if server.nodes else ""
    what = f"{server.model} ({server.backend}{where})"
    first = state_line(f"server{name}: ", server.state, what, server.detail)
    return [first, *_figures(server), *_kept(server)]


def _figures(server: ServerMetrics) -> Iterator[RenderableType]:
    figures, history = server.figures, server.history
    if figures is None:
        yield line(server.trouble, lead=f"{' ' * _MARGIN}{'figures':<{_NAMES}}")
        return

    def drawn(of: Of) -> list[float | None]:
        return [None if each is None else of(each) for each in history]

    yield _Row(
        "requests",
        f"{figures.running:,} running, {figures.waiting:,} waiting",
        drawn(lambda each: float(each.running + each.waiting)),
    )
    yield _Row(
        "tokens/s",
        f"{_rate(figures.tokens_per_s)} out, {_rate(figures.prompt_tokens_per_s)} in",
        drawn(lambda each: each.tokens_per_s),
    )
    yield _Row("TTFT", _latency(figures.first_token), drawn(lambda each: each.first_token.p99))
    yield _Row("ITL", _latency(figures.between_tokens), drawn(lambda each: each.between_tokens.p99))
    hits = f", {figures.prefix_hits:.0%} prefix hits" if figures.prefix_hits is not None else ""
    used = "-" if figures.kv_used is None else f"{figures.kv_used:.1%} used"
    yield _Row("KV cache", used + hits, drawn(lambda each: each.kv_used), 1.0)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _latency(found: Latency) -> str:
    if found.p50 is None or found.p99 is None:
        return "no request yet"
    over = "so far" if found.over is None else f"{found.over:.0f} s"
    return f"p50 {_seconds(found.p50)}, p99 {_seconds(found.p99)} ({over})"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _kept(server: ServerMetrics) -> Iterator[RenderableType]:
    if server.canary is not None and server.canary_age is not None:
        late = f", one under way for {server.asking:.0f} s" if server.asking >= 1 else ""
        came = f"{_seconds(server.canary)}, {server.canary_age:.0f} s ago{late}"
        yield line(came, lead=f"{' ' * _MARGIN}{'canary':<{_NAMES}}")
    if server.ranks:
        bad = any(each.alive is False for each in server.ranks)
        text = _ranks(server.ranks)
        yield line(text, "red" if bad else "", lead=f"{' ' * _MARGIN}{'ranks':<{_NAMES}}")
    left = "" if server.restarts_left is None else f", {server.restarts_left} left"
    told = f"{count(server.restarts, 'restart')}{left}, {count(server.faults, 'fault')}"
    yield line(told, lead=f"{' ' * _MARGIN}{'kept':<{_NAMES}}")


def _ranks(ranks: Sequence[RankLife]) -> str:
    """Say which ranks live; of many, how many, and those that do not by name."""
    words = {True: "up", False: "DOWN", None: "unknown"}
    up = sum(each.alive is True for each in ranks)
    named = [each for each in ranks if len(ranks) <= _FEW or each.alive is not True]
    by_node: dict[str, list[str]] = {}
    for each in named:
        by_node.setdefault(each.node, []).append(f"{each.rank} {words[each.alive]}")
    told = "; ".join(f"{node}: {', '.join(each)}" for node, each in by_node.items())
    if len(ranks) <= _FEW:
        return told
    return f"{up} of {len(ranks)} up" + (f"; {told}" if told else "")
