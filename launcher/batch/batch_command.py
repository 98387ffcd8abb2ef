"""`vlaunch batch`: run a job over every row of its input, watch it and gather the answers."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from launcher.app import options
from launcher.app.apply import apply
from launcher.app.command import CommandContext, command
from launcher.app.progress import Printer, show_through
from launcher.app.session import Session
from launcher.app.terminal import print_field
from launcher.batch import batch_flags, gather, job_store, progress_text
from launcher.batch.batch_plan import (
    BatchOptions,
    BatchRequest,
    BatchSnapshot,
    BatchStart,
    plan_batch,
    query_entry,
)
from launcher.batch.checked_job import CheckedJob
from launcher.batch.driver.progress import Progress
from launcher.batch.job_spec import job_spec
from launcher.batch.output_folder import OutputFolder
from launcher.batch.watch import WatchedJob, progress_data, watch_job
from launcher.core import sizes, untrusted
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.core.events import Event
from launcher.core.plan import Plan
from launcher.core.sizes import format_count, format_decimal_size
from launcher.distribute.model_fetch import ensure_model
from launcher.tools.site import Site
from launcher.tools.site.snapshot import ClusterSnapshot

_STRICT = click.Option(["--strict"], is_flag=True, help="Exit with 3 if there are error rows.")


@command(
    flags=[
        _STRICT,
        options.FETCH,
        options.DRY_RUN,
        options.OFFLINE,
        options.LOCK_WAIT,
        options.YES,
        options.JSON,
    ]
)
@batch_flags.job_options
@click.option("--discard-results", is_flag=True, help="Delete this job's results and start over.")
@click.option("--retry-errors", is_flag=True, help="Retry the error rows.")
@click.option(
    "--queue",
    is_flag=True,
    help="Queue the job until resources are free.",
)
@options.NO_WAIT
def batch(
    call: CommandContext,
    discard_results: bool,
    retry_errors: bool,
    queue: bool,
    no_wait: bool,
    **job_flags: Any,
) -> int:
    """Run a model over every row of JOB's input; each row becomes an answer, or an error with its
    reason.

    The job runs on the cluster. Ctrl-C stops watching, not the job; run the same command to watch
    it again, or to resume it after an interruption. Exit codes: 0 every row is accounted for, 1
    failed, 2 wrong request, 3 error rows (--strict), 130 stopped watching.
    """
    batch_options = BatchOptions(restart=discard_results, retry_errors=retry_errors, queue=queue)
    _check_options(call, batch_options, no_wait=no_wait)
    with call.printer() as to:
        request = build_request(call.inventory, job_flags, to)
        if call.offline:
            unseen = BatchSnapshot(cluster=ClusterSnapshot(site=Site(call.inventory)))
            start = plan_batch(unseen, request, batch_options)
            call.print_script([start.plan])
            return 0
        with call.session(printer=to) as session:
            code, rows = _run(call, session, request, batch_options, no_wait=no_wait)
    if not call.as_json:
        for row in rows:
            print_field(row)
    return code


def _show_shipping(events: Iterable[Event], pieces: int) -> Iterator[Event]:
    """Yield a plan's events, merging those of its `pieces` of files into one display."""
    began = time.monotonic()
    sent: list[str] = []
    for event in events:
        if event.stage == "ship" and event.kind == "stage" and event.state == "ok":
            text = _format_sent(len(set(sent)), pieces)
            yield Event(kind="step", stage="ship", text=text, state="ok", seconds=event.seconds)
        if not _is_piece(event):
            yield event
            continue
        if event.state == "ok":
            sent.append(event.text)
        text = f"{event.text}, {len(sent)} of {pieces} pieces sent"
        yield Event(
            kind="wait",
            stage="ship",
            text=text,
            seconds=time.monotonic() - began,
            data={"pieces": len(sent)},
        )


