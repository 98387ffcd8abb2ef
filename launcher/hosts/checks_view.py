"""Output of check results for terminals and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import click

from launcher.app import findings_view, terminal
from launcher.app.findings_view import LABELS
from launcher.app.terminal import Line, dump_json, make_table, plain_text, text_line
from launcher.core import untrusted
from launcher.core.check import Finding, Status, fold_findings
from launcher.core.sizes import format_count
from launcher.hosts.check import Check
from launcher.hosts.checks.catalogue import CheckOutcome

if TYPE_CHECKING:
    from rich.console import RenderableType

_STATUS_LABELS: dict[Status, str] = {
    "pass": "passed",
    "warn": "with a warning",
    "fail": "failed",
    "skip": "skipped",
}


def show_results(results: Sequence[CheckOutcome], *, as_json: bool) -> None:
    """Print the results on standard output."""
    if as_json:
        click.echo(dump_json(results_json(results)))
        return
    terminal.show(render_results(results))


def results_json(results: Sequence[CheckOutcome]) -> dict[str, object]:
    """Return the results for JSON."""
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
                    for f in fold_findings(result.findings)
                ],
            }
            for result in results
        ],
    }


def render_results(results: Sequence[CheckOutcome]) -> RenderableType:
    """Render the findings by group, and a summary."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    width = max((len(result.check.id) for result in results), default=0)
    for group, members in groupby(results, key=lambda result: result.check.group):
        parts.append(Text(group, style="bold"))
        for result in members:
            parts += _result_rows(result, width)
    parts.append(Text(_summary_line(results)))
    red = [result.check.id for result in results if result.status == "fail"]
    if red:
        parts.append(Text(f"FAIL: {', '.join(red)}", style="red bold"))
    return Group(*parts)


def _result_rows(result: CheckOutcome, width: int) -> Iterator[Line]:
    """Yield a check's findings; the first is next to its id, padded to `width`."""
    from rich.text import Text

    name = result.check.id
    for finding in _sorted_findings(result):
        label, colour = LABELS[finding.status]
        style = "bold" if finding.status in ("fail", "warn") else ""
        mark = Text(f"  {label}", style=colour).append(f"  {name.ljust(width + 2)}", style=style)
        yield findings_view.render_headline(
            mark, finding, untrusted.single_line(finding.text) or result.check.what
        )
        yield from findings_view.render_details(finding, margin=len(mark) + 2, most=6)
        if finding.status == "fail":
            why = plain_text(" " * (len(mark) + 2) + "why: ", "dim")
            yield text_line(result.check.why, "dim", lead=why)
        name = ""


def _summary_line(results: Sequence[CheckOutcome]) -> str:
    counts = Counter(result.status for result in results)
    parts = [
        f"{counts[status]} {label}" for status, label in _STATUS_LABELS.items() if counts[status]
    ]
    return f"{format_count(len(results), 'check')}: {', '.join(parts)}"


def show_list(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print the condition that each check verifies."""
    if as_json:
        rows = [
            {"id": check.id, "group": check.group, "what": check.what, "why": check.why}
            for check in checks
        ]
        click.echo(dump_json(rows))
        return
    table = make_table("ID", "GROUP", "PASSES IF")
    for check in checks:
        table.add_row(check.id, check.group, check.what)
    terminal.show(table)


def _sorted_findings(result: CheckOutcome) -> list[Finding]:
    order = ["fail", "wait", "warn", "skip", "pass"]
    return sorted(fold_findings(result.findings), key=lambda finding: order.index(finding.status))
