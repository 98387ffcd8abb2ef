"""What the benchmark of copies measures, and how it shows it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.spread import CASES, CHUNK, SIZES, Bench, cases, table, when
from launcher.events import Event


def test_each_kind_is_measured_with_a_goal() -> None:
    """Chains of all numbers of nodes; what goes wrong with four, where there are so many."""
    rows = cases([2, 4, 8], 100.0)

    assert {kind for kind, *_ in rows} | {"nothing", "cpu"} == set(CASES)
    assert [count for kind, _, count, _, _ in rows if kind == "chain"] == [2, 4, 8]
    assert {count for kind, _, count, _, _ in rows if kind != "chain"} == {4}
    assert all(goal for _, _, count, goal, _ in rows if count in (4, 8))


def test_the_table_has_the_median_and_all_values() -> None:
    """As Markdown."""
    shown = table([("N = 4", [1.02, 1.05, 1.01], "≤ 1.05")]).splitlines()

    assert shown[2] == "| N = 4 | **1.020** | 1.020, 1.050, 1.010 | ≤ 1.05 |"


def test_something_is_done_once_when_the_slowest_is_so_far() -> None:
    """Not for what a single node has."""
    done: list[int] = []
    at = when(0.5, lambda: done.append(1))
    for kind, have in (("step", 90), ("wait", 40), ("wait", 50), ("wait", 90)):
        at(Event(kind=kind, data={"bytes": have, "total": 100}))  # type: ignore[arg-type]

    assert done == [1]


def test_the_files_are_those_that_are_copied(tmp_path: Path) -> None:
    """All of them, in chunks that are small against the whole."""
    manifest = Bench(tmp_path).make([each // 1000 for each in SIZES])

    assert len(manifest.files) == len(SIZES)
    assert manifest.bytes == sum(each // 1000 for each in SIZES)
    assert sum(SIZES) // CHUNK == 400