def _check_options(call: CommandContext, batch_options: BatchOptions, *, no_wait: bool) -> None:
    """Raise UsageError for contradictory options."""
    if call.offline and not call.dry_run:
        raise click.UsageError("--offline requires --dry-run: a job cannot run without the nodes")
    if batch_options.restart and batch_options.retry_errors:
        raise click.UsageError(
            "--discard-results starts over, --retry-errors continues: choose one"
        )
    if no_wait and call.strict:
        raise click.UsageError(
            "--strict needs the job's result, but --no-wait does not wait for it: choose one"
        )


def build_request(
    inventory: Inventory, job_flags: Mapping[str, Any], printer: Printer
) -> BatchRequest:
    """Hash the shipped files of a command line's job, and build the driver's spec; raises
    RequestError.
    """
    from launcher.batch import build, inputs, preconditions

    job = build.with_defaults(batch_flags.parse_options(job_flags), inventory)
    if inventory.ray.off:
        raise RequestError(
            "batch jobs run in Ray, and this cluster has none",
            hint="remove `ray: none` from the inventory, then run `vlaunch up`",
        )
    preconditions.check_fit(job, inventory)
    began = last_report = time.monotonic()
    read = 0

    def progress(count: int) -> None:
        nonlocal read, last_report
        read, now = read + count, time.monotonic()
        if now - last_report >= 1:
            last_report = now
            printer.show(
                Event(
                    kind="wait",
                    stage="input",
                    text=f"reading the input, {format_decimal_size(read)}",
                    data={"bytes": read},
                )
            )

    files = inputs.read_shipped(job, progress)
    if time.monotonic() - began >= 1:
        text, seconds = (
            f"read the input: {format_count(len(files), 'file')}, {format_decimal_size(read)}",
            time.monotonic() - began,
        )
        printer.show(Event(kind="step", stage="input", text=text, state="ok", seconds=seconds))
    return BatchRequest(job=job, spec=job_spec(job, files, inventory), files=files)


def _run(
    call: CommandContext,
    session: Session,
    request: BatchRequest,
    batch_options: BatchOptions,
    *,
    no_wait: bool,
) -> tuple[int, list[str]]:
    """Query the cluster, start the job and watch it; return the exit code and closing lines.

    Holds the cluster's lock until the job is submitted, not while watching.
    """
    with call.locked(session) as locked:
        first, snapshot = _query_cluster(locked, request, dry_run=call.dry_run)
        start = plan_batch(snapshot, request, batch_options)
        folder = _output_folder(
            session.inventory, request, snapshot.entry, restart=batch_options.restart
        )
        if batch_options.restart:
            _confirm(call, session, request.job.name, snapshot.entry, folder)
        if _fetch(call, locked, snapshot.cluster, request.job, start):
            _, snapshot = _query_cluster(locked, request, dry_run=False)
            start = plan_batch(snapshot, request, batch_options)
        already = _unchanged_notes(request, snapshot, start)
        if call.dry_run:
            plan = replace(start.plan, notes=(*start.plan.notes, *already))
            call.print_script([*first, plan])
            return 0, []
        for note in start.plan.notes:
            session.note("batch", note)
        for text in already:
            session.note("batch", text, state="unchanged")
        try:
            if not start.finished:
                _apply(locked, start, folder, clear=batch_options.restart or start.fresh)
        except KeyboardInterrupt:
            text = (
                "interrupted while starting the job: `vlaunch jobs` shows whether it runs;"
                " the same command continues it"
            )
            session.warn("batch", text)
            return 130, []
    if start.finished:
        return _finish(
            session,
            request,
            folder,
            snapshot.entry.progress,
            strict=call.strict,
            began=time.monotonic(),
        )
    if no_wait:
        return _detach(session, start, folder)
    return _watch(session, request, start, folder, strict=call.strict)


