"""Wait for a server: follow its log through its phases until its keeper says that a completion (or
what else its model gives) has come back, or until it is known why none will.

Watching never holds the server: whoever stops watching leaves it as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import (
    DeadlineError,
    ServerError,
    StoppedError,
    UnreadableAnswer,
    UnwatchedError,
)
from launcher.events import Event, State
from launcher.payload.agent.task import COMPLETION, ONLY_HEALTH, named
from launcher.state.endpoints import holds
from launcher.state.watched import VAGUE, ServerSnapshot, Watched, failure
from launcher.tools import symptoms, untrusted, vllm
from launcher.transport import Transport, by_node

_EVERY = 1.0  # seconds between two looks, which may take their time
_LOST = 45.0  # seconds without an answer until watching is given up
# seconds of silence, after a fatal line, until a server that does not end by itself is given up
_SETTLE = 8.0
_LOOKS = 8  # until the keeper knows of an answer what has just been seen
_REFUSALS = 3
_STAGE = "serve"
_TOLD_TO_END = "*** SIGTERM received"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that has answered, and so has each of its endpoints and replicas, where there are
    several.

    `seconds` is how long the watching took, `answer_seconds` the slowest completion alone,
    `replicas` each replica's. `task` is what the model does; `came` what came from one that does
    not generate, and `refused` what it said to all requests, where `/health` alone answers.
    """

    endpoints: tuple[str, ...]
    model: str
    fingerprint: str
    text: str
    ranks: Mapping[str, tuple[str, ...]]
    capacity: vllm.Capacity
    seconds: float
    answer_seconds: float
    replicas: tuple[float, ...] = ()
    task: str = ""
    came: str = ""
    refused: str = ""


