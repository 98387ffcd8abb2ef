"""Table of the contract's findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.contract.judge import Finding, Outcome

_MARKS: dict[Outcome, tuple[str, str]] = {
    "ok": ("yes", "green"),
    "moved": ("yes", "green"),
    "absent": ("-", "dim"),
    "elsewhere": ("?", "dim"),
    "back": ("BACK", "bold yellow"),
    "broken": ("MISSING", "bold red"),
}
_LEGEND = (
    "yes: the version has it; -: it lacks it, as stated; ?: in another package; BACK: it has it,"
    " although the entry states the contrary; MISSING: it lacks it"
)


def print_findings(console: Console, findings: Sequence[Finding], *, brief: bool) -> None:
    """Print a table of entries and versions for each program, then what broke."""
    for program, group in groupby(findings, key=attrgetter("program")):
        _print_program(console, program, list(group), brief=brief)
    console.print(_LEGEND, style="dim")
    for finding in _noted(findings):
        color = "red" if finding.is_failure else "yellow"
        console.print(Text(finding.describe(), style=color), soft_wrap=True)
    console.print(_summary(findings), soft_wrap=True)


def _print_program(console: Console, program: str, findings: list[Finding], *, brief: bool) -> None:
    versions = list(dict.fromkeys(finding.version for finding in findings))
    outcomes = {(finding.entry.id, finding.version): finding for finding in findings}
    table = Table(title=program, title_justify="left", box=None, pad_edge=False)
    table.add_column("entry", overflow="fold", max_width=38)
    table.add_column("kind")
    for version in versions:
        table.add_column(version)
    table.add_column("used by", overflow="fold")
    table.add_column("where", overflow="fold")
    for entry in dict.fromkeys(finding.entry for finding in findings):
        row = [outcomes[entry.id, version] for version in versions]
        if brief and all(finding.outcome in ("ok", "moved", "elsewhere") for finding in row):
            continue
        marks = [Text(*_MARKS[finding.outcome]) for finding in row]
        users = "\n".join(path.removeprefix("launcher/") for path in entry.used_by)
        place = next((file for finding in reversed(row) for file in finding.files[:1]), entry.file)
        table.add_row(entry.id, entry.kind, *marks, users, place)
    if table.row_count:
        console.print(table, "")


def _noted(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that need a change of a data file or of code; a text that has moved
    matters in the newest version only.
    """
    newest = {finding.program: finding.version for finding in findings}
    return [
        finding
        for finding in findings
        if finding.outcome in ("broken", "back")
        or (finding.outcome == "moved" and finding.version == newest[finding.program])
    ]


def _summary(findings: Sequence[Finding]) -> str:
    versions = dict.fromkeys((finding.program, finding.version) for finding in findings)
    parts = []
    for program, version in versions:
        of_version = [f for f in findings if (f.program, f.version) == (program, version)]
        missing = sum(finding.outcome == "broken" for finding in of_version)
        absent = sum(finding.outcome == "absent" for finding in of_version)
        checked = sum(finding.outcome != "elsewhere" for finding in of_version)
        parts.append(
            f"{program} {version}: {checked} entries checked, {absent} absent as stated,"
            f" {missing} missing"
        )
    return "\n".join(parts)
