"""`vlaunch jobs`: the cluster's batch jobs, how far they are, and how to be rid of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

import click

from launcher.app import options
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.app.terminal import Line, dump_json, line, make_table, plain, say, show
from launcher.batch import batches, job_store, progress_text
from launcher.batch.batches import BatchStatus, query_list, the_batch
from launcher.core import sizes
from launcher.core.errors import NodeError, RequestError
from launcher.core.plan import Plan, Stage, Step
from launcher.tools import servers
from launcher.tools.snapshot import ClusterSnapshot

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


@command(flags=[options.LOCK_WAIT, options.JSON])
@click.option(
    "--remove",
    "names",
    metavar="NAME",
    multiple=True,
    help="Remove a job that is over, and its output on the head.",
)
def jobs(call: Call, names: tuple[str, ...]) -> None:
    """Show the batch jobs that the head knows: those that run, and those that are over.

    A job is `interrupted` when its driver ended without a word; the same `vlaunch batch` goes on
    with it.
    """
    if call.lock_wait and not names:
        raise click.UsageError("--lock-wait goes with --remove: to look takes no lock")
    shown = call if names else replace(call, shows="none")  # without names, JSON is an answer
    with (
        shown.session(nodes=[call.inventory.head]) as session,
        call.locked(session, unless=not names) as ours,
    ):
        seen, found = look(ours, update=bool(names))
        if names:
            _remove(ours, found, names)
            return
    if call.as_json:
        click.echo(
            dump_json(
                {"cluster": call.inventory.cluster, "jobs": [each.as_json() for each in found]}
            )
        )
        return
    _print(seen, found)


def look(
    session: Session, *, update: bool = False
) -> tuple[ClusterSnapshot, tuple[BatchStatus, ...]]:
    """Ask the head for its batch jobs; with `update`, for which the lock is held, its helper
    program is brought up to date.

    Raises:
        NodeError: the head has no container that runs, or no helper program, or cannot say which
            jobs there are.
    """
    from launcher.app import servers as server
    from launcher.tools.node_files import plan_files

    inventory = session.inventory
    seen = server.look(session, head_only=True)
    if not seen.site.head_runs:
        raise NodeError(inventory.head.name, "its container does not run", hint="run `vlaunch up`")
    if update:
        session.apply(plan_files(seen.site))
    elif not seen.site.facts[inventory.head.name].files.get("payload/batch.pyz"):
        text = "has no helper program that knows its batch jobs"
        raise NodeError(
            inventory.head.name, text, hint="run `vlaunch up`, which brings it up to date"
        )
    (answer,) = session.transport.run([query_list(seen.site)])
    return seen, batches.read(inventory, job_store.parse_list(answer), seen.said)


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


def _print(seen: ClusterSnapshot, found: Sequence[BatchStatus]) -> None:
    remarks = [
        f"{each.what} with {each.model} runs beside them"
        for each in servers.read(seen.said).running
    ]
    if "error" in seen.said:
        remarks.append(f"Ray does not say which jobs run: {seen.said['error']}")
    if not found:
        say("no batch job is known on this cluster")
        return
    show(render(found, remarks))


def _remove(session: Session, found: Sequence[BatchStatus], names: Sequence[str]) -> None:
    chosen = [the_batch(found, name) for name in dict.fromkeys(names)]
    if runs := [each.name for each in chosen if each.runs]:
        raise RequestError(
            f"batch job `{runs[0]}` runs", hint=f"stop it first: `vlaunch stop {runs[0]}`"
        )
    head = session.site.head
    steps = tuple(
        Step(
            title=f"removing {job.name}",
            command=session.site.inside(head, job_store.ask("remove", job.work), timeout=300),
        )
        for job in chosen
    )
    stage = Stage(id="remove", title="Remove batch jobs", steps=steps)
    session.apply(Plan(verb="jobs", stages=(stage,), keep_going=True))
    said = ", ".join(each.name for each in chosen)
    session.done(f"removed {said}", data={"removed": [each.name for each in chosen]})


def _time(seconds: float) -> str:
    if not seconds:
        return "-"
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return "-"