def _fetch(
    call: CommandContext,
    session: Session,
    snapshot: ClusterSnapshot,
    job: CheckedJob,
    start: BatchStart,
) -> bool:
    """Copy the model of a job about to start to nodes that lack it, if `--fetch` or the inventory
    asks.

    Return True when it was copied. Raises the errors of `ensure_model`.
    """
    begins = not (start.attached or start.finished or call.dry_run) and job.mode != "predict"
    if not begins or not (call.fetch or session.inventory.models.spread == "auto"):
        return False
    nodes = session.inventory.nodes
    return ensure_model(session, snapshot, job.model, nodes, lambda: start.plan) > 0


def _confirm(
    call: CommandContext,
    session: Session,
    name: str,
    entry: job_store.JobEntry,
    folder: OutputFolder | None,
) -> None:
    """Ask for confirmation before deleting results, if there are any."""
    if not entry.absent or (folder and folder.parts()):
        question = f"Delete the results of `{name}` ({progress_text.row_counts(entry.progress)})?"
        call.confirm(session, question, hint="without `--discard-results`, the job resumes")


def _detach(
    session: Session, start: BatchStart, folder: OutputFolder | None
) -> tuple[int, list[str]]:
    """Report that the job continues on its own and how to watch it; returns the same as `_run`."""
    fetches = " and gathers its answers" if folder is not None else ""
    text = f"{start.job} {'runs' if start.attached else 'is submitted'}; without --no-wait, "
    text += f"the same command watches it{fetches}; `vlaunch jobs` lists it"
    session.done(text, stage="batch", data={"job": start.job})
    return 0, [untrusted.sanitize(start.job)]


def _unchanged_notes(
    request: BatchRequest, snapshot: BatchSnapshot, start: BatchStart
) -> list[str]:
    """Return the reasons for submitting nothing; empty when the job is submitted."""
    if start.attached:
        return [f"the job is already running as Ray job {start.job}; watching it"]
    if not start.finished:
        return []
    rows = progress_text.row_counts(snapshot.entry.progress)
    lines = [f"all rows were already done: {rows}; nothing was submitted"]
    # Local files were hashed again and are unchanged; only a driver can read the others.
    if unread := [source.shown for source in request.job.sources if source.where != "control"]:
        lines.append(
            f"not read again: {', '.join(unread)}; if it has changed, start over with"
            " --discard-results"
        )
    return lines


def _query_cluster(
    session: Session, request: BatchRequest, *, dry_run: bool
) -> tuple[list[Plan], BatchSnapshot]:
    """Query nodes, Ray, the model and the job's folder, after updating the node programs."""
    from launcher.app import servers
    from launcher.tools.shipped.node_files import plan_files

    model = request.job.model if request.job.mode != "predict" else ""
    cluster = servers.query_cluster(session, model=model)
    files = plan_files(cluster.site, verb="batch")
    if not dry_run:
        session.apply(files)
    entry = job_store.JobEntry(absent=True)
    if cluster.site.head_runs:
        (answer,) = session.transport.run([query_entry(cluster.site, request.work)])
        try:
            entry = job_store.parse_entry(answer)
        except UnreadableAnswer:
            # A dry run may not copy the node program that answers.
            if not (dry_run and files.steps):
                raise
    return [files], BatchSnapshot(cluster=cluster, entry=entry)


def _output_folder(
    inventory: Inventory, request: BatchRequest, entry: job_store.JobEntry, *, restart: bool
) -> OutputFolder | None:
    """Return the local folder for the output, if any; raises RequestError."""
    target = request.job.to
    if target.where != "control":
        return None
    folder = OutputFolder(
        path=Path(target.text),
        shown=target.shown,
        cluster=inventory.cluster,
        job=request.job.name,
        digest=request.digest,
    )
    folder.check(started=not entry.absent, restart=restart)
    return folder


