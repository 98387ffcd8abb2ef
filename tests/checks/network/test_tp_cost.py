"""What TP across nodes costs, from measured figures."""

from __future__ import annotations

import dataclasses

from launcher.checks.network import tp_cost
from launcher.checks.network.shape import Cell, Verdict
from launcher.checks.network.tp_cost import Crossing, Figures
from launcher.tools.network import Collective

SPLIT = Crossing(tp=16, pp=1, instead=(8, 2), layers=80, hidden=8192)
FAST = Figures(reduce_latency=40e-6, algbw=20e9, send_latency=10e-6, bandwidth=24e9)


def test_the_cost_is_told_in_the_measured_figures() -> None:
    """160 reductions × 40 µs a token; 1000 tokens × 8192 × 2 bytes reduced 160 times; one hop of
    the pipeline instead.
    """
    said = tp_cost.judge(SPLIT, FAST)

    assert said.status == "pass"
    assert "160 reductions × 40 µs = 6.4 ms" in said.text
    assert "1000 tokens of prompt 131 ms" in said.text
    assert "TP 8 × PP 2 costs 10 µs and 693 µs" in said.text
    assert "--tp 8 --pp 2" in said.fix


def test_on_tcp_it_is_a_warning() -> None:
    """Slow links make it hurt."""
    assert tp_cost.judge(SPLIT, dataclasses.replace(FAST, tcp=True)).status == "warn"


def test_figures_come_from_a_verdict_and_from_its_record() -> None:
    """What was kept says the same as what was measured; half a measurement says nothing."""
    cell = Cell(
        source="a", target="b", status="pass", transport="Gloo/TCP", bandwidth=1e9, latency=1e-4
    )
    whole = Collective(ranks=2, latency=2e-4, algbw=5e8, busbw=5e8)
    verdict = Verdict(
        backend="gloo",
        nodes=("a", "b"),
        required="any",
        why="",
        cells=(cell,),
        findings=(),
        collective=whole,
    )

    seen = tp_cost.figures(verdict)

    assert seen == Figures(
        reduce_latency=2e-4, algbw=5e8, send_latency=1e-4, bandwidth=1e9, tcp=True
    )
    assert tp_cost.kept({"figures": dataclasses.asdict(seen)}) == seen
    assert tp_cost.kept({}) is None
    assert tp_cost.kept({"figures": {"nonsense": 1}}) is None
    assert tp_cost.figures(dataclasses.replace(verdict, collective=None)) is None
    late = dataclasses.replace(whole, latency=None)
    assert tp_cost.figures(dataclasses.replace(verdict, collective=late)) is None
