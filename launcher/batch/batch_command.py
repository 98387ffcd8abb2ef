"""`vlaunch batch`: answer every row of a job's input on the cluster, watch it, and gather the
answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from launcher.app import options
from launcher.app.apply import apply
from launcher.app.command import Call, command
from launcher.app.progress import Printer, show_through
from launcher.app.registry import extended
from launcher.app.session import Session
from launcher.app.terminal import field
from launcher.batch import batch_flags, gather, job_store, progress_text
from launcher.batch.batch_plan import (
    BatchSnapshot,
    Options,
    Request,
    Start,
    plan_batch,
    query_entry,
)
from launcher.batch.driver.progress import Progress
from launcher.batch.job_spec import job_spec
from launcher.batch.output_folder import OutputFolder, size
from launcher.batch.shape import Job
from launcher.batch.watch import Watched, data, watch
from launcher.core import sizes, untrusted
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.core.events import Event
from launcher.core.plan import Plan
from launcher.distribute.model_fetch import ensure_model
from launcher.tools.site import Site
from launcher.tools.snapshot import ClusterSnapshot

# What an optional package gives for its options: called with whether other options are about nodes,
# it returns a function that prints a job instead of running it, or None; it raises UsageError.
Exporter: TypeAlias = "Callable[[bool], Callable[[Inventory, Request], None] | None]"

_STRICT = click.Option(
    ["--strict"], is_flag=True, help="End with exit code 3 when rows ended as errors."
)
_TELL = 10.0  # seconds between two lines where every line stays


@command(
    flags=[
        _STRICT,
        options.FETCH,
        options.DRY_RUN,
        options.OFFLINE,
        options.LOCK_WAIT,
        options.JSON,
    ]
)
@batch_flags.job
@click.option("--discard-results", is_flag=True, help="Delete this job's results and start over.")
@click.option("--yes", is_flag=True, help="With --discard-results: do not ask.")
@click.option("--retry-errors", is_flag=True, help="Try the rows again that ended as errors.")
@click.option(
    "--queue",
    is_flag=True,
    help="Submit it although others hold what it needs, and let it wait for them.",
)
@click.option("--detach", is_flag=True, help="Submit it and return at once.")
@extended("batch")
def batch(
    call: Call,
    discard_results: bool,
    yes: bool,
    retry_errors: bool,
    queue: bool,
    detach: bool,
    exporter: Exporter | None = None,
    **asked: Any,
) -> int:
    """Answer every row of JOB's input: each ends once, as an answer or as an error with its reason.

    The job runs on the cluster. Ctrl-C stops the watching, never the job; the same command watches
    it again, or goes on where it stopped, whatever ended it. Exit codes: 0 every row is accounted
    for, 1 it failed, 2 the request was wrong, 3 rows ended as errors (--strict), 130 stopped
    watching.
    """
    how = Options(restart=discard_results, retry_errors=retry_errors, queue=queue)
    _check_options(call, how, detach=detach)
    about_nodes = (discard_results, retry_errors, queue, detach, call.dry_run, call.fetch)
    export = exporter(any(about_nodes)) if exporter else None
    job = batch_flags.read(asked)
    if call.inventory.ray.off:
        raise RequestError(
            "batch jobs run in Ray, and this cluster has none",
            hint="take `none` out of `ray:`, then run `vlaunch up`",
        )
    with call.printer() as to:
        request = _request(call.inventory, job, to)
        if export is not None:
            export(call.inventory, request)
            return 0
        if call.offline:
            unseen = BatchSnapshot(cluster=ClusterSnapshot(site=Site(call.inventory)))
            start = plan_batch(unseen, request, how)
            call.print_script([start.plan])
            return 0
        with call.session(to=to) as session:
            code, rows = _run(call, session, request, how, detach=detach, yes=yes)
    if not call.as_json:
        for row in rows:
            field(row)
    return code


def _show_shipping(events: Iterable[Event], pieces: int) -> Iterator[Event]:
    """Yield a plan's events, those of its `pieces` of files as one display that goes on."""
    began = told = time.monotonic()
    sent: list[str] = []
    for event in events:
        if event.stage == "ship" and event.kind == "stage" and event.state == "ok":
            text = _sent(len(set(sent)), pieces)
            yield Event(kind="step", stage="ship", text=text, state="ok", seconds=event.seconds)
        if not _is_piece(event):
            yield event
            continue
        now = time.monotonic()
        if event.state == "ok":
            sent.append(event.text)
        tell = now - told >= _TELL
        if tell:
            told = now
        text = f"{event.text}, {len(sent)} of {pieces} pieces sent"
        yield Event(
            kind="wait",
            stage="ship",
            text=text,
            state="running" if tell else "",
            seconds=now - began,
            data={"pieces": len(sent)},
        )


