"""Watch a batch job: tell its progress until its driver has ended, and why when not every row is
accounted for.

Watching never holds the job: whoever stops watching leaves it as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.batch import job_store, progress_text
from launcher.batch.driver.progress import Progress, Trouble
from launcher.batch.job_store import JobUpdate
from launcher.core import untrusted
from launcher.core.errors import BatchError, DeadlineError, UnreadableAnswer
from launcher.core.events import Event
from launcher.core.transport import Transport
from launcher.tools import symptoms
from launcher.tools.servers import with_names
from launcher.tools.serving_judges import OVER
from launcher.tools.site import Site

_STAGE = "batch"
_EVERY = 1.0
# seconds that the head waits for something new before it answers: each question is a process there,
# which takes its time from the engines of a small node
_PATIENCE = 3.0
_TELL = 10.0  # seconds between two lines where every line stays
_LOST = 45.0  # seconds without an answer until watching is given up
_WARNINGS = 200  # that are told, and remembered as told
# seconds without a word of the driver, which speaks every second, until it is taken to hang
_SILENT = 300.0
_LAST = 30.0  # seconds for a driver that has said how it ended to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A job to watch: its name, its folder on the head, and the Ray job that runs it."""

    name: str
    work: str
    job: str

    @property
    def what(self) -> str:
        """Name it for people."""
        return f"batch job `{self.name}`"


