"""Watch a batch job: report its progress until its driver exits, and the cause of a failure.

Watching never affects the job.
"""

import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.batch import job_store, progress_text
from launcher.batch.driver.progress import JobFailure, Progress
from launcher.batch.job_store import JobUpdate
from launcher.core.errors import BatchError, DeadlineError, UnreadableAnswer
from launcher.core.events import Event
from launcher.core.transport import Transport
from launcher.failures.explain import explain
from launcher.tools.follow import INTERVAL, Contact
from launcher.tools.site import Site
from launcher.tools.site.servers import replace_addresses
from launcher.tools.site.serving_judges import OVER

_STAGE = "batch"
# seconds that the head waits for a change before answering: each query is a process, which takes
# time from the engines of a small node
_PATIENCE = 3.0
_WARNINGS = 200  # at most this many are reported
# seconds without progress, normally written every second, before the driver counts as hung
_SILENCE_LIMIT = 300.0
_END_LIMIT = 30.0  # seconds for a driver to exit after its final state


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """A job to watch: its name, its folder on the head, and its Ray job."""

    name: str
    work: str
    job: str

    @property
    def title(self) -> str:
        """The job's name in messages."""
        return f"batch job `{self.name}`"


def watch_job(
    site: Site,
    watched: WatchedJob,
    transport: Transport,
    *,
    attached: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[Event, None, Progress]:
    """Follow a job until its driver exits; return its last progress.

    Args:
        site: the cluster.
        watched: the job.
        transport: runs the queries.
        attached: the job ran before: skip its past states.
        clock: monotonic seconds.
        sleep: waits for seconds.

    Raises:
        BatchError: the job failed, was stopped or killed, or can no longer be watched.
        DeadlineError: its driver stopped reporting.
    """
    return (yield from _JobWatcher(site, watched, transport, clock, sleep).follow(quiet=attached))


class _JobWatcher:
    """State of watching one job."""

    def __init__(
        self,
        site: Site,
        watched: WatchedJob,
        transport: Transport,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._site, self._watched, self._transport = site, watched, transport
        self._clock, self._sleep = clock, sleep
        self._began = self._updated_at = self._since = clock()
        self._progress, self._offset = Progress(), 0
        self._lines: deque[str] = deque(maxlen=2000)
        self._warned: set[str] = set()
        self._contact = Contact(clock=clock)
        self._over_since: float | None = None

    def follow(self, *, quiet: bool) -> Generator[Event, None, Progress]:
        """Query until the driver exits; raises the errors of `watch_job`."""
        while True:
            update = self._query(self._clock())
            if update is not None:
                yield from self._change_events(update.progress, self._clock(), quiet=quiet)
                quiet = False
                if self._is_over(update, self._clock()):
                    if update.progress.state == "done":
                        return update.progress
                    raise self._failure_error(update)
                if self._clock() - self._updated_at >= _SILENCE_LIMIT:
                    raise self._hang_error()
            yield self._wait_event(self._clock())
            self._sleep(INTERVAL)

    def _query(self, now: float) -> JobUpdate | None:
        """Query once; return None on an error, which is tolerated for a while."""
        dashboard = self._site.inventory.ports.dashboard
        argv = job_store.build_command(
            "follow",
            self._watched.work,
            job=self._watched.job,
            offset=self._offset,
            dashboard=dashboard,
            known=self._progress.state,
            patience=_PATIENCE,
        )
        (answer,) = self._transport.run([self._site.in_container(self._site.head, argv)])
        try:
            update = job_store.parse_follow(answer)
        except UnreadableAnswer as error:
            if self._contact.lose():
                raise BatchError(
                    f"{self._watched.title} can no longer be watched: {error.message}",
                    evidence=error.evidence,
                    hint=(
                        "the job may still be running: check `vlaunch jobs`; watch"
                        " it again with the same command"
                    ),
                ) from None
            return None
        self._contact.restore()
        self._offset = update.offset
        self._lines.extend(update.lines)
        # Progress of an earlier run says nothing about this one.
        if update.progress.submission != self._watched.job:
            update = replace(
                update,
                progress=Progress(
                    rows=update.progress.rows,
                    done=update.progress.done,
                    errors=update.progress.errors,
                ),
            )
        if update.progress.updated != self._progress.updated or update.lines:
            self._updated_at = now
        return update

    def _change_events(self, progress: Progress, now: float, *, quiet: bool) -> list[Event]:
        events = []
        before, self._progress = self._progress, progress
        if progress.state != before.state:
            doing = progress_text.state_text(before.state)
            if (
                doing != progress_text.state_text(progress.state)
                and not quiet
                and progress.state not in ("failed", "refused", "stopped")
            ):
                events.append(
                    Event(
                        kind="step", stage=_STAGE, text=doing, state="ok", seconds=now - self._since
                    )
                )
            self._since = now
        for text in progress.warnings:
            if text not in self._warned and len(self._warned) < _WARNINGS:
                self._warned.add(text)
                events.append(Event(kind="warning", stage=_STAGE, text=text, state="warn"))
        return events

    def _is_over(self, update: JobUpdate, now: float) -> bool:
        """Return True when no update will follow: Ray reports the end, and the driver's last
        progress is read.
        """
        if update.status not in OVER and not update.progress.over:
            return False
        self._over_since = now if self._over_since is None else self._over_since
        if update.status in OVER and update.progress.over:
            return True
        # Ray was queried first: the driver's report may have come between, and a process takes a
        # moment to exit.
        return now - self._over_since >= (2 * INTERVAL if update.status in OVER else _END_LIMIT)

    def _wait_event(self, now: float) -> Event:
        progress = self._progress
        if self._contact.lost_since is not None:
            text = "the head does not respond"
        elif progress.state == "running":
            text = progress_text.progress_line(progress)
        else:
            text = progress_text.state_text(progress.state) + (
                f": {progress.text}" if progress.text else ""
            )
        running = progress.state == "running" and self._contact.lost_since is None
        return Event(
            kind="wait",
            stage=_STAGE,
            text=text,
            seconds=now - self._began,
            data=progress_data(progress) if running else {},
        )

    def _failure_error(self, update: JobUpdate) -> BatchError:
        name = self._watched.title
        retry_hint = (
            "run the same command again: it continues where this one stopped"
            f" ({progress_text.row_counts(update.progress)} are done)"
        )
        if "stopped" in (update.progress.state, update.status.lower()):
            return BatchError(f"{name} was stopped", evidence=update.progress.text, hint=retry_hint)
        if update.progress.error is not None:
            return self._driver_error(update.progress, update.progress.error, retry_hint)
        if update.status == "ABSENT":
            return BatchError(
                f"{name} is gone: Ray has no record of it, for example after a restart of the head",
                hint=retry_hint,
            )
        return self._death_error(update, retry_hint)

    def _driver_error(self, progress: Progress, error: JobFailure, retry_hint: str) -> BatchError:
        """Return the error that the driver reported."""
        log = "\n".join(self._lines)
        hint = error.hint
        if not hint:
            failure = explain("\n".join((error.message, error.evidence, log)))
            hint = failure.batch if failure else f"read its log: {_log_command(self._watched)}"
        refused = progress.state == "refused"
        nodes = self._site.nodes
        return BatchError(
            f"{self._watched.title} {'was refused' if refused else 'failed'}:"
            f" {replace_addresses(nodes, error.message)}",
            evidence=replace_addresses(nodes, error.evidence),
            hint=hint if refused else f"{hint}\n{retry_hint}",
        )

    def _death_error(self, update: JobUpdate, retry_hint: str) -> BatchError:
        """Return the error of a driver that exited without a report."""
        title = f"{self._watched.title}: its driver {_end_phrase(update)}"
        log = "\n".join(self._lines)
        failure = explain(f"{log}\n{update.message}")
        tail = list(self._lines)[-8:] or update.message.splitlines()[-8:]
        if failure is not None:
            return BatchError(
                f"{title}: {failure.cause}",
                evidence=list(dict.fromkeys([failure.line, *tail])),
                hint=f"{failure.batch}\n{retry_hint}",
            )
        if _was_killed(update):
            tail = update.message.splitlines()[:1]  # a killed driver logs no reason
        return BatchError(title, evidence=list(dict.fromkeys(tail)), hint=retry_hint)

    def _hang_error(self) -> DeadlineError:
        return DeadlineError(
            f"the driver of {self._watched.title} has not reported for {_SILENCE_LIMIT:.0f}s",
            evidence=list(self._lines)[-8:],
            hint=(
                f"stop it with `vlaunch stop {self._watched.name}`, then run the same command"
                " again: it continues where it stopped"
            ),
        )


def _was_killed(update: JobUpdate) -> bool:
    return (
        update.exit_code in (-9, 137)
        or "exit code -9" in update.message
        or "exit code 137" in update.message
    )


def _end_phrase(update: JobUpdate) -> str:
    if _was_killed(update):
        return "was killed, by an operator or for lack of memory"
    if update.status == "SUCCEEDED":
        return "exited before all rows were done"
    return "died" + (f" with exit code {update.exit_code}" if update.exit_code is not None else "")


def _log_command(watched: WatchedJob) -> str:
    return (
        "`vlaunch exec --head -- tail -n 200"
        f" /tmp/ray/session_latest/logs/job-driver-{watched.job}.log`"
    )


def progress_data(progress: Progress) -> dict[str, Any]:
    """Return progress for JSON output."""
    fields = {**asdict(progress), "end": progress.end}
    for name in ("submission", "warnings", "error", "started", "updated", "text"):
        del fields[name]
    return fields