def _check_options(call: Call, how: Options, *, detach: bool) -> None:
    """Raise UsageError for options that do not go together."""
    if call.offline and not call.dry_run:
        raise click.UsageError(
            "--offline goes with --dry-run: no row is answered without the nodes"
        )
    if how.restart and how.retry_errors:
        raise click.UsageError("--discard-results starts over, --retry-errors goes on: choose one")
    if detach and call.strict:
        raise click.UsageError(
            "--strict judges how the job ends, and --detach does not wait for that: choose one"
        )


def _request(inventory: Inventory, job: Job, to: Printer) -> Request:
    """Read the files that are shipped, and describe the job as its driver will read it."""
    from launcher.batch import build, fits, inputs

    job = build.with_defaults(job, inventory)
    fits.check(job, inventory)
    began = told = time.monotonic()
    read = 0

    def progress(count: int) -> None:
        nonlocal read, told
        read, now = read + count, time.monotonic()
        if now - told >= 1:
            told = now
            to.show(
                Event(
                    kind="wait",
                    stage="input",
                    text=f"reading the input, {size(read)}",
                    data={"bytes": read},
                )
            )

    files = inputs.shipped(job, progress)
    if time.monotonic() - began >= 1:
        text, seconds = (
            f"read the input: {len(files)} files, {size(read)}",
            time.monotonic() - began,
        )
        to.show(Event(kind="step", stage="input", text=text, state="ok", seconds=seconds))
    return Request(job=job, spec=job_spec(job, files, inventory), files=files)


def _run(
    call: Call, session: Session, request: Request, how: Options, *, detach: bool, yes: bool
) -> tuple[int, list[str]]:
    """Look, decide, begin and watch; returns the exit code, and what to print when the display has
    been put away.

    The cluster's lock is held until the job is submitted, and not while it is watched.
    """
    with call.locked(session) as ours:
        first, seen = _look(ours, request, dry_run=call.dry_run)
        start = plan_batch(seen, request, how)
        folder = _output_folder(session.inventory, request, seen.entry, restart=how.restart)
        if how.restart and not (yes or call.dry_run):
            _confirm(session, request.job.name, seen.entry, folder)
        if _fetch(call, ours, seen.cluster, request.job, start):
            _, seen = _look(ours, request, dry_run=False)
            start = plan_batch(seen, request, how)
        already = _already(request, seen, start)
        if call.dry_run:
            noted = replace(start.plan, notes=(*start.plan.notes, *already))
            call.print_script([*first, noted])
            return 0, []
        for note in start.plan.notes:
            session.note("batch", note)
        for text in already:
            session.note("batch", text, state="unchanged")
        try:
            if not start.finished:
                _apply(ours, start, folder, clear=how.restart or start.anew)
        except KeyboardInterrupt:
            text = (
                "interrupted while the job was begun: `vlaunch jobs` says whether it runs; the same"
                " command goes on"
            )
            session.warn("batch", text)
            return 130, []
    if start.finished:
        return _finish(
            session,
            request,
            folder,
            seen.entry.progress,
            strict=call.strict,
            began=time.monotonic(),
        )
    if detach:
        return _detach(session, start, folder)
    return _watch(session, request, start, folder, strict=call.strict)


