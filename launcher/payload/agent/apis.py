"""What is heard from the APIs of a running engine: answers, counters, and what they say of
themselves.

It decides nothing: `keeper.py` does. Standard library only.

One API is the whole engine's. Of several (hybrid and external load balancing) each is its own
process's: the server answers when each of them does, and what they count is added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import health
from .crew import Lead
from .desired import Desired, Process
from .health import Clock, Movement
from .observed import Load, Observed
from .probe import Probe
from .task import HEALTH, ONLY_HEALTH, named

# what an odd report of an agent raises
NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


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

    def hear(
        self, probe: Mapping[str, Any], seen: Observed, moved: Movement, now: float
    ) -> tuple[bool, bool]:
        """Note what has moved; return whether it has answered so far, and whether it counts."""
        came = False
        try:
            if (way := named(str(probe.get("task")))) is not None:
                seen.task = way.name
            for key, (count, age) in probe.get("answers", {}).items():
                answered = (count, self._eye is None)
                # `/health` answers, whatever the other nodes of the engine do
                work = way is not HEALTH
                source = (self.node, "answers", key)
                moved.changed(source, answered, now, part(key), progress=work)
                if key == "":
                    came, self.last_answer = True, now - float(age)
                    at = round(self.clock.time() - float(age), 2)
                    if seen.answered is None or at - seen.answered > 0.5:
                        seen.answered, seen.seconds = at, float(probe.get("seconds", 0.0))
            self.asking = max(
                (float(each) for each in probe.get("asking", {}).values()), default=0.0
            )
            if not isinstance(counted := probe.get("counters"), Mapping):
                return came, False
            self._count(counted, moved, now)
        except NONSENSE:
            return False, False
        return came, True

    def _count(self, counted: Mapping[str, Any], moved: Movement, now: float) -> None:
        for key, digest in counted["progress"].items():
            moved.changed((self.node, "counters", key), digest, now, part(key), progress=True)
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

    def warning(self, probe: Mapping[str, Any], task: str) -> str:
        """Say what is odd about what we ask ourselves; empty when nothing is."""
        odd, way = probe.get("odd"), named(task)
        if not isinstance(odd, list) or len(odd) != 2:
            return f"{ONLY_HEALTH} ({probe.get('refused')})" if way is HEALTH else ""
        ours = "completion" if way is None else way.word
        how = f"our own {ours} was answered with {odd[0]}" if odd[0] else f"no {ours} for us"
        return f"{how}: {odd[1]}"


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

    def hear(self, seen: Observed, moved: Movement) -> bool:
        """Note what has moved, and what they count; True when each has answered so far."""
        now = self.clock.monotonic()
        heard = [each.hear(self._probe(each, seen), seen, moved, now) for each in self._each]
        seen.asking = max(each.asking for each in self._each)
        if any(counts for _, counts in heard):
            self._count(seen)
        return all(came for came, _ in heard)

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
        """Say what is odd about what we ask ourselves, of several with the node."""
        said = {each.node: each.warning(self._probe(each, seen), seen.task) for each in self._each}
        if len(said) == 1:
            return "".join(said.values())
        return "; ".join(f"{node}: {text}" for node, text in said.items() if text)

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
            or "EngineDead" in str(probe.get("odd") or "")
        ]

    def lost(self) -> int | None:
        """Return how many requests its death costs; None where nobody knows."""
        fresh = self.clock.monotonic() - self._fresh <= self.want.policy.canary + 2
        return health.lost(self._well, self._counted, fresh)

    def over(self) -> None:
        """Look no more."""
        for each in self._each:
            each.over()


def part(key: str) -> int | None:
    """Return the replica that a report names; None for the whole engine, whose name is empty."""
    return int(key) if key else None
