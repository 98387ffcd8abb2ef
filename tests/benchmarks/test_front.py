"""The benchmark of the front: percentiles and tables."""

from __future__ import annotations

from collections import Counter

from benchmarks.front import ATTACKS, Measurement, Outcome, attacks_table, percentile, ways_table


def test_percentiles() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (51.0, 100.0)
    assert percentile([2.0], 0.99) == 2.0


def test_ways_are_compared_with_direct_access() -> None:
    ways = {
        "direct": Measurement(short=[0.001], first=[0.01]),
        "front": Measurement(short=[0.0015], first=[0.012], cpu=[0.2, 0.1, 0.3]),
    }
    direct, front = ways_table(ways).splitlines()[2:]
    assert direct == "| direct | 1.00 / 1.00 |  | 10.00 / 10.00 |  |  |"
    assert front == "| front | 1.50 / 1.50 | 0.50 / 0.50 | 12.00 / 12.00 | 1.20× / 1.20× | 0.20 |"


def test_attacks_are_compared_with_the_time_before() -> None:
    outcome = Outcome(
        before=[0.002], during=[0.003], opened=1200, statuses=Counter({"401": 1000, "429": 20})
    )
    (row,) = attacks_table({"guesses": outcome}).splitlines()[2:]
    assert row.startswith(f"| {ATTACKS['guesses'][0]} | 2.0 | 3.0 | 1.5× | 2.0 | 3.0 | 1,200 |")
    assert "1,000 × 401, 20 × 429" in row