def _fetch(call: Call, session: Session, snapshot: ClusterSnapshot, job: Job, start: Start) -> bool:
    """Copy the model of a job that is about to start to the nodes that lack it, if `--fetch` or the
    inventory says so and this is no dry run.

    Return True when it was copied. Raises what `ensure_model` does.
    """
    begins = not (start.attached or start.finished or call.dry_run) and job.mode != "predict"
    if not begins or not (call.fetch or session.inventory.models.spread == "auto"):
        return False
    nodes = session.inventory.nodes
    return ensure_model(session, snapshot, job.model, nodes, lambda: start.plan) > 0


def _confirm(
    session: Session, name: str, entry: job_store.Entry, folder: OutputFolder | None
) -> None:
    """Ask before results are deleted; raises RequestError where there is no terminal."""
    if entry.absent and not (folder and folder.parts()):
        return
    done = progress_text.rows(entry.progress)
    session.confirm(
        f"Delete the results of `{name}` ({done})?",
        f"no terminal to confirm that the results of `{name}` are deleted ({done})",
        hint="add `--yes` to delete them; without `--discard-results`, the job goes on",
    )


def _detach(session: Session, start: Start, folder: OutputFolder | None) -> tuple[int, list[str]]:
    """Tell that the job goes on by itself, and how to watch it; returns what `_run` does."""
    fetches = " and gathers its answers" if folder is not None else ""
    text = f"{start.job} {'runs' if start.attached else 'is submitted'}; without --detach, "
    text += f"the same command watches it{fetches}; `vlaunch jobs` lists it"
    session.done(text, stage="batch", data={"job": start.job})
    return 0, [untrusted.plain(start.job)]


def _already(request: Request, seen: BatchSnapshot, start: Start) -> list[str]:
    """Say why nothing is submitted, if nothing is."""
    if start.attached:
        return [f"this job runs already as Ray job {start.job}; watching it"]
    if not start.finished:
        return []
    rows = progress_text.rows(seen.entry.progress)
    said = [f"every row was done before: {rows}; nothing was submitted"]
    # Files of this machine have been read again, and are the same; the others only a driver can
    # read.
    if unread := [source.shown for source in request.job.sources if source.where != "control"]:
        said.append(
            f"not looked at again: {', '.join(unread)}; if it has changed, start over with"
            " --discard-results"
        )
    return said


def _look(session: Session, request: Request, *, dry_run: bool) -> tuple[list[Plan], BatchSnapshot]:
    """Look at nodes, Ray, the model and the job's folder.

    The program that is asked is brought up to date before.
    """
    from launcher.app import servers
    from launcher.tools.node_files import plan_files

    found = servers.look(session, model=request.job.model if request.job.mode != "predict" else "")
    files = plan_files(found.site, verb="batch")
    if not dry_run:
        session.apply(files)
    entry = job_store.Entry(absent=True)
    if found.site.head_runs:
        (answer,) = session.transport.run([query_entry(found.site, request.work)])
        try:
            entry = job_store.parse_entry(answer)
        except UnreadableAnswer:
            # A dry run may not bring the helper file there that would know.
            if not (dry_run and files.steps):
                raise
    return [files], BatchSnapshot(cluster=found, entry=entry)


def _output_folder(
    inventory: Inventory, request: Request, entry: job_store.Entry, *, restart: bool
) -> OutputFolder | None:
    """Return the folder of this machine that takes the output, if any; raises RequestError."""
    to = request.job.to
    if to.where != "control":
        return None
    folder = OutputFolder(
        path=Path(to.text),
        shown=to.shown,
        cluster=inventory.cluster,
        job=request.job.name,
        digest=request.digest,
    )
    folder.check(begun=not entry.absent, restart=restart)
    return folder