def watch(
    site: Site,
    watched: Watched,
    transport: Transport,
    *,
    attached: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[Event, None, Progress]:
    """Follow a job until its driver has ended; returns its last progress.

    Args:
        site: whose head is asked.
        watched: the job.
        transport: runs what is asked.
        attached: the job ran before, so that what it has behind it is not told.
        clock: seconds that only grow.
        sleep: waits so many seconds.

    Raises:
        BatchError: the job failed, was stopped or killed, or cannot be watched any more.
        DeadlineError: its driver says nothing any more.
    """
    return (yield from _Watching(site, watched, transport, clock, sleep).follow(quiet=attached))


class _Watching:
    """A job that is followed: what has been seen of it so far, and since when."""

    def __init__(
        self,
        site: Site,
        watched: Watched,
        transport: Transport,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._site, self._watched, self._transport = site, watched, transport
        self._clock, self._sleep = clock, sleep
        self._began = self._heard = self._since = clock()
        self._progress, self._offset = Progress(), 0
        self._lines: deque[str] = deque(maxlen=2000)
        self._warned: set[str] = set()
        self._lost_since: float | None = None
        self._over_since: float | None = None
        self._told, self._words = float("-inf"), ""

    def follow(self, *, quiet: bool) -> Generator[Event, None, Progress]:
        """Look until its driver has ended; raises what `watch` does."""
        while True:
            seen = self._look(self._clock())
            if seen is not None:
                yield from self._changes(seen.progress, self._clock(), quiet=quiet)
                quiet = False
                if self._ended(seen, self._clock()):
                    if seen.progress.state == "done":
                        return seen.progress
                    raise self._failure(seen)
                if self._clock() - self._heard >= _SILENT:
                    raise self._hung()
            yield self._waiting(self._clock())
            self._sleep(_EVERY)

    def _look(self, now: float) -> JobUpdate | None:
        """Ask once; `None` when nobody could say, which is borne for a while."""
        dashboard = self._site.inventory.ports.dashboard
        asked = job_store.ask(
            "follow",
            self._watched.work,
            job=self._watched.job,
            offset=self._offset,
            dashboard=dashboard,
            known=self._progress.state,
            patience=_PATIENCE,
        )
        (answer,) = self._transport.run([self._site.inside(self._site.head, asked)])
        try:
            seen = job_store.parse_follow(answer)
        except UnreadableAnswer as error:
            self._lost_since = now if self._lost_since is None else self._lost_since
            if now - self._lost_since >= _LOST:
                raise BatchError(
                    f"{self._watched.what} cannot be watched any more: {error.message}",
                    evidence=error.evidence,
                    hint=(
                        "the job itself may well go on: see `vlaunch jobs`, and watch it again with"
                        " the same command"
                    ),
                ) from None
            return None
        self._lost_since, self._offset = None, seen.offset
        self._lines.extend(untrusted.plain(line)[: untrusted.LONGEST] for line in seen.lines)
        # What an earlier run of the job left there says nothing of this one.
        if seen.progress.submission != self._watched.job:
            seen = replace(
                seen,
                progress=Progress(
                    rows=seen.progress.rows, done=seen.progress.done, errors=seen.progress.errors
                ),
            )
        if seen.progress.updated != self._progress.updated or seen.lines:
            self._heard = now
        return seen

    def _changes(self, progress: Progress, now: float, *, quiet: bool) -> list[Event]:
        events = []
        before, self._progress = self._progress, progress
        if progress.state != before.state:
            doing = progress_text.doing(before.state)
            if (
                doing != progress_text.doing(progress.state)
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

    def _ended(self, seen: JobUpdate, now: float) -> bool:
        """True when nothing more will come: Ray says so, and the driver's last word, if it had one,
        has been read.
        """
        if seen.status not in OVER and not seen.progress.over:
            return False
        self._over_since = now if self._over_since is None else self._over_since
        if seen.status in OVER and seen.progress.over:
            return True
        # Ray's word was asked for first: the driver's may have come between, and a process takes a
        # moment to end.
        return now - self._over_since >= (2 * _EVERY if seen.status in OVER else _LAST)

    def _waiting(self, now: float) -> Event:
        progress = self._progress
        if self._lost_since is not None:
            words = "the head does not answer"
        elif progress.state == "running":
            words = progress_text.line(progress)
        else:
            words = progress_text.doing(progress.state) + (
                f": {progress.text}" if progress.text else ""
            )
        said = words if self._lost_since is not None or progress.state != "running" else "running"
        tell = said != self._words or (progress.state == "running" and now - self._told >= _TELL)
        if tell:
            self._told, self._words = now, said
        return Event(
            kind="wait",
            stage=_STAGE,
            text=words,
            state="running" if tell else "",
            seconds=now - self._began,
            data=data(progress),
        )

    def _failure(self, seen: JobUpdate) -> BatchError:
        name = self._watched.what
        again = (
            "run the same command again: it goes on where this one stopped"
            f" ({progress_text.rows(seen.progress)} are done)"
        )
        if "stopped" in (seen.progress.state, seen.status.lower()):
            return BatchError(f"{name} was stopped", evidence=seen.progress.text, hint=again)
        if seen.progress.error is not None:
            return self._reported(seen.progress, seen.progress.error, again)
        if seen.status == "ABSENT":
            return BatchError(
                f"{name} is gone: Ray does not know it any more, as after a restart of the head",
                hint=again,
            )
        return self._died(seen, again)

    def _reported(self, progress: Progress, error: Trouble, again: str) -> BatchError:
        """Return the error that the driver itself wrote down."""
        log = "\n".join(self._lines)
        hint = error.hint
        if not hint:
            known = symptoms.first("\n".join((error.message, error.evidence, log)))
            hint = known.batch if known else f"read its log: {_log(self._watched)}"
        refused = progress.state == "refused"
        nodes = self._site.nodes
        return BatchError(
            f"{self._watched.what} {'was refused' if refused else 'failed'}:"
            f" {with_names(nodes, error.message)}",
            evidence=with_names(nodes, error.evidence),
            hint=hint if refused else f"{hint}\n{again}",
        )

    def _died(self, seen: JobUpdate, again: str) -> BatchError:
        """Return what is known of a driver that ended without a word of its own."""
        title = f"{self._watched.what}: its driver {_how(seen)}"
        log = "\n".join(self._lines)
        known = symptoms.first(f"{log}\n{seen.message}")
        tail = list(self._lines)[-8:] or seen.message.splitlines()[-8:]
        if known is not None:
            return BatchError(
                f"{title}: {known.cause}",
                evidence=list(dict.fromkeys([known.line, *tail])),
                hint=f"{known.batch}\n{again}",
            )
        if _killed(seen):
            tail = seen.message.splitlines()[:1]  # Who is killed has not said why.
        return BatchError(title, evidence=list(dict.fromkeys(tail)), hint=again)

    def _hung(self) -> DeadlineError:
        return DeadlineError(
            f"the driver of {self._watched.what} has said nothing for {_SILENT:.0f}s",
            evidence=list(self._lines)[-8:],
            hint=(
                f"end it with `vlaunch stop {self._watched.name}`, then run the same command again:"
                " it goes on where it stopped"
            ),
        )


def _killed(seen: JobUpdate) -> bool:
    return (
        seen.exit_code in (-9, 137)
        or "exit code -9" in seen.message
        or "exit code 137" in seen.message
    )


def _how(seen: JobUpdate) -> str:
    if _killed(seen):
        return "was killed, by hand or for lack of memory"
    if seen.status == "SUCCEEDED":
        return "ended without saying that all rows are done"
    return "died" + (f" with exit code {seen.exit_code}" if seen.exit_code is not None else "")


def _log(watched: Watched) -> str:
    return (
        "`vlaunch exec --head -- tail -n 200"
        f" /tmp/ray/session_latest/logs/job-driver-{watched.job}.log`"
    )


def data(progress: Progress) -> dict[str, Any]:
    """Return progress ready for JSON."""
    wanted = asdict(progress)
    for name in ("submission", "warnings", "error", "started", "updated", "text"):
        del wanted[name]
    return wanted
