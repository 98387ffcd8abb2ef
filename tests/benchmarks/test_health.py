"""The benchmarks of health: parsing of records, judgment of runs, and tables."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import healthy, wedge
from benchmarks.agent import HostCpu, short_lived_cpu
from benchmarks.health import Reading, parse_record, replace_table, summarize

RECORD = {
    "written": 100.0,
    "verdict": "suspect",
    "reason": "no step for 70 s",
    "still": 70.2,
    "longest_step": 1.5,
    "generation": 2,
    "fault_count": 1,
    "wedge": {"node": "node2"},
}


def test_a_stale_record_is_unknown() -> None:
    reading = parse_record(RECORD, 101.0)
    assert (reading.verdict, reading.still, reading.longest) == ("suspect", 70.2, 1.5)
    assert parse_record(RECORD, 130.0).verdict == parse_record({}, 130.0).verdict == "unknown"


def test_a_summary_counts_verdicts_red_samples_and_restarts() -> None:
    readings = [
        Reading(at=0.0, verdict="failed", still=90.0, generation=7, faults=7, id="old"),
        Reading(at=0.5, verdict="starting", generation=0, id="new"),
        Reading(at=1.0, verdict="busy", still=3.0, generation=1, id="new"),
        Reading(at=2.0, verdict="suspect", still=61.0, generation=1, id="new"),
        Reading(at=3.0, verdict="answering", longest=61.5, generation=2, faults=1, id="new"),
    ]
    assert summarize(readings) == {
        "longest_g": 61.0,
        "s": 61.5,
        "verdicts": {"starting": 1, "busy": 1, "suspect": 1, "answering": 1},
        "red": 1,
        "restarts": 1,
        "faults": 1,
    }


def _line(**changed: Any) -> dict[str, Any]:
    named = {"rank": "TP1", "node": "node2", "gpu": "", "frame": "execute_model (worker.py:3)"}
    good = {"backend": "mp", "mode": "c", "rank": 1, "node": "node2", "stuck": 0.0, "red": 75.0}
    return {**good, "code": 1, "named": named, "quiet": 31.0, "load": 2.0, "ok": True, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"red": None},
        {"red": 151.0},
        {"code": 0},
        {"named": {"rank": "TP0", "node": "node2"}},
        {"named": {"rank": "TP1", "node": "node1"}},
        {"named": {"rank": None, "node": None}},
        {"stuck": 90.0},
    ],
)
def test_a_run_is_good_only_when_it_is_red_in_time_and_names_the_right_rank(
    changed: dict[str, Any],
) -> None:
    assert wedge.is_good(_line())
    assert wedge.is_good(_line(stuck=90.0, answer=140.0))
    assert not wedge.is_good(_line(**changed))


def test_runs_with_stuck_have_their_own_row() -> None:
    lines = [_line(), _line(red=81.0), _line(stuck=90.0, answer=140.0, ended=91.0)]
    first, second = wedge.format_table(lines).splitlines()[2:]
    assert "| mp, TP 2 | spins in C | – | 2 | 2 | 31 s (31–31) | 78 s (75–81) |" in first
    assert "| 90 | 1 | 1 |" in second and "| 91 s | 140 s |" in second


def test_a_table_of_healthy_servers_has_the_last_run_of_each_case() -> None:
    old = {"case": "load", "backend": "ray", "seconds": 180, "longest_g": 9.0, "s": 1.0}
    old |= {"verdicts": {"busy": 3}, "exits": 0, "statuses": 4, "red": 2, "restarts": 1}
    old |= {"load": 3.0, "load_after": 44.0}
    rows = healthy.format_table([old, {**old, "red": 0, "restarts": 0}]).splitlines()[2:]
    assert len(rows) == 1
    assert "| 9 s | 1.0 s | busy 3 | 0 of 4 | 0 | 0 | 3–44 |" in rows[0]


def test_a_table_is_replaced_between_its_marks() -> None:
    page = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    assert replace_table(page, "x", "new") == "a\n<!-- x: begin -->\n\nnew\n\n<!-- x: end -->\nb\n"
    with pytest.raises(SystemExit, match="no marks for `y`"):
        replace_table(page, "y", "new")


def test_the_cpu_of_short_lived_processes_is_the_remainder() -> None:
    before = HostCpu(agent=1.0, containers=10.0, living={1: 5.0, 2: 4.0}, daemons=0.0)
    after = HostCpu(agent=1.2, containers=12.0, living={1: 5.5, 3: 0.1}, daemons=0.0)
    assert short_lived_cpu(before, after) == pytest.approx(1.5)


@pytest.mark.parametrize("benchmark", [healthy, wedge])
@pytest.mark.parametrize("results", [None, "", '{"case": '])
def test_a_report_without_results_leaves_the_table(
    benchmark: ModuleType, results: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, path = tmp_path / "RESULTS.md", tmp_path / "results.jsonl"
    page.write_text("<!-- healthy: begin -->x<!-- healthy: end -->")
    if results is not None:
        path.write_text(results)
    monkeypatch.setattr(benchmark, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--report", "--results", str(path)])

    with pytest.raises(SystemExit, match=f"error: {path}: no results to report"):
        benchmark.main()
    assert page.read_text() == "<!-- healthy: begin -->x<!-- healthy: end -->"
