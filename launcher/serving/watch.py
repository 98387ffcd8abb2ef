"""Wait for a server: follow its log through its phases until the head's agent has an answer of the
model, or a reason why there will be none.

The server goes on when the watching ends.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.agent.desired import Desired
from launcher.agent.observed import OVER, FirstAnswer, Observed, Refusal
from launcher.agent.task import COMPLETION, ONLY_HEALTH, named
from launcher.core import untrusted
from launcher.core.domain import Answer
from launcher.core.errors import (
    DeadlineError,
    ServerError,
    StoppedError,
    UnreadableAnswer,
    UnwatchedError,
)
from launcher.core.events import Event, State
from launcher.core.transport import Transport, by_node
from launcher.serving import endpoints
from launcher.tools import agent_queries, servers, symptoms, vllm
from launcher.tools.ray_judges import read_payload
from launcher.tools.servers import Server
from launcher.tools.site import Site

_EVERY = 1.0  # seconds between two queries, which may take their time
_PATIENCE = 5.0  # seconds in which an API that starts may begin to listen
_LOST = 45.0  # seconds without an answer until watching is given up
# seconds of silence, after a fatal line, until a server that does not end by itself is given up
_SETTLE = 8.0
_QUERIES = 8  # until the agent has listed the ranks of a server that has just answered
_REFUSALS = 3
_STAGE = "serve"
_TERMINATED = "*** SIGTERM received"
# characters of an exception in the first line of an error; all of it is in the evidence
_LINE = 160
# symptoms that only say that something failed; the exception says what
_VAGUE = frozenset({"engine-failed", "rank-died"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that has answered, and so has each of its endpoints and replicas, where there are
    several.

    `seconds` is how long the watching took, `first` what the model gave first.
    """

    first: FirstAnswer
    endpoints: tuple[str, ...]
    ranks: Mapping[str, tuple[str, ...]]
    capacity: vllm.Capacity
    seconds: float


