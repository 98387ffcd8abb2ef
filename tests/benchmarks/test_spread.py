"""What the benchmark of copies measures, and how it shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import spread_tools
from benchmarks.spread import CASES, CHUNK, SIZES, Bench, Row, at_share, cases, table
from benchmarks.spread_network import MachineLoad
from launcher.core.events import Event


def test_each_kind_is_measured_with_a_goal() -> None:
    """Chains and other tools with all numbers of nodes; faults with four, or the most."""
    rows = cases([2, 4, 8], lambda count: [("another", lambda roots, chunk: 1.0)])
    counts = {kind: [row.count for row in rows if row.kind == kind] for kind in CASES}

    assert {row.kind for row in rows} | {"nothing", "cpu"} == set(CASES)
    assert counts["chain"] == counts["tools"] == [2, 4, 8]
    assert counts["kill"] == counts["cable"] == counts["again"] == [4]
    assert all(row.goal for row in rows if row.count in (4, 8) and row.kind != "tools")


def test_the_table_has_the_median_and_all_values() -> None:
    """As Markdown, and how busy the machine was."""
    row = Row("N = 4", "≤ 1.05", [1.02, 1.05, 1.01], ["load 1", "load 2", "load 3"])
    shown = table([row]).splitlines()

    assert (
        shown[2] == "| N = 4 | **1.020** | 1.020, 1.050, 1.010 | ≤ 1.05 | load 1; load 2; load 3 |"
    )


def test_what_the_host_takes_away_is_told(tmp_path: Path) -> None:
    """The share of the time since the last question, and that in which nothing ran here."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 1000 50 0 0 10 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    busy = MachineLoad(stat)
    stat.write_text("cpu  130 0 120 1015 55 0 0 40 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")

    assert busy.describe().endswith("idle 20 %, steal 30 %")


def test_something_is_done_once_when_the_slowest_is_so_far() -> None:
    """Not for what a single node has."""
    done: list[int] = []
    at = at_share(0.5, lambda: done.append(1))
    for kind, have in (("step", 90), ("wait", 40), ("wait", 50), ("wait", 90)):
        at(Event(kind=kind, data={"bytes": have, "total": 100}))  # type: ignore[arg-type]

    assert done == [1]


def test_tools_that_are_not_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what would take as many copies as there are nodes, with many."""
    monkeypatch.setattr(spread_tools.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(spread_tools.importlib.util, "find_spec", lambda name: None)

    assert [run for _, run in spread_tools.installed_tools(8)] == [spread_tools.rsync]
    assert spread_tools.installed_tools(16) == []


def test_the_files_are_those_that_are_copied(tmp_path: Path) -> None:
    """All of them, in chunks that are small against the whole."""
    manifest = Bench(tmp_path).make([size // 1000 for size in SIZES])

    assert len(manifest.files) == len(SIZES)
    assert manifest.total_bytes == sum(size // 1000 for size in SIZES)
    assert sum(SIZES) // CHUNK == 400
