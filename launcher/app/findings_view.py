"""Findings for people: one line each with its label, the evidence, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from launcher.app import terminal
from launcher.app.terminal import Line, evidence_line, plain_text, text_line
from launcher.core.check import Finding, fold_findings

if TYPE_CHECKING:
    from rich.text import Text

LABELS: Mapping[str, tuple[str, str]] = {
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
    for finding in sorted(fold_findings(list(findings)), key=lambda item: order.index(item.status)):
        lines += render_finding(finding, indent=indent)
    return lines


def render_finding(finding: Finding, *, indent: int = 0) -> list[Line]:
    """Return one finding: its line, then the evidence and the fix unless it passed."""
    label, colour = LABELS[finding.status]
    mark = plain_text(" " * indent).append(label, style=colour).append("  ")
    return [
        render_headline(mark, finding, finding.text),
        *render_details(finding, margin=len(mark), most=8),
    ]


def render_headline(mark: Text, finding: Finding, text: str) -> Line:
    """Return a finding's line: its mark, its nodes, and its text."""
    where = plain_text(finding.node).append(": ") if finding.node else plain_text("")
    return text_line(text, lead=plain_text("").append_text(mark).append_text(where))


def render_details(finding: Finding, *, margin: int, most: int) -> list[Line]:
    """Return the lines below a finding, behind `margin` spaces: up to `most` lines of evidence, and
    the fix; none if it passed.
    """
    if finding.status == "pass":
        return []
    return [
        *(evidence_line(row, margin=margin) for row in finding.evidence.splitlines()[:most]),
        *(
            text_line(row, lead=plain_text(" " * margin).append("fix: ", style="cyan"))
            for row in finding.fix.splitlines()
        ),
    ]


def print_findings(findings: Iterable[Finding]) -> None:
    """Print findings on standard output."""
    for rendered in render(findings):
        terminal.show(rendered)
