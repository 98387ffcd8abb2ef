"""Check results in a narrow terminal, a wide one and a pipe, as a list and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launcher.app import terminal
from launcher.core.check import Finding, worst_status
from launcher.hosts import checks_view
from launcher.hosts.checks.catalogue import CATALOGUE, CheckOutcome, run_checks
from tests import golden
from tests.hosts.checks.spoiled import Case

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = "\x1b[31mred[bold]\x07\x9b2J"


def spoiled() -> list[CheckOutcome]:
    """Return results for three nodes with a failure, a warning, a skip, and a folded pass."""
    case = Case(
        id="time-sync",
        red={},
        text="",
        fix="",
        survey={"gpu02": {"synced": False}, "gpu03": {"synced": None}},
        inside={"gpu03": {"infiniband": ()}},
        port_probes={
            ("gpu01", "gpu02"): {
                "ports": {6379: "timed out"},
                "errors": {6379: "Connection timed out"},
            }
        },
        facts={"gpu01": {"survey": None}},
    )
    ids = [
        check.id
        for check in CATALOGUE
        if check.group in ("reach", "host", "ports", "rdma", "model")
    ]
    return run_checks(case.build_evidence(), ids=ids)


def drawn(
    results: list[CheckOutcome],
    width: int,
    *,
    colour: bool = False,
    env: dict[str, str] | None = None,
) -> str:
    """Return results as printed on a console of some width."""
    file = io.StringIO()
    to = Console(file=file, width=width, force_terminal=colour, highlight=False, _environ=env or {})
    terminal.show(checks_view.render_results(results), to)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 200, 1000], ids=["80", "200", "piped"])
def test_results(width: int) -> None:
    """Groups in order, a row per finding, equal ones folded; failures with fix and reason."""
    text = drawn(spoiled(), width)

    assert all(len(line) <= width for line in text.splitlines())
    golden.check(GOLDEN / f"check_{'piped' if width == 1000 else width}.txt", text)


def test_statuses_are_clear_without_colour() -> None:
    """They have labels; with NO_COLOR no information is lost."""
    dull = drawn(spoiled(), 120, colour=True, env={"TERM": "xterm-256color", "NO_COLOR": "1"})
    bright = drawn(spoiled(), 120, colour=True, env={"TERM": "xterm-256color"})

    assert "\x1b[31m" not in dull
    assert "\x1b[1;31m" in bright
    assert "\x1b[1;31m" not in dull
    for text in ("PASS", "WARN", "FAIL", "SKIP"):
        assert text in dull


def test_the_summary_counts_checks() -> None:
    """It adds up, and repeats the failed ones at the end."""
    results = spoiled()
    *_, counts, red = drawn(results, 1000).splitlines()
    numbers = [int(part.split()[0]) for part in counts.partition(": ")[2].split(", ")]

    assert counts.startswith(f"{len(results)} checks: ")
    assert sum(numbers) == len(results)
    assert (
        red
        == f"FAIL: {', '.join(result.check.id for result in results if result.status == 'fail')}"
    )
    assert all(text in counts for text in ("passed", "failed", "skipped"))


def test_a_skip_is_no_pass() -> None:
    """It has its own label and its reason."""
    check = CATALOGUE[0]
    results = [
        CheckOutcome(
            check=check, findings=(Finding(node="a", status="skip", text="no tool"),), status="skip"
        )
    ]
    text = drawn(results, 100)

    assert "PASS" not in text
    assert "SKIP" in text
    assert "no tool" in text
    assert text.splitlines()[-1] == "1 check: 1 skipped"


def test_results_are_sanitized() -> None:
    """Neither terminal codes nor rich markup in names, texts, evidence and fixes."""
    finding = Finding(node=HOSTILE, status="fail", text=HOSTILE, evidence=HOSTILE, fix=HOSTILE)
    text = drawn([CheckOutcome(check=CATALOGUE[0], findings=(finding,), status="fail")], 100)

    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert text.count("red[bold]") == 4


def test_much_evidence_is_cut() -> None:
    """JSON has all of it."""
    lines = "\n".join(f"line {number}" for number in range(100))
    finding = Finding(node="a", status="fail", text="bad", evidence=lines)
    results = [CheckOutcome(check=CATALOGUE[0], findings=(finding,), status="fail")]

    assert drawn(results, 100).count("line ") == 6
    assert json.dumps(checks_view.results_json(results)).count("line ") == 100


def test_json_has_the_rows_content() -> None:
    """Equally folded; `passed` is false after any failure."""
    results = spoiled()
    data = json.loads(json.dumps(checks_view.results_json(results)))
    healthy = [
        replace(row, findings=(Finding(node="a", status="warn", text="x"),), status="warn")
        for row in results
    ]

    assert data["passed"] is False
    assert checks_view.results_json(healthy)["passed"] is True
    assert sum(data["counts"].values()) == len(results)
    assert [row["id"] for row in data["checks"]] == [row.check.id for row in results]
    assert all(
        row["status"] == worst_status(result.findings)
        for row, result in zip(data["checks"], results, strict=True)
    )
    assert {"gpu[01-03]"} <= {
        finding["node"] for row in data["checks"] for finding in row["findings"]
    }


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    """A row per check, with its title."""
    checks_view.show_list(CATALOGUE[:2], as_json=False)
    rows = capsys.readouterr().out.splitlines()

    assert rows[0].split() == ["ID", "GROUP", "PASSES", "IF"]
    assert [row.split()[:2] for row in rows[1:]] == [
        [check.id, check.group] for check in CATALOGUE[:2]
    ]
    assert CATALOGUE[0].what in rows[1]