def watch(
    site: Site,
    spec: Desired,
    transport: Transport,
    *,
    timeout: float,
    attached: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[Event, None, Served]:
    """Follow a server until it has answered.

    Args:
        site: the cluster.
        spec: the server.
        transport: runs the queries.
        timeout: seconds until the wait is given up; the server goes on.
        attached: the server is older than the wait; the phases until now are left out.
        clock: seconds that only grow.
        sleep: waits so many seconds.

    Raises:
        ServerError: the server ended, or cannot go on, or does not answer as it should.
        StoppedError: an operator stopped it.
        UnwatchedError: its state was unknown for too long.
        DeadlineError: it took too long.
    """
    watching = _Watching(site, spec, transport, timeout, clock, sleep)
    return (yield from watching.follow(quiet=attached))


@dataclass
class _Watching:
    """A server, the last record of it, and its log so far."""

    site: Site
    spec: Desired
    transport: Transport
    timeout: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    server: Server = field(init=False)
    state: str = "starting"
    reason: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=4000))
    new: tuple[str, ...] = ()  # lines of the last query
    listening: bool = False  # the first API
    phase: str = vllm.PHASES[0].id
    offset: int = 0
    warned: set[str] = field(default_factory=set)
    fatal_since: float | None = None
    lost_since: float | None = None
    shown: str = ""

    def __post_init__(self) -> None:
        """Begin the first phase."""
        self.began = self.phase_began = self.clock()
        self.server = Server(name=self.spec.name, desired=self.spec)

    @property
    def record(self) -> Observed:
        """The agent's record; an empty one until it has one."""
        return self.server.observed or Observed(name=self.spec.name, id="", asked=0.0)

    @property
    def first(self) -> FirstAnswer | Refusal | None:
        """The first answer of the present engine, or its last refusal until then."""
        return self.record.first_answer if self.server.state in ("starting", "ready") else None

    @property
    def doing(self) -> str:
        """What is done or waited for before the engine starts."""
        if self.server.state in ("starting", "ready", *OVER):
            return ""
        return self.reason or self.state

    @property
    def recovering(self) -> bool:
        """True when an engine has ended, and another is to start."""
        return bool(self.record.faults) and self.server.state not in ("ready", *OVER)

    @property
    def late(self) -> str:
        """Why a server that runs has not answered."""
        if self.server.state == "ready" and self.state not in servers.GOOD:
            return f"{self.state}: {self.reason}"[: untrusted.LONGEST]
        error = self.first.error if isinstance(self.first, Refusal) else ""
        return untrusted.plain(error)[: untrusted.LONGEST]

    def follow(self, *, quiet: bool) -> Generator[Event, None, Served]:
        """Query until it has answered; raises what `watch` does."""
        while True:
            if self._query():
                yield from self._phases(quiet=quiet)
                quiet = False
                if self.doing or self.recovering:
                    self.fatal_since = None  # a new engine is about to start
                else:
                    yield from self._symptoms()
                settling = self.clock() - self.fatal_since if self.fatal_since is not None else 0.0
                over = self.server.state in OVER
                if over or settling >= _SETTLE:
                    raise _failure(self.server, self.lines, hung=not over)
                if self.state in servers.GOOD and isinstance(self.first, FirstAnswer):
                    yield self._wait()
                    served = self._served(self.first)
                    yield from self._answered(served.first)
                    return replace(served, ranks=self._ranks())
                self._raise_if_refused()
            if self.clock() - self.began >= self.timeout:
                raise self._too_late()
            yield self._wait()
            self.sleep(_EVERY)

    def _query(self) -> bool:
        """Query once: the head's agent about the server, the first node with an API about its log.
        False without an answer, which may last for a while: a connection may break.
        """
        site, spec, now = self.site, self.spec, self.clock()
        node = site.inventory.node(spec.api_node)
        patience = _PATIENCE if self.offset else 0.0  # the first query is answered at once
        log = agent_queries.watch(spec.api_host, spec.port, spec.name, self.offset, patience)
        commands = [*([] if node.head else [servers.ask(site)]), site.inside(node, log)]
        answers = by_node(self.transport, commands)
        try:
            self._read_server(answers[site.head.name][0])
        except UnreadableAnswer as error:
            self.lost_since = now if self.lost_since is None else self.lost_since
            if now - self.lost_since >= _LOST:
                raise UnwatchedError(
                    f"{self.server.what} cannot be watched any more: {error.message}",
                    evidence=error.evidence,
                    hint=(
                        "the server itself may well go on: see `vlaunch status`, and watch it again"
                        " with `vlaunch serve`"
                    ),
                ) from None
            return False
        self.lost_since = None
        self._read_log(answers[node.name][-1])
        return True

    def _read_server(self, answer: Answer) -> None:
        """Read the server's record; raises UnreadableAnswer where the head's agent has not looked
        for long, and StoppedError when an operator removed the server.
        """
        raw = read_payload(answer)
        kept = servers.read(raw)
        if "servers" not in raw or kept.agent > servers.OLD:
            raise UnreadableAnswer(
                f"{answer.node}: {raw.get('error') or servers.unheard(kept.agent)}"
            )
        named = {server.name: server for server in kept.servers}
        server = named.get(self.spec.name)
        over = ""
        if server is None or server.desired is None:
            over = "an operator removed it"
        elif server.desired.asked != self.spec.asked:
            over = f"{server.model} has taken its place"
        if server is None or over:
            text = "the server was stopped while it was being watched"
            raise StoppedError(text, evidence=over, hint="see who stopped it: `vlaunch audit`")
        self.server = servers.named(self.site.nodes, server)
        self.state, self.reason = servers.health(self.server, kept.agent)

    def _read_log(self, answer: Answer) -> None:
        """Read the new lines of the log; none while the node's container does not answer. Those
        before the first start are of an earlier engine.
        """
        try:
            log = read_payload(answer)
        except UnreadableAnswer:
            log = {}
        self.offset = int(log.get("offset", self.offset))
        self.listening = bool(log.get("listening"))
        if log.get("anew"):
            self.lines.clear()
            self.phase, self.phase_began = vllm.PHASES[0].id, self.clock()
            self.fatal_since = None
        begun = self.server.state != "waiting" and self.record.generation > 0
        lines = re.split(r"[\r\n]+", log.get("log", "")) if begun else []
        self.new = tuple(
            untrusted.plain(line)[: untrusted.LONGEST] for line in lines if line.strip()
        )
        self.lines.extend(self.new)

    def _phases(self, *, quiet: bool) -> Iterator[Event]:
        now = self.clock()
        for phase in vllm.phase_after(self.phase, self.new):
            if not quiet:
                yield self._step(vllm.title(self.phase))
            self.phase, self.phase_began = phase, now
            self.fatal_since = None  # What goes on was not fatal.

    def _step(self, text: str) -> Event:
        seconds = self.clock() - self.phase_began
        return Event(kind="step", stage=_STAGE, text=text, state="ok", seconds=seconds)

    def _answered(self, first: FirstAnswer) -> Iterator[Event]:
        """Yield what has come back, and what that does not prove."""
        yield self._step(f"{first.came or COMPLETION.what} has come back")
        if first.refused:
            text = f"{ONLY_HEALTH} ({first.refused})"
            yield Event(kind="warning", stage=_STAGE, text=text, state="warn")

    def _symptoms(self) -> Iterator[Event]:
        """Yield a known cause as soon as its line is in the log; the error with all that is known
        follows when the log is complete.
        """
        if _TERMINATED in "\n".join(self.lines):
            return  # A process that ends after SIGTERM is no symptom.
        known = symptoms.first("\n".join(self.new))
        fatal = known is not None and known.fatal
        if fatal or (self.fatal_since is not None and (self.new or self.listening)):
            # It lives: what looks fatal in a log may have been tried again, or done without.
            self.fatal_since = self.clock()
        if known is None or known.id in _VAGUE or known.cause in self.warned:
            return  # The error itself, when the log is complete, says more.
        self.warned.add(known.cause)
        state: State = "failed" if fatal and not self.listening else "warn"
        text = f"{known.cause}: {known.line}"
        yield Event(kind="warning", stage=_STAGE, text=text, state=state)

    def _raise_if_refused(self) -> None:
        """Give up when the server refuses the first requests of the agent."""
        first = self.first
        if not isinstance(first, Refusal):
            return
        error = untrusted.plain(first.error)
        if first.status in (401, 403):
            raise ServerError(
                "the server demands another API key than the cluster has",
                evidence=error,
                hint=(
                    "give the key as VLLM_API_KEY under `secrets:`, then run `vlaunch up` and"
                    " `vlaunch serve` again"
                ),
            )
        if first.status and first.times >= _REFUSALS:
            word = (named(first.task) or COMPLETION).word
            name = self.spec.name
            raise ServerError(
                f"the API is up, but gives no {word} ({first.times} times)",
                evidence=f"{first.status}: {error}",
                hint=(
                    f"read its log: `vlaunch logs --server {name}`; end it with"
                    f" `vlaunch stop {name}`"
                ),
            )

    def _served(self, first: FirstAnswer) -> Served:
        held = self.record.held.values()
        return Served(
            first=first,
            endpoints=tuple(at.url for at in endpoints.of(self.site.inventory, self.spec)),
            ranks={},
            capacity=endpoints.holds(held or ({},), "\n".join(self.lines)),
            seconds=self.clock() - self.began,
        )

    def _ranks(self) -> Mapping[str, tuple[str, ...]]:
        """Return the ranks by node as soon as the agent has listed them; else as expected."""
        with contextlib.suppress(ServerError):
            for _ in range(_QUERIES):
                if self.server.state == "ready" and self.record.ranks:
                    break
                self.sleep(_EVERY / 2)
                self._query()
        if self.record.ranks:
            return {node: tuple(ranks) for node, ranks in self.record.ranks.items()}
        return {
            node: (f"{count} {'rank' if count == 1 else 'ranks'}",)
            for node, count in self.spec.places.items()
        }

    def _wait(self) -> Event:
        progress = vllm.shards(list(self.lines)[-20:]) if self.phase == "load" else self.late
        text = self.doing or vllm.title(self.phase) + (f" ({progress})" if progress else "")
        if self.recovering:
            text = f"recovering: {text}"
        changed, self.shown = text != self.shown, text
        return Event(
            kind="wait",
            stage=_STAGE,
            text=text,
            state="running" if changed else "",
            seconds=self.clock() - self.began,
            deadline=self.timeout,
        )

    def _too_late(self) -> DeadlineError:
        return DeadlineError(
            f"no answer from the server within {self.timeout:.0f}s;"
            f" {self.late or f'it is still {self.doing or vllm.title(self.phase)}'}",
            evidence=list(self.lines)[-8:],
            hint=(
                "it goes on: watch it again with the same `vlaunch serve`, see `vlaunch logs -f`,"
                f" or end it with `vlaunch stop {self.spec.name}`"
            ),
        )


