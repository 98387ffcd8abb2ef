"""`vlaunch jobs`: list the cluster's batch jobs and remove finished ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from launcher.app import options
from launcher.app.command import CommandContext, DefaultGroup, command
from launcher.app.session import Session
from launcher.app.terminal import Line, dump_json, make_table, plain_text, say, show, text_line
from launcher.batch import batches, job_store, progress_text
from launcher.batch.batches import BatchStatus, find_job, query_list
from launcher.core import sizes
from launcher.core.errors import NodeError, RequestError
from launcher.core.plan import Plan, Stage, Step
from launcher.tools.site import servers
from launcher.tools.site.snapshot import ClusterSnapshot

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


@click.group(cls=DefaultGroup)
def jobs() -> None:
    """List batch jobs, or remove finished ones. Without COMMAND: `list`."""


@command("list", under=jobs, shows="none", flags=[options.JSON], short_help="List batch jobs")
def list_(call: CommandContext) -> None:
    """List batch jobs and their progress, both running and finished.

    A job is `interrupted` when its driver exited without a result; run the same `vlaunch batch` to
    resume it.
    """
    with call.session(nodes=[call.inventory.head]) as session:
        snapshot, statuses = query_jobs(session)
    if call.as_json:
        payload = [status.as_json() for status in statuses]
        click.echo(dump_json({"cluster": call.inventory.cluster, "jobs": payload}))
    else:
        _print_jobs(snapshot, statuses)


@command(
    under=jobs,
    flags=[options.LOCK_WAIT, options.YES, options.JSON],
    short_help="Remove finished jobs",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def remove(call: CommandContext, names: tuple[str, ...]) -> None:
    """Remove finished jobs and their results on the head."""
    with (
        call.session(nodes=[call.inventory.head]) as session,
        call.locked(session) as locked,
    ):
        _remove_jobs(call, locked, query_jobs(locked, update=True)[1], names)


def query_jobs(
    session: Session, *, update: bool = False
) -> tuple[ClusterSnapshot, tuple[BatchStatus, ...]]:
    """Query the head's batch jobs; `update` (under the lock) updates the node programs first.

    Raises:
        NodeError: the head's container is not running, lacks the program, or cannot list its jobs.
    """
    from launcher.app import servers as server
    from launcher.tools.shipped.node_files import plan_files

    inventory = session.inventory
    snapshot = server.query_cluster(session, head_only=True)
    if not snapshot.site.head_runs:
        raise NodeError(
            inventory.head.name, "its container is not running", hint="run `vlaunch up`"
        )
    if update:
        session.apply(plan_files(snapshot.site))
    elif not snapshot.site.facts[inventory.head.name].files.get("payload/batch.pyz"):
        text = "its node programs are outdated"
        raise NodeError(inventory.head.name, text, hint="run `vlaunch up` to update them")
    (answer,) = session.transport.run([query_list(snapshot.site)])
    return snapshot, batches.merge_jobs(inventory, job_store.parse_list(answer), snapshot.payload)


def render_table(jobs: Sequence[BatchStatus], remarks: Sequence[str] = ()) -> RenderableType:
    """Return the table, with problems of single jobs and `remarks` below."""
    from rich.console import Group

    table = make_table("NAME", "STATE")
    for name in ("ROWS", "DONE", "ERRORS", "ROWS/S", "TOK/S", "GPU-H", "ETA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("STARTED", no_wrap=True)
    for job in jobs:
        table.add_row(*_row_cells(job))
    details = [
        text_line(job.detail, lead=f"  {job.name}: ")
        for job in jobs
        if job.detail and job.state not in ("running", "done")
    ]
    return Group(table, *details, *(text_line(job) for job in remarks))


def _row_cells(job: BatchStatus) -> tuple[RenderableType, ...]:
    progress = job.progress
    running = job.state == "running"
    rates = [
        sizes.format_rate(rate) if running and rate else "-"
        for rate in (progress.rows_per_second, progress.tokens_per_second)
    ]
    eta = progress.eta if running else None
    return (
        plain_text(job.name),
        state_label(job.state),
        "-" if progress.rows is None else f"{progress.rows:,}",
        f"{progress.done:,}",
        f"{progress.errors:,}",
        *rates,
        sizes.format_rate(progress.gpu_hours) if progress.gpu_hours else "-",
        "-" if eta is None else sizes.format_duration(eta),
        _format_time(progress.started),
    )


def job_lines(jobs: Sequence[BatchStatus]) -> list[Line]:
    """Return one line per job."""
    rows = []
    for job in jobs:
        lead = plain_text(f"batch {job.name}: ").append_text(state_label(job.state)).append("  ")
        running = job.state == "running"
        rows.append(
            text_line(
                progress_text.progress_line(job.progress) if running else job.detail, lead=lead
            )
        )
    return rows


def state_label(state: str) -> Text:
    """Return a job's state in its colour."""
    return plain_text(servers.shown_state(state), _COLOURS.get(state, "yellow"))


def _print_jobs(snapshot: ClusterSnapshot, statuses: Sequence[BatchStatus]) -> None:
    remarks = [
        f"{server.label} with {server.model} is also running"
        for server in servers.parse_servers(snapshot.payload).running
    ]
    if "error" in snapshot.payload:
        remarks.append(f"Ray did not list its jobs: {snapshot.payload['error']}")
    if not statuses:
        say("this cluster has no batch jobs")
        return
    show(render_table(statuses, remarks))


def _remove_jobs(
    call: CommandContext, session: Session, statuses: Sequence[BatchStatus], names: Sequence[str]
) -> None:
    chosen = [find_job(statuses, name) for name in dict.fromkeys(names)]
    if runs := [job.name for job in chosen if job.runs]:
        raise RequestError(
            f"batch job `{runs[0]}` is running", hint=f"stop it first: `vlaunch stop {runs[0]}`"
        )
    removed = ", ".join(job.name for job in chosen)
    call.confirm(session, f"Remove {removed}, with the results on the head?")
    head = session.site.head
    steps = tuple(
        Step(
            title=f"removing {job.name}",
            command=session.site.in_container(
                head, job_store.build_command("remove", job.work), timeout=300
            ),
        )
        for job in chosen
    )
    stage = Stage(id="remove", title="Remove batch jobs", steps=steps)
    session.apply(Plan(verb="jobs", stages=(stage,), keep_going=True))
    session.done(f"removed {removed}", data={"removed": [job.name for job in chosen]})


def _format_time(seconds: float) -> str:
    if not seconds:
        return "-"
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return "-"