def watch(
    watched: Watched,
    transport: Transport,
    *,
    timeout: float,
    attached: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[Event, None, Served]:
    """Follow a server until it has answered.

    Args:
        watched: what to ask, and how to read it.
        transport: runs what is asked.
        timeout: seconds until the wait is given up; the server goes on.
        attached: the server was there before, so that phases which have passed are not told.
        clock: seconds that only grow.
        sleep: waits so many seconds.

    Raises:
        ServerError: the server ended, or cannot go on, or does not answer as it should.
        StoppedError: somebody stopped it.
        UnwatchedError: nobody could say for too long how it is.
        DeadlineError: it took too long.
    """
    return (yield from _Watching(watched, transport, timeout, clock, sleep).follow(quiet=attached))


class _Watching:
    """A server that is followed: what has been seen of it so far, and since when."""

    def __init__(
        self,
        watched: Watched,
        transport: Transport,
        timeout: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._watched, self._transport, self._timeout = watched, transport, timeout
        self._clock, self._sleep = clock, sleep
        self._began = self._phase_began = clock()
        self._phase, self._offset = "start", 0
        self._lines: deque[str] = deque(maxlen=4000)
        self._warned: set[str] = set()
        self._fatal_since: float | None = None
        self._lost_since: float | None = None
        self._told = self._silent = self._doing = ""
        self._recovering = False

    def follow(self, *, quiet: bool) -> Generator[Event, None, Served]:
        """Look until it has answered; raises what `watch` does."""
        while True:
            seen = self._look(self._clock())
            if seen is not None:
                yield from self._progress(seen, self._clock(), quiet=quiet)
                quiet = False
                if seen.doing or seen.recovering:
                    self._fatal_since = None  # What died is being brought back.
                else:
                    yield from self._symptoms(seen, self._clock())
                self._raise_if_over(seen, self._clock())
                if seen.answers:  # which outdoes whatever the log says
                    yield self._waiting(self._clock())
                    served = self._served(seen, self._clock() - self._began)
                    yield from self._told_of(served)
                    return replace(served, ranks=self._ranks(seen))
                self._raise_if_refused(seen)
            now = self._clock()
            if now - self._began >= self._timeout:
                raise self._too_late()
            yield self._waiting(now)
            self._sleep(_EVERY)

    def _told_of(self, served: Served) -> list[Event]:
        """Tell what has come back, and what that does not prove."""
        came = Event(
            kind="step",
            stage=_STAGE,
            text=f"{served.came or COMPLETION.what} has come back",
            state="ok",
            seconds=self._clock() - self._phase_began,
        )
        if not served.refused:
            return [came]
        text = f"{ONLY_HEALTH} ({served.refused})"
        return [came, Event(kind="warning", stage=_STAGE, text=text, state="warn")]

    def _look(self, now: float) -> ServerSnapshot | None:
        """Ask once; `None` when nobody could say, which is borne for a while: a dashboard may be
        busy, a connection may break.
        """
        answers = by_node(self._transport, self._watched.ask(self._offset))
        try:
            seen = self._watched.read(answers, self._offset)
        except UnreadableAnswer as error:
            self._lost_since = now if self._lost_since is None else self._lost_since
            if now - self._lost_since >= _LOST:
                raise UnwatchedError(
                    f"{self._watched.what} cannot be watched any more: {error.message}",
                    evidence=error.evidence,
                    hint=(
                        "the server itself may well go on: see `vlaunch status`, and watch it again"
                        " with `vlaunch serve`"
                    ),
                ) from None
            return None
        self._lost_since = None
        self._offset, self._doing, self._recovering = seen.offset, seen.doing, seen.recovering
        late = f"{seen.state}: {seen.reason}" if seen.ready and not seen.answers else ""
        self._silent = (
            late or untrusted.plain(str(seen.first.get("error", "")))[: untrusted.LONGEST]
        )
        if seen.anew:
            self._lines.clear()
            self._phase, self._phase_began, self._fatal_since = vllm.PHASES[0].id, now, None
        # Thousands of them are kept: none may be as long as a node likes.
        seen = replace(
            seen, lines=tuple(untrusted.plain(line)[: untrusted.LONGEST] for line in seen.lines)
        )
        self._lines.extend(seen.lines)
        return seen

    def _progress(self, seen: ServerSnapshot, now: float, *, quiet: bool) -> list[Event]:
        events = []
        for phase in vllm.phase_after(self._phase, seen.lines):
            if not quiet:
                took = now - self._phase_began
                events.append(
                    Event(
                        kind="step",
                        stage=_STAGE,
                        text=vllm.title(self._phase),
                        state="ok",
                        seconds=took,
                    )
                )
            self._phase, self._phase_began = phase, now
            self._fatal_since = None  # What goes on was not fatal.
        return events

    def _symptoms(self, seen: ServerSnapshot, now: float) -> list[Event]:
        """Tell a known cause as soon as its line is there; the error with all that is known follows
        when the log is complete.
        """
        if _TOLD_TO_END in "\n".join(self._lines):
            return []  # What dies after it was told to is no symptom.
        known = symptoms.first("\n".join(seen.lines))
        if known is not None and known.fatal:
            self._fatal_since = now
        elif self._fatal_since is not None and (seen.lines or seen.listening):
            # It lives: what looks fatal in a log may have been tried again, or done without.
            self._fatal_since = now
        if known is None or known.id in VAGUE:
            return []  # The error itself, when the log is complete, says more.
        return self._warning(known, healthy=seen.listening)

    def _warning(self, known: symptoms.Match, *, healthy: bool) -> list[Event]:
        if known.cause in self._warned:
            return []
        self._warned.add(known.cause)
        told: State = "failed" if known.fatal and not healthy else "warn"
        return [
            Event(kind="warning", stage=_STAGE, text=f"{known.cause}: {known.line}", state=told)
        ]

    def _raise_if_over(self, seen: ServerSnapshot, now: float) -> None:
        hung = self._fatal_since is not None and now - self._fatal_since >= _SETTLE
        if not seen.ended and not hung:
            return
        if seen.stopped:
            text = "the server was stopped while it was being watched"
            raise StoppedError(
                text, evidence=seen.ended, hint="see who stopped it: `vlaunch audit`"
            )
        raise failure(self._watched, seen, self._lines, hung=hung)

    def _raise_if_refused(self, seen: ServerSnapshot) -> None:
        """Give up when the server refuses what its keeper asks it first."""
        said = seen.first
        status, error = said.get("status"), untrusted.plain(str(said.get("error", "")))
        if status in (401, 403):
            raise ServerError(
                "the server demands another API key than the cluster has",
                evidence=error,
                hint=(
                    "give the key as VLLM_API_KEY under `secrets:`, then run `vlaunch up` and"
                    " `vlaunch serve` again"
                ),
            )
        times = int(_number(said.get("times")))
        if status and times >= _REFUSALS:
            word = (named(str(said.get("task", ""))) or COMPLETION).word
            raise ServerError(
                f"the API is up, but gives no {word} ({times} times)",
                evidence=f"{status}: {error}",
                hint=(
                    f"read its log: `vlaunch logs --server {self._watched.name}`; end it with"
                    f" `vlaunch stop {self._watched.name}`"
                ),
            )

    def _served(self, seen: ServerSnapshot, seconds: float) -> Served:
        said = seen.first

        def text(name: str) -> str:
            return untrusted.plain(str(said.get(name) or ""))

        replicas = said.get("replicas") or ()
        return Served(
            endpoints=tuple(at.url for at in self._watched.endpoints),
            model=text("model"),
            fingerprint=text("fingerprint"),
            text=text("text"),
            ranks=seen.ranks,
            capacity=holds(seen.held.values() or ({},), "\n".join(self._lines)),
            seconds=seconds,
            answer_seconds=_number(said.get("seconds")),
            replicas=tuple(map(_number, replicas if isinstance(replicas, list) else ())),
            task=text("task"),
            came=text("came"),
            refused=text("refused"),
        )

    def _ranks(self, seen: ServerSnapshot) -> Mapping[str, tuple[str, ...]]:
        """Return which node holds what, as soon as the keeper knows it too; as it was expected,
        where it does not say.
        """
        for _ in range(_LOOKS):
            if seen.known:
                break
            self._sleep(_EVERY / 2)
            seen = self._look(self._began) or seen
        return seen.ranks

    def _waiting(self, now: float) -> Event:
        how_far = vllm.shards(list(self._lines)[-20:]) if self._phase == "load" else self._silent
        text = vllm.title(self._phase) + (f" ({how_far})" if how_far else "")
        text = self._doing or text
        if self._recovering:
            text = f"recovering: {text}"
        changed, self._told = text != self._told, text
        return Event(
            kind="wait",
            stage=_STAGE,
            text=text,
            state="running" if changed else "",
            seconds=now - self._began,
            deadline=self._timeout,
        )

    def _too_late(self) -> DeadlineError:
        return DeadlineError(
            f"no answer from the server within {self._timeout:.0f}s;"
            f" {self._silent or f'it is still {self._doing or vllm.title(self._phase)}'}",
            evidence=list(self._lines)[-8:],
            hint=(
                "it goes on: watch it again with the same `vlaunch serve`, see `vlaunch logs -f`,"
                f" or end it with `vlaunch stop {self._watched.name}`"
            ),
        )


def _number(said: Any) -> float:
    return float(said) if isinstance(said, (int, float)) else 0.0


def summary(served: Served) -> dict[str, Any]:
    """Return what was observed of a server, ready for JSON."""
    return {
        "endpoint": served.endpoints[0],
        "endpoints": list(served.endpoints),
        "model": served.model,
        "ranks": {node: list(ranks) for node, ranks in served.ranks.items()},
        "kv_cache_tokens": served.capacity.tokens,
        "max_concurrency": served.capacity.concurrency,
        "system_fingerprint": served.fingerprint,
        "seconds": round(served.seconds, 1),
        "first_answer_seconds": served.answer_seconds,
        **({"answer": served.came} if served.came else {}),
        **({"replica_seconds": list(served.replicas)} if served.replicas else {}),
    }
