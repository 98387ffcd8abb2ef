"""Metrics in a narrow and a wide terminal, without colours, and in ASCII."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launcher.app.terminal import show
from launcher.serving.metrics import Figures, Latency, MetricsSample, RankStatus, ServerMetrics
from launcher.serving.metrics_view import render_metrics, render_sparkline
from tests import golden

GOLDEN = Path(__file__).parent / "golden"


def figures(count: int) -> Figures:
    """Return the figures of one of many samples of a server with a growing load."""
    return Figures(
        running=min(count, 8),
        waiting=max(0, count - 8) * 12,
        kv_used=min(0.97, count / 100),
        tokens_per_s=12.5 * count if count else None,
        prompt_tokens_per_s=1204.4,
        requests_per_s=2.5,
        preemptions_per_s=0.0,
        prefix_hits=0.413,
        first_token=Latency(p50=0.045, p99=0.08 * max(1, count), count=40, over=60.0),
        between_tokens=Latency(p50=0.0213, p99=0.0345, count=900, over=None),
    )


HISTORY = tuple(None if 40 < count < 44 else figures(count) for count in range(100))
BUSY = ServerMetrics(
    name="default",
    state="ready",
    model="meta-llama/Llama-3.1-405B-Instruct-FP8",
    backend="ray",
    nodes=("gpu01", "gpu02"),
    figures=HISTORY[-1],
    canary=0.081,
    canary_age=2.6,
    asking=4.0,
    restarts_left=3,
    faults=1,
    ranks=(
        RankStatus(node="gpu01", rank="PP0", alive=True),
        RankStatus(node="gpu02", rank="PP1", alive=False),
    ),
    history=HISTORY,
)
MANY = replace(
    BUSY,
    name="chat",
    state="unknown",
    detail="the head's agent has not reported for 300 s",
    figures=None,
    trouble="gpu01: cannot read the metrics of its API: timed out",
    ranks=tuple(
        RankStatus(
            node=f"gpu{node:02}", rank=f"TP{rank}", alive=None if node == 2 and rank == 7 else True
        )
        for node in (1, 2)
        for rank in range(8)
    ),
)
NEW = replace(BUSY, name="new", history=(figures(0),), figures=figures(0), ranks=(), canary=None)


def drawn(
    width: int, look: MetricsSample, *, encoding: str = "utf-8", colours: bool = False
) -> str:
    """Return a sample as rendered on a console of some width."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(
        file=file,
        width=width,
        color_system="standard" if colours else None,
        force_terminal=colours,
        highlight=False,
    )
    show(render_metrics(look, when="12:00:00, every 2 s"), console)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 200])
def test_figures_and_bars(width: int) -> None:
    """The newest bar is on the right, and unknown values have none."""
    text = drawn(width, MetricsSample(cluster="h100", servers=(BUSY, MANY, NEW)))

    assert all(len(line) <= width for line in text.splitlines())
    golden.check(GOLDEN / f"metrics-{width}.txt", text)


def test_a_terminal_without_bars() -> None:
    """An encoding without block characters gets ASCII ones."""
    text = drawn(80, MetricsSample(cluster="h100", servers=(BUSY,)), encoding="ascii")

    assert "#" in text


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has the same information."""
    look = MetricsSample(cluster="h100", servers=(BUSY,))
    assert "\x1b[36m" in drawn(80, look, colours=True)
    monkeypatch.setenv("NO_COLOR", "1")

    assert "\x1b[3" not in drawn(80, look, colours=True)
    assert "PP1 DOWN" in drawn(80, look, colours=True)


def test_no_server_and_a_silent_head() -> None:
    """Both are reported."""
    assert "server: none" in drawn(80, MetricsSample(cluster="c"))
    assert "gpu01: timed out" in drawn(80, MetricsSample(cluster="c", trouble="gpu01: timed out"))


@pytest.mark.parametrize(
    ("values", "full", "bars"),
    [
        ([0.0, 1.0, 2.0], None, "▁▅█"),
        ([0.0, 0.0], None, "▁▁"),
        ([None, 1.0], None, " █"),
        ([0.25, 2.0], 1.0, "▃█"),
        ([], None, ""),
    ],
)
def test_bars(values: list[float | None], full: float | None, bars: str) -> None:
    """From zero to the largest value, or to capacity."""
    assert render_sparkline(values, maximum=full) == bars
