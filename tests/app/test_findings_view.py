"""Findings as lines: the worst first, equal ones folded, below what is wrong what shows it and what
to do.
"""

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
def test_each_status_has_a_word(status: Status, label: str) -> None:
    """Meaning is not in the colour; what never came to an end has failed."""
    assert lines(Finding(node="gpu01", status=status, text="it is so")) == [
        f"{label}  gpu01: it is so"
    ]


def test_the_worst_comes_first() -> None:
    """And the cluster's own has no node before it."""
    order: list[Status] = ["pass", "skip", "warn", "fail"]
    text = lines(*(Finding(node="", status=status, text="x") for status in order))

    assert text == ["FAIL  x", "WARN  x", "SKIP  x", "PASS  x"]


def test_equal_findings_are_one_line() -> None:
    """Of nodes that differ in nothing but their number."""
    same = [
        Finding(node=f"gpu0{number}", status="warn", text="slow", fix="run it")
        for number in (1, 2, 4)
    ]

    assert lines(*same) == ["WARN  gpu[01-02,04]: slow", "      fix: run it"]


def test_evidence_and_fix_stand_below_what_is_wrong() -> None:
    """Indented with it, every line of a fix by itself, and no more evidence than can be read."""
    evidence = "\n".join(f"line {number}" for number in range(20))
    text = lines(
        Finding(node="a", status="fail", text="bad", evidence=evidence, fix="one\ntwo"), indent=2
    )

    assert text[0] == "  FAIL  a: bad"
    assert text[1:9] == [f"        line {number}" for number in range(8)]
    assert text[9:] == ["        fix: one", "        fix: two"]


def test_good_news_has_nothing_below_it() -> None:
    """Its evidence is nobody's concern."""
    assert lines(Finding(node="a", status="pass", text="well", evidence="seen", fix="none")) == [
        "PASS  a: well"
    ]


def test_what_nodes_say_cannot_draw_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither codes nor rich's markup, in any part; a long line is not broken in a pipe."""
    long = "word " * 300
    findings_view.print_findings(
        [Finding(node=HOSTILE, status="fail", text=HOSTILE, evidence=HOSTILE, fix=HOSTILE + long)]
    )
    out = capsys.readouterr().out

    assert not {"\x1b", "\x07", "\x9b"} & set(out)
    assert out.count("red[bold]") == 4
    assert len(out.splitlines()) == 3
