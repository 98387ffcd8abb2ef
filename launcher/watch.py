"""Wait for a server: follow its log through its phases until a completion has come back, or until
it is known why none will.

Watching never holds the server: whoever stops watching leaves it as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.checks.ray import read_payload
from launcher.errors import DeadlineError, NodeError, StoppedError, UnreadableAnswer, UnwatchedError
from launcher.events import Event, State
from launcher.plan.watched import ServerSnapshot, Watched, failure
from launcher.tools import symptoms, untrusted, vllm
from launcher.transport import Transport, by_node

_EVERY = 1.0
_LOST = 45.0  # seconds without an answer until watching is given up
# seconds of silence, after a fatal line, until a server that does not end by itself is given up
_SETTLE = 8.0
_FIRST_ANSWER = 60.0
_LOOKS = 8  # until the keeper knows of an answer what has just been seen
_REFUSALS = 3
_STAGE = "serve"
_TOLD_TO_END = "*** SIGTERM received"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that has answered, and so has each of its replicas, where there are several.

    `seconds` is how long the watching took, `answer_seconds` the completion alone, `replicas` each
    replica's.
    """

    endpoint: str
    model: str
    fingerprint: str
    text: str
    ranks: Mapping[str, tuple[str, ...]]
    capacity: vllm.Capacity
    seconds: float
    answer_seconds: float
    replicas: tuple[float, ...] = ()


@dataclass(slots=True, kw_only=True)
class _State:
    began: float
    phase: str = "start"
    phase_began: float = 0.0
    offset: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=4000))
    warned: set[str] = field(default_factory=set)
    fatal_since: float | None = None
    lost_since: float | None = None
    refusals: list[str] = field(default_factory=list)
    told: str = ""
    silent: str = ""
    doing: str = ""
    recovering: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


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
        NodeError: the server ended, or cannot go on, or does not answer as it should.
        StoppedError: somebody stopped it.
        UnwatchedError: nobody could say for too long how it is.
        DeadlineError: it took too long.
    """
    state = _State(began=clock(), phase_began=clock())
    quiet = attached
    while True:
        seen = _look(watched, transport, state, clock())
        if seen is not None:
            yield from _progress(state, seen, clock(), quiet=quiet)
            quiet = False
            if seen.doing or seen.recovering:
                state.fatal_since = None  # What died is being brought back.
            else:
                yield from _symptoms(state, seen, clock())
            _raise_if_over(watched, state, seen, clock())
            # A completion that comes back outdoes whatever the log says.
            if seen.server.get("health") == 200 and not seen.doing:
                yield _waiting(state, clock(), timeout)
                served = _first_answer(watched, transport, state, seen, clock, timeout=timeout)
                if served is not None:
                    yield Event(
                        kind="step",
                        stage=_STAGE,
                        text="a completion has come back",
                        state="ok",
                        seconds=clock() - state.phase_began,
                    )
                    return replace(served, ranks=_ranks(watched, transport, state, seen, sleep))
        now = clock()
        if now - state.began >= timeout:
            raise _too_late(watched, state, timeout)
        yield _waiting(state, now, timeout)
        sleep(_EVERY)


def _ranks(
    watched: Watched,
    transport: Transport,
    state: _State,
    seen: ServerSnapshot,
    sleep: Callable[[float], None],
) -> Mapping[str, tuple[str, ...]]:
    """Return which node holds what, as soon as the keeper knows it too; as it was expected, where
    it does not say.
    """
    for _ in range(_LOOKS):
        if seen.known:
            break
        sleep(_EVERY / 2)
        seen = _look(watched, transport, state, state.began) or seen
    return seen.ranks


def _look(
    watched: Watched, transport: Transport, state: _State, now: float
) -> ServerSnapshot | None:
    """Ask once; `None` when nobody could say, which is borne for a while: a dashboard may be busy,
    a connection may break.
    """
    answers = by_node(transport, watched.ask(state.offset))
    try:
        seen = watched.read(answers, state.offset)
    except UnreadableAnswer as error:
        state.lost_since = now if state.lost_since is None else state.lost_since
        if now - state.lost_since >= _LOST:
            raise UnwatchedError(
                "",
                f"{watched.what} cannot be watched any more: {error.message}",
                evidence=error.evidence,
                hint=(
                    "the server itself may well go on: see `vlaunch status`, and watch it again"
                    " with `vlaunch serve`"
                ),
            ) from None
        return None
    state.lost_since = None
    state.offset, state.doing, state.recovering = seen.offset, seen.doing, seen.recovering
    if seen.anew:
        state.lines.clear()
        state.phase, state.phase_began, state.fatal_since = vllm.PHASES[0].id, now, None
        state.refusals.clear()
    # Thousands of them are kept: none may be as long as a node likes.
    seen = replace(
        seen, lines=tuple(untrusted.plain(line[: untrusted.LONGEST]) for line in seen.lines)
    )
    state.lines.extend(seen.lines)
    return seen


def _progress(state: _State, seen: ServerSnapshot, now: float, *, quiet: bool) -> list[Event]:
    events = []
    for phase in vllm.phase_after(state.phase, seen.lines):
        if not quiet:
            took = now - state.phase_began
            events.append(
                Event(
                    kind="step",
                    stage=_STAGE,
                    text=vllm.title(state.phase),
                    state="ok",
                    seconds=took,
                )
            )
        state.phase, state.phase_began = phase, now
        state.fatal_since = None  # What goes on was not fatal.
    return events


def _symptoms(state: _State, seen: ServerSnapshot, now: float) -> list[Event]:
    """Tell a known cause as soon as its line is there; the error with all that is known follows
    when the log is complete.
    """
    if _TOLD_TO_END in state.text:
        return []  # What dies after it was told to is no symptom.
    known = symptoms.first("\n".join(seen.lines))
    healthy = seen.server.get("health") == 200
    if known is not None and known.fatal:
        state.fatal_since = now
    elif state.fatal_since is not None and (seen.lines or healthy):
        # It lives: what looks fatal in a log may have been tried again, or done without.
        state.fatal_since = now
    return _warning(state, known, healthy=healthy) if known is not None else []


def _warning(state: _State, known: symptoms.Match, *, healthy: bool) -> list[Event]:
    if known.cause in state.warned:
        return []
    state.warned.add(known.cause)
    told: State = "failed" if known.fatal and not healthy else "warn"
    return [Event(kind="warning", stage=_STAGE, text=f"{known.cause}: {known.line}", state=told)]


def _raise_if_over(watched: Watched, state: _State, seen: ServerSnapshot, now: float) -> None:
    hung = state.fatal_since is not None and now - state.fatal_since >= _SETTLE
    if not seen.ended and not hung:
        return
    if seen.stopped:
        text = "the server was stopped while it was being watched"
        raise StoppedError(
            "", text, evidence=seen.ended, hint="see who stopped it: `vlaunch audit`"
        )
    raise failure(watched, seen, state.lines, hung=hung)


def _first_answer(
    watched: Watched,
    transport: Transport,
    state: _State,
    seen: ServerSnapshot,
    clock: Callable[[], float],
    *,
    timeout: float,
) -> Served | None:
    """Ask for a completion; `None` when it is to be asked again."""
    patience = max(5.0, min(_FIRST_ANSWER, timeout - (clock() - state.began)))
    (answer,) = transport.run([watched.complete(patience)])
    try:
        said = read_payload(answer)
    except UnreadableAnswer:
        return None
    missing = _missing(said)
    state.silent = f"no answer yet from {', '.join(missing)}" if missing else ""
    status, error = _outcome(said, missing)
    if status == 200 and said.get("tokens", 0) > 0:
        return _served(watched, state, seen, said, clock() - state.began)
    if status in (401, 403):
        raise NodeError(
            "",
            "the server demands another API key than the cluster has",
            evidence=error,
            hint=(
                "give the key as VLLM_API_KEY under `secrets:`, then run `vlaunch up` and `vlaunch"
                " serve` again"
            ),
        )
    if status:
        state.refusals.append(f"{status}: {error or 'a completion without a token'}")
    if len(state.refusals) >= _REFUSALS:
        raise NodeError(
            "",
            f"the API is up, but gives no completion ({len(state.refusals)} times)",
            evidence=state.refusals[-1],
            hint=(
                f"read its log: `vlaunch logs --server {watched.name}`; end it with `vlaunch"
                f" stop {watched.name}`"
            ),
        )
    return None


def _missing(said: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what the replicas said that gave no completion."""
    replicas = enumerate(said.get("replicas") or ())
    return {f"DP{number}": each for number, each in replicas if not each["answered"]}


