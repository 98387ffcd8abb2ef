"""Findings as people read them: one line each with its word, what shows it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from launcher.checks.shape import Finding, folded
from launcher.tools import untrusted

if TYPE_CHECKING:
    from rich.text import Text

WORDS: Mapping[str, tuple[str, str]] = {
    "pass": ("PASS", "green"),
    "warn": ("WARN", "yellow"),
    "fail": ("FAIL", "red bold"),
    "skip": ("SKIP", "cyan"),
    "wait": ("FAIL", "red bold"),
}


def render(findings: Iterable[Finding], *, indent: int = 0) -> list[Text]:
    """Return findings as lines, equal ones of several nodes folded, the worst first."""
    order = ["fail", "wait", "warn", "skip", "pass"]
    lines: list[Text] = []
    for each in sorted(folded(list(findings)), key=lambda finding: order.index(finding.status)):
        lines += one(each, indent=indent)
    return lines


def one(finding: Finding, *, indent: int = 0) -> list[Text]:
    """Return one finding: its line, and below it, where something is wrong, the evidence and the
    fix.
    """
    from rich.text import Text

    word, colour = WORDS[finding.status]
    where = f"{untrusted.brief(finding.node)}: " if finding.node else ""
    line = (
        Text(" " * indent)
        .append(word, style=colour)
        .append(f"  {where}{untrusted.brief(finding.text)}")
    )
    lines = [line]
    margin = " " * (indent + 6)
    if finding.status != "pass":
        lines += [
            Text(f"{margin}{untrusted.brief(text)}", style="dim")
            for text in finding.evidence.splitlines()[:8]
        ]
        lines += [
            Text(margin).append("fix: ", style="cyan").append(untrusted.brief(text))
            for text in finding.fix.splitlines()
        ]
    return lines


def show(findings: Iterable[Finding]) -> None:
    """Print findings on standard output."""
    from launcher.ui.status import console

    to = console()
    for line in render(findings):
        to.print(line, soft_wrap=True)
