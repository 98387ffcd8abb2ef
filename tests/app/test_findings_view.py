"""Findings as lines: worst first, equal ones folded, with evidence and fix."""

from __future__ import annotations

import pytest

from launcher.app import findings_view
from launcher.core.check import Finding, Status

HOSTILE = "\x1b[31mred[bold]\x07\x9b2J"


def lines(*args: Finding, indent: int = 0) -> list[str]:
    """Return the lines as text."""
    return [line.text.plain for line in findings_view.render(args, indent=indent)]


@pytest.mark.parametrize(
    ("status", "label"),
    [("pass", "PASS"), ("warn", "WARN"), ("fail", "FAIL"), ("skip", "SKIP"), ("wait", "FAIL")],
)
def test_every_status_has_a_label(status: Status, label: str) -> None:
    """Colour alone carries no meaning; an unfinished check has failed."""
    assert lines(Finding(node="gpu01", status=status, text="it is so")) == [
        f"{label}  gpu01: it is so"
    ]


def test_the_worst_comes_first() -> None:
    """A cluster-wide finding has no node's name."""
    order: list[Status] = ["pass", "skip", "warn", "fail"]
    text = lines(*(Finding(node="", status=status, text="x") for status in order))

    assert text == ["FAIL  x", "WARN  x", "SKIP  x", "PASS  x"]


def test_equal_findings_are_one_line() -> None:
    """If nodes differ only in their number."""
    same = [
        Finding(node=f"gpu0{number}", status="warn", text="slow", fix="run it")
        for number in (1, 2, 4)
    ]

    assert lines(*same) == ["WARN  gpu[01-02,04]: slow", "      fix: run it"]


def test_evidence_and_fix_are_below_a_failure() -> None:
    """Indented, fixes line by line, with a limited amount of evidence."""
    evidence = "\n".join(f"line {number}" for number in range(20))
    text = lines(
        Finding(node="a", status="fail", text="bad", evidence=evidence, fix="one\ntwo"), indent=2
    )

    assert text[0] == "  FAIL  a: bad"
    assert text[1:9] == [f"        line {number}" for number in range(8)]
    assert text[9:] == ["        fix: one", "        fix: two"]


def test_a_pass_has_no_evidence() -> None:
    """It is of no interest."""
    assert lines(Finding(node="a", status="pass", text="well", evidence="seen", fix="none")) == [
        "PASS  a: well"
    ]


def test_findings_are_sanitized(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither terminal codes nor rich markup, in any part; in a pipe long lines are not wrapped."""
    long = "word " * 300
    findings_view.print_findings(
        [Finding(node=HOSTILE, status="fail", text=HOSTILE, evidence=HOSTILE, fix=HOSTILE + long)]
    )
    out = capsys.readouterr().out

    assert not {"\x1b", "\x07", "\x9b"} & set(out)
    assert out.count("red[bold]") == 4
    assert len(out.splitlines()) == 3
