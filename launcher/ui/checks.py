"""The catalogue's results for people and machines: groups in order, one row a finding, below it
what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import click

from launcher.checks.catalogue import Result
from launcher.checks.shape import Check, Finding, Status, folded
from launcher.tools import untrusted
from launcher.ui import json_line
from launcher.ui.findings import WORDS
from launcher.ui.status import console
from launcher.ui.table import with_columns

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

_MEANT: dict[Status, str] = {
    "pass": "passed",
    "warn": "with a warning",
    "fail": "failed",
    "skip": "skipped",
}


def show(results: Sequence[Result], *, as_json: bool) -> None:
    """Print the results on standard output."""
    if as_json:
        click.echo(json_line.dumps(plain(results)))
        return
    to = console()
    to.print(render(results))


def plain(results: Sequence[Result]) -> dict[str, object]:
    """Return the results ready for JSON."""
    return {
        "passed": all(result.status != "fail" for result in results),
        "counts": dict(Counter(result.status for result in results)),
        "checks": [
            {
                "id": result.check.id,
                "group": result.check.group,
                "status": result.status,
                "what": result.check.what,
                "why": result.check.why,
                "docs": f"docs/checks.md#{result.check.id}",
                "findings": [
                    {
                        "node": f.node,
                        "status": f.status,
                        "text": f.text,
                        "evidence": f.evidence,
                        "fix": f.fix,
                    }
                    for f in folded(result.findings)
                ],
            }
            for result in results
        ],
    }


def render(results: Sequence[Result]) -> RenderableType:
    """Return groups with their findings, and the sum of them."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    width = max((len(result.check.id) for result in results), default=0)
    for group, members in groupby(results, key=lambda result: result.check.group):
        parts.append(Text(group, style="bold"))
        for result in members:
            parts += _rows(result, width)
    parts.append(Text(_total(results)))
    red = [result.check.id for result in results if result.status == "fail"]
    if red:
        parts.append(Text(f"FAIL: {', '.join(red)}", style="red bold"))
    return Group(*parts)


def _rows(result: Result, width: int) -> Iterator[_Row]:
    """Return a check's findings, the first of them beside its name, which is padded to `width`."""
    from rich.text import Text

    name = result.check.id
    for finding in _folded(result):
        word, colour = WORDS[finding.status]
        style = "bold" if finding.status in ("fail", "warn") else ""
        first = Text(f"  {word}", style=colour).append(f"  {name.ljust(width + 2)}", style=style)
        yield _Row(first=first, story=_story(result.check, finding))
        name = ""


def _total(results: Sequence[Result]) -> str:
    counts = Counter(result.status for result in results)
    said = [f"{counts[status]} {word}" for status, word in _MEANT.items() if counts[status]]
    total = "1 check" if len(results) == 1 else f"{len(results)} checks"
    return f"{total}: {', '.join(said)}"


def show_list(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print what each check proves."""
    if as_json:
        said = [
            {"id": each.id, "group": each.group, "what": each.what, "why": each.why}
            for each in checks
        ]
        click.echo(json_line.dumps(said))
        return
    table = with_columns("ID", "GROUP", "TRUE WHEN GREEN")
    for each in checks:
        table.add_row(each.id, each.group, each.what)
    console().print(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A finding beside its word and its check, broken into lines that stand below each other and
    end where their words do.
    """

    first: Text
    story: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = len(self.first.plain)
        lines = self.story.wrap(console, max(20, options.max_width - indent), overflow="fold")
        for place, line in enumerate(lines):
            line.rstrip()
            start = self.first if place == 0 else " " * indent
            yield type(line).assemble(start, line, overflow="fold")


def _folded(result: Result) -> list[Finding]:
    order = ["fail", "wait", "warn", "skip", "pass"]
    return sorted(folded(result.findings), key=lambda finding: order.index(finding.status))


def _story(check: Check, finding: Finding) -> Text:
    from rich.text import Text

    where = f"{untrusted.brief(finding.node)}: " if finding.node else ""
    text = Text(where + (untrusted.brief(finding.text) or check.what))
    if finding.status != "pass":
        for line in finding.evidence.splitlines()[:6]:
            text.append(f"\n  {untrusted.brief(line)}", style="dim")
        for line in finding.fix.splitlines():
            text.append("\n  fix: ", style="cyan").append(untrusted.brief(line))
        if finding.status == "fail":
            text.append(f"\n  why: {check.why}", style="dim")
    return text
