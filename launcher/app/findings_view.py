"""Findings as people read them: one line each with its word, what shows it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from launcher.app import terminal
from launcher.app.terminal import Line, line, log, plain
from launcher.core.check import Finding, folded

if TYPE_CHECKING:
    from rich.text import Text

WORDS: Mapping[str, tuple[str, str]] = {
    "pass": ("PASS", "green"),
    "warn": ("WARN", "yellow"),
    "fail": ("FAIL", "red bold"),
    "skip": ("SKIP", "cyan"),
    "wait": ("FAIL", "red bold"),
}


def render(findings: Iterable[Finding], *, indent: int = 0) -> list[Line]:
    """Return findings as lines, equal ones of several nodes folded, the worst first."""
    order = ["fail", "wait", "warn", "skip", "pass"]
    lines: list[Line] = []
    for finding in sorted(folded(list(findings)), key=lambda item: order.index(item.status)):
        lines += one(finding, indent=indent)
    return lines


def one(finding: Finding, *, indent: int = 0) -> list[Line]:
    """Return one finding: its line, and below it, where something is wrong, the evidence and the
    fix.
    """
    label, colour = WORDS[finding.status]
    mark = plain(" " * indent).append(label, style=colour).append("  ")
    return [first(mark, finding, finding.text), *below(finding, margin=len(mark), most=8)]


def first(mark: Text, finding: Finding, text: str) -> Line:
    """Return a finding's line: its mark, its nodes, and what was found there."""
    where = plain(finding.node).append(": ") if finding.node else plain("")
    return line(text, lead=plain("").append_text(mark).append_text(where))


def below(finding: Finding, *, margin: int, most: int) -> list[Line]:
    """Return what stands below a finding, behind `margin` spaces: where something is wrong, the
    evidence, of which there are `most` lines, and the fix.
    """
    if finding.status == "pass":
        return []
    return [
        *(log(line_text, margin=margin) for line_text in finding.evidence.splitlines()[:most]),
        *(
            line(line_text, lead=plain(" " * margin).append("fix: ", style="cyan"))
            for line_text in finding.fix.splitlines()
        ),
    ]


def show(findings: Iterable[Finding]) -> None:
    """Print findings on standard output."""
    for rendered in render(findings):
        terminal.show(rendered)