def _apply(session: Session, start: Start, folder: OutputFolder | None, *, clear: bool) -> None:
    """Begin.

    The output folder is made this job's when nothing is in the way any more, and before the first
    row is answered.
    """
    claimed = False
    pieces = sum(len(stage.steps) for stage in start.plan.stages if stage.id == "ship")
    for event in _show_shipping(apply(start.plan, session.transport), pieces):
        if event.stage == "prepare" and folder is not None and not claimed:
            folder.claim(clear=clear)
            claimed = True
        session.to.show(event)


def _watch(
    session: Session, request: Request, start: Start, folder: OutputFolder | None, *, strict: bool
) -> tuple[int, list[str]]:
    name, began = request.job.name, time.monotonic()
    session.begin("batch", f"Watch {start.job}")
    watched = Watched(name=name, work=request.work, job=start.job)
    try:
        events = watch(session.site, watched, session.transport, attached=start.attached)
        progress = show_through(events, session.to)
    except KeyboardInterrupt:
        text = (
            "stopped watching; the job goes on. Watch it again with the same command, or end it"
            f" with `vlaunch stop {name}`"
        )
        session.warn("batch", text)
        return 130, []
    return _finish(session, request, folder, progress, strict=strict, began=began)


def _finish(
    session: Session,
    request: Request,
    folder: OutputFolder | None,
    progress: Progress,
    *,
    strict: bool,
    began: float,
) -> tuple[int, list[str]]:
    """Gather, and tell how it ended."""
    if folder is not None:
        # Meanwhile another job may have written there.
        folder.check(begun=True, restart=False)
        folder.claim(clear=False)
        try:
            site = session.site
            read = partial(session.fleet.read_file, site.head.name, site.container_name(site.head))
            fetched = gather.gather(site, request.work, folder, session.transport, read)
            show_through(fetched, session.to)
        except KeyboardInterrupt:
            text = (
                "stopped gathering; every row is done, and the same command fetches what is missing"
            )
            session.warn("gather", text)
            return 130, []
    where = request.job.to.shown
    rows = progress_text.rows(progress)
    text = f"{rows} are accounted for, {progress.errors:,} of them as errors"
    session.done(
        text,
        state="warn" if progress.errors else "ok",
        stage="batch",
        seconds=time.monotonic() - began,
        data={**data(progress), "output": where},
    )
    return 3 if strict and progress.errors else 0, _rows(request, progress, where)


def _rows(request: Request, progress: Progress, where: str) -> list[str]:
    done, took = progress.accounted - progress.before, progress.updated - progress.started
    cached = f" ({progress.tokens_cached:,} from the cache)" if progress.tokens_cached else ""
    tokens = f"{progress.tokens_in:,} in{cached}, {progress.tokens_out:,} out"
    speed = ""
    if done and took > 0:
        rate, span = sizes.rate(done / took), sizes.duration(took)
        speed = f"{rate} rows/s over {span}"
    again = f", see {where.rstrip('/')}/errors; try them again with --retry-errors"
    rows = {
        "job": request.job.name,
        "answers": f"{progress.done:,} in {where.rstrip('/')}/rows",
        "errors": f"{progress.errors:,}{again if progress.errors else ''}",
        **({"tokens": tokens} if progress.tokens_in or progress.tokens_out else {}),
        **({"speed": speed} if speed else {}),
    }
    return [f"{label:<8} {value}" for label, value in rows.items()]


def _is_piece(event: Event) -> bool:
    """True when a piece of a file is on its way, or has arrived."""
    return event.stage == "ship" and event.kind == "step" and event.state in ("running", "ok")


def _sent(files: int, pieces: int) -> str:
    return (
        f"{files} file{'' if files == 1 else 's'} sent in {pieces}"
        f" piece{'' if pieces == 1 else 's'}"
    )
