"""The driver of a batch job: `python3 -m vlaunch_batch WORK`, a Ray job on the head.

The only process that writes answers.
"""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..job import PlacedJob
from . import budget, engine, failures, ledger, predict, ranks, sink, source, summary, survey
from .job_file import Failed, Refused, read_job
from .progress import Tracker
from .results import REPLACED, Part, replaced_columns

MODES = {"engine": engine, "predict": predict, "data-parallel": ranks}
# seconds to wait for the lock: a check for a living driver holds it for an instant
PATIENCE = 5.0
LOCK_REMOVED = "its folder has been removed"
TICK = 1.0  # seconds between checks of the clock, the monitor and the signals
STOPPED_STATUS = 128 + signal.SIGTERM
WORKING, STOPPING = threading.Event(), threading.Event()  # state for the signal handler


class StopRequested(Exception):
    """A request to stop the job (SIGTERM)."""


def main(work: str) -> int:
    """Run the job of a work folder; return the exit status."""
    try:
        lock_file = lock_work(work)
        job = read_job(work)
    except Failed as refused:
        sys.stderr.write(f"{refused.message}\n{refused.evidence}\nhint: {refused.hint}\n")
        return 1
    WORKING.clear()
    STOPPING.clear()
    signal.signal(signal.SIGTERM, handle_sigterm)
    with lock_file, Tracker(job) as progress:
        return run_job(job, progress, partial(check_lock, lock_file))


def handle_sigterm(*_: object) -> None:
    """Stop at once while reading the input; while processing rows, between two blocks."""
    if STOPPING.is_set():
        # the first signal is being handled: another must not interrupt the final report
        return
    STOPPING.set()
    if not WORKING.is_set():
        raise StopRequested


def lock_work(work: str) -> Any:
    """Lock WORK/lock for the life of this process.

    Raises:
        Refused: Another driver of this job lives, or the folder can hold no lock.
    """
    path = os.path.join(work, "lock")
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            os.makedirs(work, exist_ok=True)
            file = open(path, "a")  # noqa: SIM115 - held until the process ends
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_current(file):
                    return file
                reason = LOCK_REMOVED
            except BlockingIOError as error:
                reason = str(error)
            except OSError:
                file.close()
                raise
        except OSError as error:
            hint = (
                "check that `hf_home` is on a filesystem with locks and free space, and"
                " that the head's container may write there"
            )
            raise Refused(f"cannot lock {path}", str(error), hint) from error
        file.close()
        if time.monotonic() >= deadline:
            raise Refused(
                f"another driver is using {work}",
                reason,
                "wait for it, or stop it with `vlaunch stop`",
            )
        time.sleep(0.1)


