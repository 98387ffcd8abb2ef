"""The benchmark of batches, without a cluster: which ways take turns, when it stops, and what it
says of what it found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import batch, batch_writing
from benchmarks.batch import Bench, build_candidates
from benchmarks.batch_report import (
    BEFORE,
    DIRECT,
    MOMENTS,
    ONE_REPLICA,
    TWO_NODES,
    Idle,
    Report,
    Results,
    Run,
)
from launcher.inventory.load import loads

INVENTORY = loads(
    "cluster: c\nimage: i\n"
    "nodes: [{host: n1, ip: 10.0.0.1, gpus: 1}, {host: n2, ip: 10.0.0.2, gpus: 1}]\n",
    Path("inventory.yaml"),
)
BENCH = Bench(inventory=INVENTORY, folder=Path(), model="m", args={})


def run(answering: float, whole: float) -> Run:
    return Run(answering=answering, whole=whole, tokens=32, moments=dict.fromkeys(MOMENTS, 1.5))


def test_parts_choose_the_ways() -> None:
    """What two replicas, or a run without work, are compared with, comes along."""

    def chosen(*parts: str, bench: Bench = BENCH) -> list[batch.Key]:
        return list(build_candidates(bench, parts, [20, 200], with_processor=False))

    assert chosen("engine") == [(DIRECT, 20), (ONE_REPLICA, 20), (DIRECT, 200), (ONE_REPLICA, 200)]
    assert chosen("replicas") == [(ONE_REPLICA, 20), (TWO_NODES, 20)]
    assert chosen("nothing") == [(ONE_REPLICA, 20)]
    assert chosen("idle") == []
    assert chosen(*batch.PARTS) == [*chosen("engine"), (TWO_NODES, 20)]
    older = Bench(inventory=INVENTORY, folder=Path(), model="m", args={}, before="/old/vlaunch")
    assert (BEFORE, 20) in chosen("engine", bench=older)


def test_ways_take_turns_and_no_round_begins_that_would_end_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other round goes the other way round; two rounds of five minutes fit into twelve."""
    clock, order = [0.0], list[str]()

    def turn(name: str) -> Run:
        order.append(name)
        clock[0] += 150
        return run(1, 2)

    turns = {(name, 20): lambda name=name: turn(name) for name in (DIRECT, ONE_REPLICA)}
    monkeypatch.setattr(batch, "build_candidates", lambda *_, **__: turns)
    monkeypatch.setattr(batch.time, "monotonic", lambda: clock[0])
    options = argparse.Namespace(
        rows=[20], idle=[], rounds=5, minutes=12, stolen=1.0, with_processor=False
    )
    messages = list[str]()
    results = batch.measure(BENCH, options, ["engine"], messages.append)

    assert order == [DIRECT, ONE_REPLICA, ONE_REPLICA, DIRECT]
    assert len(results.runs[ONE_REPLICA, 20]) == 2
    assert messages[-1] == "round 3 would not be over in time and is left out"


@pytest.mark.parametrize(
    ("stolen", "expected"), [([4], (1, 0.04)), ([6, 5], (2, 0.05)), ([30, 20, 25], (2, 0.2))]
)
def test_a_run_whose_processors_were_stolen_is_taken_anew(
    monkeypatch: pytest.MonkeyPatch, stolen: list[int], expected: tuple[float, float]
) -> None:
    """At most twice; of three bad ones the best counts."""
    turns, passed = iter(range(1, 4)), [0, 0]

    def measure() -> Run:
        passed[0] += 100
        passed[1] += stolen.pop(0)
        return run(next(turns), 9)

    monkeypatch.setattr(batch, "read_cpu_times", lambda: tuple(passed))
    undisturbed = batch.run_undisturbed(measure, 0.05, lambda _: None)

    assert (undisturbed.answering, undisturbed.stolen) == expected
    assert not stolen


def test_a_report() -> None:
    """Each way beside the engine in its own round; the goals that are missed are known."""
    results = Results(
        runs={
            (DIRECT, 20_000): [run(10, 40), run(20, 60), run(40, 90)],
            (ONE_REPLICA, 20_000): [run(10, 50), run(20, 80), run(80, 90)],
        },
        nothing=[2.0, 1.75, 2.5],
        idle={
            10: [Idle(memory=200, rate=900, whole=9)],
            1000: [Idle(memory=310, rate=18_000, whole=70)],
        },
    )
    report = Report(results)
    lines = list(report.lines())

    assert (
        "| one replica | 1,000 (250–2,000) | 1.00× | ≥ 0.95× met | 80.0 (50.0–90.0) | 0.80× |"
        " ≥ 0.85× missed | 0 (0–0) |" in lines
    )
    assert (
        "| `LLM.generate` | 1,000 (500–2,000) | 1.00× |  | 60.0 (40.0–90.0) | 1.00× |  |"
        " 0 (0–0) |" in lines
    )
    assert "| the command ends | 1.5 (1.5–1.5) | 1.5 (1.5–1.5) |" in lines
    assert "| 1,000 rows | 310 | 18,000 | 70.0 |" in lines
    assert "2.0 (1.8–2.5) s (goal ≤ 2 s met)" in lines[-1]
    assert report.missed == ["≥ 0.85×", "≤ 1.5×"]


def test_two_replicas_are_compared_with_one() -> None:
    """While answering, which the goal is about, and as a whole."""
    results = Results(runs={(ONE_REPLICA, 20): [run(4, 40)], (TWO_NODES, 20): [run(5, 50)]})
    report = Report(results)

    assert (
        "\nTwo replicas on two nodes, 20 rows: 4 rows/s while answering, 0.80× one replica (goal"
        " ≥ 1× missed); whole 50.0 s, 0.80×." in list(report.lines())
    )
    assert report.missed == ["≥ 1×"]


@pytest.mark.parametrize("format", batch_writing.FORMATS)
def test_the_drivers_part_writes_every_row(format: str) -> None:
    """The benchmark follows the driver's own interfaces."""
    cost = batch_writing.measure("64 B", format, rows=300)

    assert min(cost) > 0