def _outcome(said: Mapping[str, Any], missing: Mapping[str, Mapping[str, Any]]) -> tuple[int, str]:
    """Return the status of a completion (0: none yet), and what was said against it."""
    if not missing:
        return said.get("status", 0), str(said.get("error", ""))
    # One replica's answer is not all replicas': what any of them says against it counts.
    for name, each in missing.items():
        if each["status"] not in (0, 200):
            return each["status"], f"{name}: {each['error']}"
    return 0, ""


def _served(
    watched: Watched, state: _State, seen: ServerSnapshot, said: Mapping[str, Any], seconds: float
) -> Served:
    return Served(
        endpoint=watched.endpoint,
        model=said.get("model") or "",
        fingerprint=said.get("system_fingerprint") or "",
        text=said.get("text") or "",
        ranks=seen.ranks,
        capacity=vllm.capacity(seen.server.get("capacity") or {}, state.text),
        seconds=seconds,
        answer_seconds=float(said.get("seconds", 0)),
        replicas=tuple(float(each["seconds"]) for each in said.get("replicas") or ()),
    )


def _waiting(state: _State, now: float, timeout: float) -> Event:
    how_far = vllm.shards(list(state.lines)[-20:]) if state.phase == "load" else state.silent
    text = vllm.title(state.phase) + (f" ({how_far})" if how_far else "")
    text = state.doing or text
    if state.recovering:
        text = f"recovering: {text}"
    changed, state.told = text != state.told, text
    return Event(
        kind="wait",
        stage=_STAGE,
        text=text,
        state="running" if changed else "",
        seconds=now - state.began,
        deadline=timeout,
    )


def _too_late(watched: Watched, state: _State, timeout: float) -> DeadlineError:
    return DeadlineError(
        "",
        f"no answer from the server within {timeout:.0f}s;"
        f" {state.silent or f'it is still {_still(state)}'}",
        evidence=list(state.lines)[-8:],
        hint=(
            "it goes on: watch it again with the same `vlaunch serve`, see `vlaunch logs -f`, or"
            f" end it with `vlaunch stop {watched.name}`"
        ),
    )


def _still(state: _State) -> str:
    return state.doing or vllm.title(state.phase)


def summary(served: Served) -> dict[str, Any]:
    """Return what was observed of a server, ready for JSON."""
    return {
        "endpoint": served.endpoint,
        "model": served.model,
        "ranks": {node: list(ranks) for node, ranks in served.ranks.items()},
        "kv_cache_tokens": served.capacity.tokens,
        "max_concurrency": served.capacity.concurrency,
        "system_fingerprint": served.fingerprint,
        "seconds": round(served.seconds, 1),
        "first_answer_seconds": served.answer_seconds,
        **({"replica_seconds": list(served.replicas)} if served.replicas else {}),
    }
