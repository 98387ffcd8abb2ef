"""What is heard from the APIs of a running engine: answers, counters, and what they say of
themselves; and how long no step has ended.

It decides nothing: `keeper.py` does.

One API is the whole engine's. Of several (hybrid and external load balancing) each is its own
process's: the server answers when each of them does, and what they count is added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import health
from .crew import Lead
from .desired import Desired, Process
from .health import Clock, Steps, Wait
from .observed import EndpointHealth, Load, Observed
from .probe import Probe
from .task import HEALTH, ONLY_HEALTH, named

# what an odd report of an agent raises
NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_GAP = 10.0  # seconds between two turns after which this agent cannot say what happened meanwhile
_BUSY = 5.0  # seconds after which a canary that has not come back says that the server is busy


class Counts(NamedTuple):
    """What vLLM counts behind one API, and when that was asked (seconds of a monotonic clock);
    `ours` are requests of our own among them.
    """

    taken: float
    running: int
    waiting: int
    ours: int
    tokens: float
    failed: float


class Api:
    """One API, on the node of its process."""

    def __init__(
        self, name: str, want: Desired, process: Process, lead: Lead, clock: Clock
    ) -> None:
        self.name, self.want, self.process, self.lead = name, want, process, lead
        self.node, self.clock = process.node, clock
        self.last_answer = self.asking = 0.0
        self._heard = clock.monotonic()
        self.steps = Steps(self._heard)
        self.first: dict[str, Any] = {}  # what it answered first, or how it refuses
        self.failing = ""  # how canaries fail
        self.counts: Counts | None = None
        self.held: dict[str, str] = {}  # what its KV caches hold together
        self._eye: Probe | None = None  # on an API whose node's agent cannot be asked

    def probe(self, *, ready: bool) -> Mapping[str, Any]:
        """Return what is known of it: from the agent beside it, or, when the server is `ready`,
        from here while that one cannot be asked.
        """
        if ready and not self.lead.fresh(self.node):
            # on loopback each node has its own: ours says nothing of another's
            alone = len(self.want.apis) == 1 or self.want.everywhere
            return self._look_from_here() if alone else {}
        self.over()
        said = (self.lead.report(self.node, self.name) or {}).get("probe")
        return said if isinstance(said, Mapping) else {}

    def replica(self, part: str) -> int | None:
        """Return the replica that a part's canaries ask; None for any of several, or the only
        one.
        """
        behind = self.want.behind(self.process)
        if part == "" and len(behind) == 1:
            return behind.start
        return int(part) if part.isdigit() else None

    def over(self) -> None:
        """Look no more from here."""
        if self._eye is not None:
            self._eye.stop()
            self._eye = None

    def _look_from_here(self) -> Mapping[str, Any]:
        want = self.want
        if self._eye is None:
            host = want.addresses.get(self.node, "") if want.everywhere else want.host
            self._eye = Probe(host, want.port, want.behind(self.process), want.policy.canary)
        return self._eye.report()

    def hear(self, probe: Mapping[str, Any], seen: Observed, now: float) -> tuple[bool, bool]:
        """Note what it says; return whether it has answered so far, and whether it counts."""
        came, counts = False, isinstance(probe.get("counters"), Mapping)
        if now - self._heard > _GAP:
            self.steps.forget(now)
        self._heard = now
        try:
            if (way := named(str(probe.get("task")))) is not None:
                seen.task = way.name
            for key, (count, age) in probe.get("answers", {}).items():
                # `/health` answers, whatever the other nodes of the engine do
                if way is not HEALTH:
                    self.steps.changed("answers", (count, self._eye is None), now, key)
                if key == "":
                    came, self.last_answer = True, now - float(age)
                    at = round(self.clock.time() - float(age), 2)
                    if seen.answered is None or at - seen.answered > 0.5:
                        seen.answered, seen.seconds = at, float(probe.get("seconds", 0.0))
            self.asking = max(map(float, probe.get("asking", {}).values()), default=0.0)
            if counts:
                self._count(probe["counters"], now)
            if isinstance(first := probe.get("first"), dict):
                self.first = first
            self._note_waiting(probe, seen, now)
        except NONSENSE:
            self.steps.forget(now)
            return False, False
        return came, counts

    def _note_waiting(self, probe: Mapping[str, Any], seen: Observed, now: float) -> None:
        """Note which canaries wait or fail; time counts only of a server that has answered, and
        that does not rest.
        """
        asking = {key: float(age) for key, age in probe.get("asking", {}).items()}
        failing = {key: each for key, each in probe.get("failing", {}).items() if len(each) == 3}
        texts = {self._failure(each[1], each[2], seen.task) for each in failing.values()}
        self.failing = "; ".join(sorted(texts))
        if not probe or probe.get("rests") or seen.state != "ready":
            self.steps.forget(now)
            return
        ages = {key: float(each[0]) for key, each in failing.items()}
        both = {*asking, *ages}
        self.steps.asks({key: now - max(asking.get(key, 0), ages.get(key, 0)) for key in both})

    @staticmethod
    def _failure(status: int, text: str, task: str) -> str:
        ours = "completion" if (way := named(task)) is None else way.word
        how = f"our own {ours} was answered with {status}" if status else f"no {ours} for us"
        return f"{how}: {text}"

    def health(self, probe: Mapping[str, Any], seen: Observed) -> EndpointHealth:
        """Return the verdict on this endpoint of a server that is ready, apart from whether steps
        end.
        """
        if rests := probe.get("rests"):
            return EndpointHealth(verdict="resting", reason=str(rests))
        if not probe.get("answers"):
            return EndpointHealth(
                verdict="unknown", reason=f"the agent of {self.node} cannot ask the API"
            )
        if self.failing:
            return EndpointHealth(verdict="busy", reason=self.failing)
        if self.asking > _BUSY:
            word = "completion" if (way := named(seen.task)) is None else way.word
            reason = f"our own {word} has waited for {self.asking:.0f} s"
            return EndpointHealth(verdict="busy", reason=reason)
        seconds = probe.get("seconds")
        took = round(seconds, 3) if isinstance(seconds, float) else None
        return EndpointHealth(verdict="answering", seconds=took)

    def _count(self, counted: Mapping[str, Any], now: float) -> None:
        for key, digest in counted["progress"].items():
            self.steps.changed("counters", digest, now, key)
        self.counts = Counts(
            taken=now - float(counted["age"]),
            running=int(counted["running"]),
            waiting=int(counted["waiting"]),
            ours=1 if self.asking else 0,
            tokens=float(counted["tokens"]),
            failed=float(counted["failed"]),
        )
        if isinstance(held := counted.get("held"), Mapping):
            self.held = {str(name): str(label) for name, label in held.items()}


class Apis:
    """All APIs of one engine, from its start to its end; `launched` has the nodes where its
    processes ran.
    """

    def __init__(
        self, name: str, want: Desired, lead: Lead, launched: Mapping[str, str], clock: Clock
    ) -> None:
        self.want, self.launched, self.clock = want, launched, clock
        self._each = [Api(name, want, process, lead, clock) for process in want.apis]
        self._fresh = 0.0
        # requests that are open, and that failed so far: when it was last well, and as it was
        # counted last
        self._well: tuple[int, float] | None = None
        self._counted: tuple[int, float] | None = None
        self._tokens: tuple[float, float] | None = None

    @property
    def held(self) -> dict[str, str]:
        """What the KV caches of the replicas behind the first API hold; empty where vLLM has not
        said it.
        """
        return self._each[0].held

    def hear(self, seen: Observed) -> bool:
        """Note what they say and count; True when each has answered so far."""
        now = self.clock.monotonic()
        asked = [(each, self._probe(each, seen)) for each in self._each]
        heard = [each.hear(probe, seen, now) for each, probe in asked]
        seen.asking = max(each.asking for each in self._each)
        seen.longest_step = max(seen.longest_step, *(each.steps.longest for each in self._each))
        seen.first_answer = self._first()
        seen.held = {each.node: each.held for each in self._each if each.held}
        if seen.state == "ready":
            seen.endpoints = {each.node: each.health(probe, seen) for each, probe in asked}
        if any(counts for _, counts in heard):
            self._count(seen)
        return all(came for came, _ in heard)

    def _first(self) -> dict[str, Any]:
        """Return what came first; of several APIs the first one's words, and all replicas'
        seconds.
        """
        refused = [each.first for each in self._each if "model" not in each.first]
        if refused or len(self._each) == 1:
            return max(refused or [self._each[0].first], key=lambda each: each.get("times", 0))
        firsts = [each.first for each in self._each]
        seconds = [number for each in firsts for number in each["replicas"] or [each["seconds"]]]
        return {**firsts[0], "seconds": max(seconds), "replicas": seconds}

    def waits(self) -> list[Wait]:
        """Return for how long no step has ended where a canary waits or fails."""
        now = self.clock.monotonic()
        return [
            Wait(each.node, each.replica(part), seconds)
            for each in self._each
            for part, seconds in each.steps.still(now).items()
        ]

    def idle(self) -> float:
        """Return for how many seconds no work has been done."""
        now = self.clock.monotonic()
        return min(each.steps.idle(now) for each in self._each)

    def _probe(self, api: Api, seen: Observed) -> Mapping[str, Any]:
        return api.probe(ready=seen.state == "ready" and bool(self.launched))

    def _count(self, seen: Observed) -> None:
        """Add up what they count, as soon as each does."""
        counts = [each.counts for each in self._each if each.counts is not None]
        if len(counts) < len(self._each):
            return
        self._fresh = min(each.taken for each in counts)
        others = sum(max(0, each.running + each.waiting - each.ours) for each in counts)
        self._counted = figures = (others, sum(each.failed for each in counts))
        if self._answer() or self._queues(*figures):
            self._well = figures
        taken = max(each.taken for each in counts)
        if (rate := self._rate(sum(each.tokens for each in counts), taken)) is not None:
            seen.load = Load(
                running=sum(each.running for each in counts),
                waiting=sum(each.waiting for each in counts),
                tokens_per_s=round(rate, 1),
            )

    def _answer(self) -> bool:
        """True when no canary waits, and each had answered when it was counted."""
        soon = self._fresh - self.want.policy.canary
        return all(each.last_answer >= soon and not each.asking for each in self._each)

    def _queues(self, unanswered: int, failed: float) -> bool:
        """True when the queue has grown since it was well, and nothing has failed."""
        return self._well is not None and unanswered > self._well[0] and failed == self._well[1]

    def _rate(self, tokens: float, taken: float) -> float | None:
        """Return tokens per second since the last look, 0 at the first; None where that was less
        than a second ago.
        """
        if self._tokens is None:
            self._tokens = (taken, tokens)
            return 0.0
        before, had = self._tokens
        if taken - before >= 1:
            self._tokens = (taken, tokens)
            return max(0.0, tokens - had) / (taken - before)
        return None

    def rests(self, seen: Observed) -> str:
        """Say that it stands still on purpose; empty when it does not."""
        said = (self._probe(each, seen).get("rests") for each in self._each)
        return next((each for each in said if isinstance(each, str) and each), "")

    def warning(self, seen: Observed) -> str:
        """Say that nothing but `/health` proves that it works."""
        if named(seen.task) is not HEALTH:
            return ""
        return f"{ONLY_HEALTH} ({seen.first_answer.get('refused', '')})"

    def dead(self, seen: Observed) -> list[str]:
        """Return the nodes whose API says itself that its engine is dead, of a server that was
        ready.
        """
        if seen.state != "ready":
            return []
        probes = {each.node: self._probe(each, seen) for each in self._each}
        return [
            node
            for node, probe in probes.items()
            if (probe.get("health") == 503 and not probe.get("rests"))
            or "EngineDead" in str(probe.get("failing") or "")
        ]

    def lost(self) -> int | None:
        """Return how many requests its death costs; None where nobody knows."""
        fresh = self.clock.monotonic() - self._fresh <= self.want.policy.canary + 2
        return health.lost(self._well, self._counted, fresh)

    def over(self) -> None:
        """Look no more."""
        for each in self._each:
            each.over()
