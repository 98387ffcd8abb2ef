"""The catalogue's results for people and machines: groups in order, one row a finding, below it
what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import click

from launcher.app import findings_view, terminal
from launcher.app.findings_view import WORDS
from launcher.app.terminal import Line, dump_json, line, make_table
from launcher.app.terminal import plain as plain_text
from launcher.core import untrusted
from launcher.core.check import Finding, Status, folded
from launcher.hosts.check import Check
from launcher.hosts.checks.catalogue import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

_MEANT: dict[Status, str] = {
    "pass": "passed",
    "warn": "with a warning",
    "fail": "failed",
    "skip": "skipped",
}


def show(results: Sequence[Result], *, as_json: bool) -> None:
    """Print the results on standard output."""
    if as_json:
        click.echo(dump_json(plain(results)))
        return
    terminal.show(render(results))


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
                "docs": f"docs/reference/checks.md#{result.check.id}",
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


def _rows(result: Result, width: int) -> Iterator[Line]:
    """Return a check's findings, the first of them beside its name, which is padded to `width`."""
    from rich.text import Text

    name = result.check.id
    for finding in _folded(result):
        label, colour = WORDS[finding.status]
        style = "bold" if finding.status in ("fail", "warn") else ""
        mark = Text(f"  {label}", style=colour).append(f"  {name.ljust(width + 2)}", style=style)
        yield findings_view.first(mark, finding, untrusted.brief(finding.text) or result.check.what)
        yield from findings_view.below(finding, margin=len(mark) + 2, most=6)
        if finding.status == "fail":
            why = plain_text(" " * (len(mark) + 2) + "why: ", "dim")
            yield line(result.check.why, "dim", lead=why)
        name = ""


def _total(results: Sequence[Result]) -> str:
    counts = Counter(result.status for result in results)
    parts = [f"{counts[status]} {label}" for status, label in _MEANT.items() if counts[status]]
    total = "1 check" if len(results) == 1 else f"{len(results)} checks"
    return f"{total}: {', '.join(parts)}"


def show_list(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print what each check proves."""
    if as_json:
        rows = [
            {"id": check.id, "group": check.group, "what": check.what, "why": check.why}
            for check in checks
        ]
        click.echo(dump_json(rows))
        return
    table = make_table("ID", "GROUP", "TRUE WHEN GREEN")
    for check in checks:
        table.add_row(check.id, check.group, check.what)
    terminal.show(table)


def _folded(result: Result) -> list[Finding]:
    order = ["fail", "wait", "warn", "skip", "pass"]
    return sorted(folded(result.findings), key=lambda finding: order.index(finding.status))
