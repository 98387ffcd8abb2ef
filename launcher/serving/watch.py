"""Wait for a server: follow its log through the start phases until the head's agent has an answer
of the model, or a reason why there will be none.

The server keeps running when the watch ends.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.agent.desired import Desired
from launcher.agent.health.task import COMPLETION, ONLY_HEALTH, task_named
from launcher.agent.observed import OVER, FirstAnswer, Observed, Refusal
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
from launcher.core.transport import Transport, run_by_node
from launcher.failures.explain import explain
from launcher.serving import endpoints
from launcher.serving.start_error import start_error
from launcher.tools import agent_queries, vllm
from launcher.tools.follow import INTERVAL, Contact, log_lines
from launcher.tools.site import Site, servers
from launcher.tools.site.ray_judges import parse_payload
from launcher.tools.site.servers import Server

_LISTEN_WAIT = 5.0  # seconds that a log query waits for the API to listen
# seconds without a line, after a fatal one, until a server counts as hung
_SETTLE = 8.0
_QUERIES = 8  # for the ranks of a server that has just answered
_REFUSALS = 3
_STAGE = "serve"
_TERMINATED = "*** SIGTERM received"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyServer:
    """A server whose endpoints and replicas have all answered.

    `seconds` is the duration of the watch, `first` the model's first answer.
    """

    first: FirstAnswer
    endpoints: tuple[str, ...]
    ranks: Mapping[str, tuple[str, ...]]
    capacity: vllm.Capacity
    seconds: float


def watch_start(
    site: Site,
    spec: Desired,
    transport: Transport,
    *,
    timeout: float,
    attached: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[Event, None, ReadyServer]:
    """Follow a server until it has answered.

    Args:
        site: the cluster.
        spec: the server.
        transport: runs the queries.
        timeout: seconds until the wait is given up; the server keeps running.
        attached: the server is older than the watch; the phases until now are left out.
        clock: monotonic seconds.
        sleep: waits for some seconds.

    Raises:
        ServerError: the server exited, cannot go on, or refuses requests.
        StoppedError: an operator stopped it.
        UnwatchedError: its state was unknown for too long.
        DeadlineError: it took too long.
    """
    watching = _StartWatcher(site, spec, transport, timeout, clock, sleep)
    return (yield from watching.follow_log(quiet=attached))


@dataclass
class _StartWatcher:
    """State of a watch: the server, its last record, and its log so far."""

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
    new_lines: tuple[str, ...] = ()  # lines of the last query
    listening: bool = False  # the first API
    phase: str = vllm.PHASES[0].id
    offset: int = 0
    warned: set[str] = field(default_factory=set)
    fatal_since: float | None = None

    def __post_init__(self) -> None:
        """Begin the first phase."""
        self.began = self.phase_began = self.clock()
        self.contact = Contact(clock=self.clock)
        self.server = Server(name=self.spec.name, desired=self.spec)

    @property
    def record(self) -> Observed:
        """The agent's record, or an empty one."""
        return self.server.observed or Observed(name=self.spec.name, id="", asked=0.0)

    @property
    def first_answer(self) -> FirstAnswer | Refusal | None:
        """First answer of the present engine, or its last refusal until then."""
        return self.record.first_answer if self.server.state in ("starting", "ready") else None

    @property
    def activity(self) -> str:
        """Activity before the engine starts; empty afterwards."""
        if self.server.state in ("starting", "ready", *OVER):
            return ""
        return self.reason or servers.shown_state(self.state)

    @property
    def recovering(self) -> bool:
        """True if an engine has exited and another is about to start."""
        return bool(self.record.faults) and self.server.state not in ("ready", *OVER)

    @property
    def delay_reason(self) -> str:
        """Reason why a running server has not answered."""
        if self.server.state == "ready" and self.state not in servers.GOOD:
            return f"{servers.shown_state(self.state)}: {self.reason}"[: untrusted.MAX_LINE_LENGTH]
        error = self.first_answer.error if isinstance(self.first_answer, Refusal) else ""
        return untrusted.sanitize(error)[: untrusted.MAX_LINE_LENGTH]

    def follow_log(self, *, quiet: bool) -> Generator[Event, None, ReadyServer]:
        """Query until the server has answered; raises the errors of `watch_start`."""
        while True:
            if self._query():
                yield from self._phase_events(quiet=quiet)
                quiet = False
                if self.activity or self.recovering:
                    self.fatal_since = None  # a new engine is about to start
                else:
                    yield from self._failure_events()
                settling = self.clock() - self.fatal_since if self.fatal_since is not None else 0.0
                over = self.server.state in OVER
                if over or settling >= _SETTLE:
                    raise start_error(self.server, self.lines, hung=not over)
                if self.state in servers.GOOD and isinstance(self.first_answer, FirstAnswer):
                    yield self._wait_event()
                    served = self._ready_server(self.first_answer)
                    yield from self._answer_events(served.first)
                    return replace(served, ranks=self._wait_for_ranks())
                self._raise_if_refused()
            if self.clock() - self.began >= self.timeout:
                raise self._deadline_error()
            yield self._wait_event()
            self.sleep(INTERVAL)

    def _query(self) -> bool:
        """Query the agent and the log; return False without an answer: a connection may break."""
        site, spec = self.site, self.spec
        node = site.inventory.node(spec.api_node)
        patience = _LISTEN_WAIT if self.offset else 0.0  # the first query is answered at once
        log = agent_queries.log_tail(
            spec.api_host(node.name), spec.port, spec.name, self.offset, patience
        )
        queries = [] if node.head else [servers.query_servers(site)]
        answers = run_by_node(self.transport, [*queries, site.in_container(node, log)])
        try:
            self._read_server(answers[site.head.name][0])
        except UnreadableAnswer as error:
            if self.contact.lose():
                raise UnwatchedError(
                    f"lost contact with {self.server.label}: {error.message}",
                    evidence=error.evidence,
                    hint=(
                        "run `vlaunch status`: the server may still be running; watch it again"
                        " with `vlaunch serve`"
                    ),
                ) from None
            return False
        self.contact.restore()
        self._read_log(answers[node.name][-1])
        return True

    def _read_server(self, answer: Answer) -> None:
        """Read the server's record. Raises UnreadableAnswer if the head's agent has not updated it
        for too long, and StoppedError if an operator removed the server.
        """
        raw = parse_payload(answer)
        head_state = servers.parse_servers(raw)
        if "servers" not in raw or head_state.agent > servers.OLD:
            raise UnreadableAnswer(
                f"{answer.node}: {raw.get('error') or servers.describe_silence(head_state.agent)}"
            )
        named = {server.name: server for server in head_state.servers}
        server = named.get(self.spec.name)
        stop_reason = ""
        if server is None or server.desired is None:
            stop_reason = "an operator removed it"
        elif server.desired.asked != self.spec.asked:
            stop_reason = f"{server.model} has replaced it"
        if server is None or stop_reason:
            text = "the server was stopped while it was being watched"
            hint = "see who stopped it: `vlaunch audit`"
            raise StoppedError(text, evidence=stop_reason, hint=hint)
        self.server = servers.with_node_names(self.site.nodes, server)
        self.state, self.reason = servers.server_health(self.server, head_state.agent)

    def _read_log(self, answer: Answer) -> None:
        """Read the new lines of the log; none while the node's container does not answer. Lines
        before the first start belong to an earlier engine.
        """
        try:
            log = parse_payload(answer)
        except UnreadableAnswer:
            log = {}
        self.offset = int(log.get("offset", self.offset))
        self.listening = bool(log.get("listening"))
        if log.get("anew"):
            self.lines.clear()
            self.phase, self.phase_began = vllm.PHASES[0].id, self.clock()
            self.fatal_since = None
        has_started = self.server.state != "waiting" and self.record.generation > 0
        self.new_lines = log_lines(log.get("log", "")) if has_started else ()
        self.lines.extend(self.new_lines)

    def _phase_events(self, *, quiet: bool) -> Iterator[Event]:
        now = self.clock()
        for phase in vllm.later_phases(self.phase, self.new_lines):
            if not quiet:
                yield self._step_event(vllm.phase_title(self.phase))
            self.phase, self.phase_began = phase, now
            self.fatal_since = None  # a server that continues has no fatal error

    def _step_event(self, text: str) -> Event:
        seconds = self.clock() - self.phase_began
        return Event(kind="step", stage=_STAGE, text=text, state="ok", seconds=seconds)

    def _answer_events(self, first: FirstAnswer) -> Iterator[Event]:
        """Yield the first answer, and a warning about what it does not verify."""
        yield self._step_event(f"{first.came or COMPLETION.noun_phrase} received")
        if first.refused:
            text = f"{ONLY_HEALTH} ({first.refused})"
            yield Event(kind="warning", stage=_STAGE, text=text, state="warn")

    def _failure_events(self) -> Iterator[Event]:
        """Yield a known cause as soon as it is logged; the full error comes at the end."""
        if _TERMINATED in "\n".join(self.lines):
            return  # an exit after SIGTERM is no failure
        failure = explain("\n".join(self.new_lines))
        fatal = failure is not None and failure.fatal
        if fatal or (self.fatal_since is not None and (self.new_lines or self.listening)):
            # It runs: a fatal-looking line may have been retried or ignored.
            self.fatal_since = self.clock()
        if failure is None or failure.vague or failure.cause in self.warned:
            return  # The error at the end, with the complete log, is more precise.
        self.warned.add(failure.cause)
        state: State = "failed" if fatal and not self.listening else "warn"
        text = f"{failure.cause}: {failure.line}"
        yield Event(kind="warning", stage=_STAGE, text=text, state=state)

    def _raise_if_refused(self) -> None:
        """Give up if the server refuses the agent's first requests."""
        refusal = self.first_answer
        if not isinstance(refusal, Refusal):
            return
        error = untrusted.sanitize(refusal.error)
        if refusal.status in (401, 403):
            raise ServerError(
                "the server requires a different API key than the cluster's",
                evidence=error,
                hint=(
                    "set VLLM_API_KEY under `secrets:`, then run `vlaunch up` and `vlaunch serve`"
                    " again"
                ),
            )
        if refusal.status and refusal.times >= _REFUSALS:
            answer_kind = (task_named(refusal.task) or COMPLETION).answer_noun
            name = self.spec.name
            raise ServerError(
                f"the API is up but returned no {answer_kind} ({refusal.times} times)",
                evidence=f"{refusal.status}: {error}",
                hint=(
                    f"read its log: `vlaunch logs --server {name}`; stop it: `vlaunch stop {name}`"
                ),
            )

    def _ready_server(self, first: FirstAnswer) -> ReadyServer:
        labels = self.record.held.values()
        return ReadyServer(
            first=first,
            endpoints=endpoints.client_urls(self.site.inventory, self.spec),
            ranks={},
            capacity=endpoints.total_capacity(labels or ({},), "\n".join(self.lines)),
            seconds=self.clock() - self.began,
        )

    def _wait_for_ranks(self) -> Mapping[str, tuple[str, ...]]:
        """Return the ranks by node as soon as the agent lists them, else the planned ones."""
        with contextlib.suppress(ServerError):
            for _ in range(_QUERIES):
                if self.server.state == "ready" and self.record.ranks:
                    break
                self.sleep(INTERVAL / 2)
                self._query()
        if self.record.ranks:
            return {node: tuple(ranks) for node, ranks in self.record.ranks.items()}
        return {
            node: (f"{count} {'rank' if count == 1 else 'ranks'}",)
            for node, count in self.spec.places.items()
        }

    def _wait_event(self) -> Event:
        shards = vllm.shard_progress(list(self.lines)[-20:]) if self.phase == "load" else ""
        progress = shards if self.phase == "load" else self.delay_reason
        progress = f" ({progress})" if progress else ""
        text = self.activity or vllm.phase_title(self.phase) + progress
        if self.recovering:
            text = f"restarting: {text}"
        return Event(
            kind="wait",
            stage=_STAGE,
            text=text,
            seconds=self.clock() - self.began,
            deadline=self.timeout,
        )

    def _deadline_error(self) -> DeadlineError:
        state = f"currently: {self.activity or vllm.phase_title(self.phase)}"
        return DeadlineError(
            f"no answer from the server within {self.timeout:.0f}s; {self.delay_reason or state}",
            evidence=list(self.lines)[-8:],
            hint=(
                "watch it again with the same `vlaunch serve`; it keeps starting. Follow its log:"
                f" `vlaunch logs -f`; stop it: `vlaunch stop {self.spec.name}`"
            ),
        )


def summary_json(served: ReadyServer) -> dict[str, Any]:
    """Return a ready server's data for JSON."""
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