def _apply(
    session: Session, start: BatchStart, folder: OutputFolder | None, *, clear: bool
) -> None:
    """Start the job; claim the output folder once all gates have passed, before the first row."""
    claimed = False
    pieces = sum(len(stage.steps) for stage in start.plan.stages if stage.id == "ship")
    for event in _show_shipping(apply(start.plan, session.transport), pieces):
        if event.stage == "prepare" and folder is not None and not claimed:
            folder.claim(clear=clear)
            claimed = True
        session.printer.show(event)


def _watch(
    session: Session,
    request: BatchRequest,
    start: BatchStart,
    folder: OutputFolder | None,
    *,
    strict: bool,
) -> tuple[int, list[str]]:
    name, began = request.job.name, time.monotonic()
    session.begin("batch", f"Watch {start.job}")
    watched = WatchedJob(name=name, work=request.work, job=start.job)
    try:
        events = watch_job(session.site, watched, session.transport, attached=start.attached)
        progress = show_through(events, session.printer)
    except KeyboardInterrupt:
        text = (
            "stopped watching; the job continues. Watch it again with the same command, or"
            f" stop it with `vlaunch stop {name}`"
        )
        session.warn("batch", text)
        return 130, []
    return _finish(session, request, folder, progress, strict=strict, began=began)


def _finish(
    session: Session,
    request: BatchRequest,
    folder: OutputFolder | None,
    progress: Progress,
    *,
    strict: bool,
    began: float,
) -> tuple[int, list[str]]:
    """Gather the output and report the result."""
    if folder is not None:
        # Another job may have written there meanwhile.
        folder.check(started=True, restart=False)
        folder.claim(clear=False)
        try:
            site = session.site
            read = partial(session.fleet.read_file, site.head.name, site.container_name(site.head))
            fetched = gather.gather(site, request.work, folder, session.transport, read)
            show_through(fetched, session.printer)
        except KeyboardInterrupt:
            text = (
                "stopped fetching; all rows are done, and the same command fetches the missing"
                " files"
            )
            session.warn("gather", text)
            return 130, []
    where = request.job.to.shown
    rows = progress_text.row_counts(progress)
    text = f"{rows} are done, {progress.errors:,} of them with errors"
    session.done(
        text,
        state="warn" if progress.errors else "ok",
        stage="batch",
        seconds=time.monotonic() - began,
        data={**progress_data(progress), "output": where},
    )
    return 3 if strict and progress.errors else 0, _result_lines(request, progress, where)


def _result_lines(request: BatchRequest, progress: Progress, where: str) -> list[str]:
    done, seconds = progress.accounted - progress.before, progress.updated - progress.started
    cached = f" ({progress.tokens_cached:,} from the cache)" if progress.tokens_cached else ""
    tokens = f"{progress.tokens_in:,} in{cached}, {progress.tokens_out:,} out"
    speed = ""
    if done and seconds > 0:
        rate, span = sizes.format_rate(done / seconds), sizes.format_duration(seconds)
        speed = f"{rate} rows/s over {span}"
    retry_hint = f", see {where.rstrip('/')}/errors; retry them with --retry-errors"
    rows = {
        "job": request.job.name,
        "answers": f"{progress.done:,} in {where.rstrip('/')}/rows",
        "errors": f"{progress.errors:,}{retry_hint if progress.errors else ''}",
        **({"tokens": tokens} if progress.tokens_in or progress.tokens_out else {}),
        **({"speed": speed} if speed else {}),
        **({"cost": hours} if (hours := progress_text.gpu_hours(progress)) else {}),
    }
    return [f"{label:<8} {value}" for label, value in rows.items()]


def _is_piece(event: Event) -> bool:
    """Return True if the event is about sending a piece of a file."""
    return event.stage == "ship" and event.kind == "step" and event.state in ("running", "ok")


def _format_sent(files: int, pieces: int) -> str:
    return (
        f"{files} file{'' if files == 1 else 's'} sent in {pieces}"
        f" piece{'' if pieces == 1 else 's'}"
    )
