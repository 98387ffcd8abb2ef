"""Watch a batch job: tell its progress until its driver has ended, and why when not every row is
accounted for.

Watching never holds the job: whoever stops watching leaves it as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from launcher.checks.serving import OVER
from launcher.errors import DeadlineError, NodeError, UnreadableAnswer
from launcher.events import Event
from launcher.plan import progress_text
from launcher.site import Site
from launcher.tools import job_store, symptoms, untrusted
from launcher.tools.job_store import JobUpdate, Progress, Trouble
from launcher.transport import Transport

_STAGE = "batch"
_EVERY = 1.0
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


@dataclass(slots=True, kw_only=True)
class _State:
    began: float
    heard: float
    progress: Progress = field(default_factory=Progress)
    since: float = 0.0
    offset: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=2000))
    warned: set[str] = field(default_factory=set)
    lost_since: float | None = None
    over_since: float | None = None
    told: float = float("-inf")
    words: str = ""


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
        NodeError: the job failed, was stopped or killed, or cannot be watched any more.
        DeadlineError: its driver says nothing any more.
    """
    state = _State(began=clock(), heard=clock(), since=clock())
    quiet = attached
    while True:
        seen = _look(site, watched, transport, state, clock())
        if seen is not None:
            yield from _changes(state, seen.progress, clock(), quiet=quiet)
            quiet = False
            if _ended(state, seen, clock()):
                if seen.progress.state == "done":
                    return seen.progress
                raise _failure(watched, state, seen)
            if clock() - state.heard >= _SILENT:
                raise _hung(watched, state)
        yield _waiting(state, clock())
        sleep(_EVERY)


def _look(
    site: Site, watched: Watched, transport: Transport, state: _State, now: float
) -> JobUpdate | None:
    """Ask once; `None` when nobody could say, which is borne for a while."""
    dashboard = site.inventory.ports.dashboard
    asked = job_store.follow(watched.work, watched.job, state.offset, dashboard)
    (answer,) = transport.run([site.inside(site.head, asked)])
    try:
        seen = job_store.parse_follow(answer)
    except UnreadableAnswer as error:
        state.lost_since = now if state.lost_since is None else state.lost_since
        if now - state.lost_since >= _LOST:
            raise NodeError(
                "",
                f"batch job `{watched.name}` cannot be watched any more: {error.message}",
                evidence=error.evidence,
                hint=(
                    "the job itself may well go on: see `vlaunch jobs`, and watch it again with the"
                    " same command"
                ),
            ) from None
        return None
    state.lost_since, state.offset = None, seen.offset
    state.lines.extend(untrusted.plain(each[: untrusted.LONGEST]) for each in seen.lines)
    # What an earlier run of the job left there says nothing of this one.
    if seen.progress.submission != watched.job:
        seen = replace(
            seen,
            progress=Progress(
                rows=seen.progress.rows, done=seen.progress.done, errors=seen.progress.errors
            ),
        )
    if seen.progress.updated != state.progress.updated or seen.lines:
        state.heard = now
    return seen


def _changes(state: _State, progress: Progress, now: float, *, quiet: bool) -> list[Event]:
    events = []
    before, state.progress = state.progress, progress
    if progress.state != before.state:
        doing = progress_text.doing(before.state)
        if (
            doing != progress_text.doing(progress.state)
            and not quiet
            and progress.state not in ("failed", "refused", "stopped")
        ):
            events.append(
                Event(kind="step", stage=_STAGE, text=doing, state="ok", seconds=now - state.since)
            )
        state.since = now
    for text in progress.warnings:
        if text not in state.warned and len(state.warned) < _WARNINGS:
            state.warned.add(text)
            events.append(Event(kind="warning", stage=_STAGE, text=text, state="warn"))
    return events


