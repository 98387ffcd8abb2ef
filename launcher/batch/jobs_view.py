"""Batch jobs as a table, and as lines below a cluster's status."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from launcher.app.terminal import Line, line, make_table, plain
from launcher.batch import progress_text
from launcher.batch.batches import BatchStatus
from launcher.core import sizes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_COLOURS = {
    "running": "green",
    "done": "green",
    "failed": "red",
    "refused": "red",
    "interrupted": "red",
    "stopped": "yellow",
    "prepared": "dim",
}


def render(jobs: Sequence[BatchStatus], remarks: Sequence[str] = ()) -> RenderableType:
    """Return the table; below it what ails single jobs, and `remarks`."""
    from rich.console import Group

    table = make_table("NAME", "STATE")
    for name in ("ROWS", "DONE", "ERRORS", "ROWS/S", "ETA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("STARTED", no_wrap=True)
    for each in jobs:
        table.add_row(*_cells(each))
    told = [
        line(each.detail, lead=f"  {each.name}: ")
        for each in jobs
        if each.detail and each.state not in ("running", "done")
    ]
    return Group(table, *told, *(line(each) for each in remarks))


def _cells(job: BatchStatus) -> tuple[RenderableType, ...]:
    progress = job.progress
    fast = job.state == "running" and progress.rows_per_second > 0
    return (
        plain(job.name),
        coloured(job.state),
        "-" if progress.rows is None else f"{progress.rows:,}",
        f"{progress.done:,}",
        f"{progress.errors:,}",
        sizes.rate(progress.rows_per_second) if fast else "-",
        sizes.duration(progress.eta) if fast and progress.eta is not None else "-",
        _time(progress.started),
    )


def lines(jobs: Sequence[BatchStatus]) -> list[Line]:
    """Return one line for each job."""
    found = []
    for each in jobs:
        lead = plain(f"batch {each.name}: ").append_text(coloured(each.state)).append("  ")
        running = each.state == "running"
        found.append(line(progress_text.line(each.progress) if running else each.detail, lead=lead))
    return found


def coloured(state: str) -> Text:
    """Return a job's state in its colour."""
    return plain(state, _COLOURS.get(state, "yellow"))


def _time(seconds: float) -> str:
    if not seconds:
        return "-"
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return "-"