def _failure(server: Server, lines: Sequence[str], *, hung: bool) -> ServerError:
    """Return the error of a server that ended, or is `hung`: its log, of which `lines` are the
    last, says that it cannot go on.
    """
    record, fault = server.observed, None
    how = f"{server.what} still runs"
    if record is not None and not hung:
        fault = record.last_fault
        how = fault.what if fault else record.doing or "it failed"
        how = untrusted.plain(f"its keeper gave up: {how}" if record.state == "gave-up" else how)
    cause = untrusted.plain(fault.cause) if fault else ""
    kept = [untrusted.plain(line) for line in fault.evidence.splitlines()] if fault else []
    node = (fault.node or (server.desired.api_node if server.desired else "")) if fault else ""
    log = [*kept, *lines]
    known = symptoms.first("\n".join([cause, *log]))
    raised = vllm.raised("\n".join(log))
    exception = cause or (raised.text if raised else "")
    if raised and raised.text[:_LINE] != exception[:_LINE]:
        raised = None  # the agent knows better
    telling = None if known is None or (known.id in _VAGUE and exception) else known
    first = telling.cause if telling else exception or how
    first = first if len(first) <= _LINE else f"{first[:_LINE]}…"
    where = ", ".join(filter(None, (raised.address or node, raised.process))) if raised else node
    shown = f"{where}: {exception}" if first != exception else f"raised on {where}"
    texts = [shown if exception and where else exception]
    if telling and (not exception or exception[:_LINE] not in telling.line):
        texts.append(telling.line)
    texts.append(how)
    if telling is None and raised is None:
        texts += (kept or list(lines))[-8:]
    hints = [known.fix if known else "look at every node: `vlaunch doctor`"]
    if hung:
        hints.append(f"end it: `vlaunch stop {server.name}`")
    return ServerError(
        f"the server {'cannot go on' if hung else 'did not start'}: {first}",
        evidence=[text for text in dict.fromkeys(texts) if text and text != first],
        hint="\n".join(hints),
    )


def summary(served: Served) -> dict[str, Any]:
    """Return what was observed of a server, ready for JSON."""
    first = served.first
    return {
        "endpoint": served.endpoints[0],
        "endpoints": list(served.endpoints),
        "model": first.model,
        "ranks": {node: list(ranks) for node, ranks in served.ranks.items()},
        "kv_cache_tokens": served.capacity.tokens,
        "max_concurrency": served.capacity.concurrency,
        "system_fingerprint": first.fingerprint,
        "seconds": round(served.seconds, 1),
        "first_answer_seconds": first.seconds,
        **({"answer": first.came} if first.came else {}),
        **({"replica_seconds": list(first.replicas)} if first.replicas else {}),
    }