def is_current(file: Any) -> bool:
    """Return True if a locked file is the one that the next driver would open."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def check_lock(file: Any) -> None:
    """Raise Failed if another driver may be running: this one must not commit a file."""
    if not is_current(file):
        hint = "run `vlaunch batch` again: it continues with the rows that are not written"
        raise Failed(f"{file.name} no longer belongs to this driver", LOCK_REMOVED, hint)


def run_job(job: PlacedJob, progress: Tracker, fence: Callable[[], None]) -> int:
    """Run the job; record its end in the progress, the summary and the log."""
    run = BatchRun(job, progress, fence)
    try:
        run.open()
        WORKING.set()  # from here on a signal must not separate rows from their file
        if run.pending:
            process_rows(job, progress, run)
        run.close()
        pending = run.count_pending()
        if pending:
            raise Failed(
                f"rows without an answer: {pending}",
                hint="run the job again: it continues with those rows",
            )
        summary.write_summary(job, run.manifest, run.ledger, progress, "done")
    except StopRequested:
        return run.end("stopped", progress, None)
    except Refused as refused:
        return run.end("refused", progress, refused)
    except Exception as problem:  # last chance to explain it
        if not isinstance(problem, Failed):
            traceback.print_exc()
        return run.end("failed", progress, failures.explain(problem, job.mode))
    progress.set("done")
    return 0


class BatchRun:
    """Input and output of one run: manifest, ledger, pending rows and sink."""

    def __init__(self, job: PlacedJob, progress: Tracker, fence: Callable[[], None]) -> None:
        self.job, self.progress, self.fence = job, progress, fence
        self.manifest: survey.Manifest | None = None
        self.ledger: ledger.Ledger | None = None
        self.sink: sink.Sink | None = None
        self.pending: dict[int, bytes] = {}

    def open(self) -> None:
        """Survey the input and read the ledger."""
        self.progress.set("reading", "checking the input")
        self.manifest = survey.survey_input(self.job, self.progress.say)
        self.ledger = ledger.recover(self.job, self.manifest, self.job.retry_errors)
        if self.ledger.claim and (before := self.ledger.claim.before):
            self.progress.warn(f"took over from {before}, which fails if it still runs")
        for name in replaced_columns(self.job, self.manifest.columns):
            self.progress.warn(REPLACED.format(name))
        self.pending = self.ledger.all_pending(self.manifest)
        bytes_left = source.count_bytes(self.manifest, self.pending)
        self.progress.begin(self.manifest.rows, self.ledger.done, self.ledger.errors, bytes_left)
        self.sink = sink.Sink(self.job, self.ledger, self.manifest, self.progress, self.fence)

    def count_pending(self) -> int:
        """Return the number of rows without an answer or error row."""
        assert self.ledger is not None and self.manifest is not None  # noqa: S101 - opened
        return source.count_rows(self.ledger.all_pending(self.manifest))

    def close(self) -> None:
        self.progress.set("finishing", "writing the last rows")
        assert self.sink and self.ledger and self.manifest  # noqa: S101 - opened
        self.sink.close()
        self.ledger.finish(self.manifest)

    def end(self, state: str, progress: Tracker, failed: Failed | None) -> int:
        """Commit finished rows and report how the run ended; return the exit status."""
        WORKING.set()  # nor a failure from its report
        try:
            if self.sink is not None:
                self.sink.flush()
        except Exception as problem:  # often the cause of the run's end
            failed = failed or failures.explain(problem, self.job.mode)
            state = "failed" if state == "stopped" else state
        if failed is not None:
            sys.stderr.write(
                f"batch job {state}: {failed.message}\n{failed.evidence}\nhint: {failed.hint}\n"
            )
            progress.fail(failed.message, failed.evidence, failed.hint, state=state)
        else:
            progress.set(state)
        try:
            summary.write_summary(self.job, self.manifest, self.ledger, progress, state)
        except OSError as problem:  # usually a full disk, which is already reported
            sys.stderr.write(f"cannot write summary.json: {problem}\n")
        return STOPPED_STATUS if state == "stopped" else 1


def process_rows(job: PlacedJob, progress: Tracker, run: BatchRun) -> None:
    """Move rows from the pipeline to the sink until none remain."""
    progress.set("loading", "starting the pipeline")
    assert run.sink is not None  # noqa: S101 - opened
    current = budget.CurrentMonitor()
    pipeline = MODES[job.mode].run(job, run.manifest, run.pending, progress, current)
    for parts in pump_results(pipeline):
        run.sink.add(parts)
        run.sink.tick()
        # Ray installs a handler of its own when it connects
        signal.signal(signal.SIGTERM, handle_sigterm)
        if (verdict := current.verdict) is not None:
            raise verdict
        if STOPPING.is_set():
            raise StopRequested


def pump_results(results: Iterator[list[Part]]) -> Iterator[list[Part]]:
    """Yield a pipeline's results, and an empty list after each second without one.

    The pipeline runs in a thread, so that the clock, the monitor and SIGTERM are served while it
    blocks.
    """
    results_queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=2)

    def pump() -> None:
        try:
            for parts in results:
                results_queue.put(("rows", parts))
            results_queue.put(("end", None))
        except BaseException as problem:  # raised again by the consumer
            results_queue.put(("problem", problem))

    threading.Thread(target=pump, name="pipeline", daemon=True).start()
    while True:
        try:
            kind, value = results_queue.get(timeout=TICK)
        except queue.Empty:
            yield []
            continue
        if kind == "rows":
            yield value
        elif kind == "problem":
            # Code that calls `sys.exit` must not end this process before the error is reported.
            raise value if isinstance(value, Exception) else RuntimeError(repr(value)) from value
        else:
            return


def run() -> None:
    """Run the job of the command line, and exit with its status."""
    status = 1
    try:
        status = main(sys.argv[1])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of an abandoned pipeline may hang in Ray; its actors end with this process.
    os._exit(status)


if __name__ == "__main__":
    run()