def _ended(state: _State, seen: JobUpdate, now: float) -> bool:
    """True when nothing more will come: Ray says so, and the driver's last word, if it had one, has
    been read.
    """
    if seen.status not in OVER and not seen.progress.over:
        return False
    state.over_since = now if state.over_since is None else state.over_since
    if seen.status in OVER and seen.progress.over:
        return True
    # Ray's word was asked for first: the driver's may have come between, and a process takes a
    # moment to end.
    return now - state.over_since >= (2 * _EVERY if seen.status in OVER else _LAST)


def _failure(watched: Watched, state: _State, seen: JobUpdate) -> NodeError:
    name = f"batch job `{watched.name}`"
    again = (
        "run the same command again: it goes on where this one stopped"
        f" ({progress_text.rows(seen.progress)} are done)"
    )
    if "stopped" in (seen.progress.state, seen.status.lower()):
        return NodeError("", f"{name} was stopped", evidence=seen.progress.text, hint=again)
    if seen.progress.error is not None:
        return _reported(watched, state, seen.progress, seen.progress.error, again)
    if seen.status == "ABSENT":
        return NodeError(
            "",
            f"{name} is gone: Ray does not know it any more, as after a restart of the head",
            hint=again,
        )
    return _died(watched, state, seen, again)


def _reported(
    watched: Watched, state: _State, progress: Progress, error: Trouble, again: str
) -> NodeError:
    """Return the error that the driver itself wrote down."""
    log = "\n".join(state.lines)
    hint = error.hint
    if not hint:
        known = symptoms.first("\n".join((error.message, error.evidence, log)))
        hint = known.batch if known else f"read its log: {_log(watched)}"
    refused = progress.state == "refused"
    return NodeError(
        "",
        f"batch job `{watched.name}` {'was refused' if refused else 'failed'}: {error.message}",
        evidence=error.evidence or list(state.lines)[-8:],
        hint=hint if refused else f"{hint}\n{again}",
    )


def _died(watched: Watched, state: _State, seen: JobUpdate, again: str) -> NodeError:
    """Return what is known of a driver that ended without a word of its own."""
    title = f"batch job `{watched.name}`: its driver {_how(seen)}"
    log = "\n".join(state.lines)
    known = symptoms.first(f"{log}\n{seen.message}")
    tail = list(state.lines)[-8:] or seen.message.splitlines()[-8:]
    if known is not None:
        return NodeError(
            "",
            f"{title}: {known.cause}",
            evidence=list(dict.fromkeys([known.line, *tail])),
            hint=f"{known.batch}\n{again}",
        )
    if _killed(seen):
        tail = seen.message.splitlines()[:1]  # Who is killed has not said why.
    return NodeError("", title, evidence=list(dict.fromkeys(tail)), hint=again)


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


def _hung(watched: Watched, state: _State) -> DeadlineError:
    return DeadlineError(
        "",
        f"the driver of batch job `{watched.name}` has said nothing for {_SILENT:.0f}s",
        evidence=list(state.lines)[-8:],
        hint=(
            f"end it with `vlaunch stop {watched.name}`, then run the same command again: it goes"
            " on where it stopped"
        ),
    )


def _log(watched: Watched) -> str:
    return (
        "`vlaunch exec --head -- tail -n 200"
        f" /tmp/ray/session_latest/logs/job-driver-{watched.job}.log`"
    )


def _waiting(state: _State, now: float) -> Event:
    progress = state.progress
    if state.lost_since is not None:
        words = "the head does not answer"
    elif progress.state == "running":
        words = progress_text.line(progress)
    else:
        words = progress_text.doing(progress.state) + (
            f": {progress.text}" if progress.text else ""
        )
    said = words if state.lost_since is not None or progress.state != "running" else "running"
    tell = said != state.words or (progress.state == "running" and now - state.told >= _TELL)
    if tell:
        state.told, state.words = now, said
    return Event(
        kind="wait",
        stage=_STAGE,
        text=words,
        state="running" if tell else "",
        seconds=now - state.began,
        data=data(progress),
    )


def data(progress: Progress) -> dict[str, Any]:
    """Return progress ready for JSON."""
    wanted = asdict(progress)
    for name in ("submission", "warnings", "error", "started", "updated", "text"):
        del wanted[name]
    return wanted
