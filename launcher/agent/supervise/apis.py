"""APIs of a running engine: their answers and counters, and the time since the last step ended.

It decides nothing: `supervisor.py` does. A single API belongs to the whole engine. With several
(hybrid and external load balancing) each belongs to its own process: the server is ready when all
of them answer, and their counters are added up.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import replace

from ..desired import Desired, ProcessSpec
from ..health import verdicts
from ..health.api import Counters
from ..health.probe import ApiProbe, ProbeReport
from ..health.task import HEALTH, ONLY_HEALTH, task_named
from ..health.verdicts import Clock, Steps, Wait
from ..link.leader import Leader
from ..observed import EndpointHealth, FirstAnswer, Load, Observed, Refusal

_GAP = 10.0  # seconds between two rounds after which the time between them is unknown
_BUSY = 5.0  # seconds after which a canary that has not come back says that the server is busy


class Api:
    """One API, on the node of its process; `probe` is its newest report.

    `counters` were read at `counted` (seconds of a monotonic clock) and include `own` canaries.
    """

    def __init__(
        self, name: str, spec: Desired, process: ProcessSpec, lead: Leader, clock: Clock
    ) -> None:
        self.name, self.spec, self.process, self.lead = name, spec, process, lead
        self.node, self.clock = process.node, clock
        self.probe = ProbeReport()
        self.last_answer = self.asking = 0.0
        self._updated = clock.monotonic()
        self.steps = Steps(self._updated)
        self.first: FirstAnswer | Refusal | None = None
        self.failing = ""  # how canaries fail
        self.counters: Counters | None = None
        self.counted, self.own = 0.0, 0
        self._fallback_probe: ApiProbe | None = (
            None  # while the agent beside the API is unreachable
        )

    def _latest_report(self, *, launched: bool) -> ProbeReport:
        """Return the report of the agent beside it; of a ready server, query it from here while
        that agent is unreachable.
        """
        spec = self.spec
        if not launched or self.lead.is_reporting(self.node):
            self.stop()
            return self.lead.report(self.node, self.name).probe
        if spec.only_host and ipaddress.ip_address(spec.only_host).is_loopback:
            return ProbeReport()  # another API may listen on this node's loopback
        if self._fallback_probe is None:
            self._fallback_probe = ApiProbe(
                spec.only_host or spec.addresses.get(self.node, ""),
                spec.port,
                spec.replicas_behind(self.process),
                spec.policy.canary,
            )
        return self._fallback_probe.report()

    def stop(self) -> None:
        """Stop querying from here."""
        if self._fallback_probe is not None:
            self._fallback_probe.stop()
            self._fallback_probe = None

    def update(self, status: Observed, now: float, *, launched: bool) -> None:
        """Process its newest report."""
        probe = self.probe = self._latest_report(launched=launched and status.state == "ready")
        if now - self._updated > _GAP:
            self.steps.forget(now)
        self._updated = now
        if (task := task_named(probe.task)) is not None:
            status.task = task.name
        for key, (count, _) in probe.answers.items():
            # `/health` answers, whatever the other nodes of the engine do
            if task is not HEALTH:
                self.steps.note_value("answers", (count, self._fallback_probe is None), now, key)
        if "" in probe.answers:
            _, age = probe.answers[""]
            self.last_answer = now - age
            at = round(self.clock.time() - age, 2)
            if status.answered is None or at - status.answered > 0.5:
                status.answered, status.seconds = at, probe.seconds
        self.asking = max(probe.asking.values(), default=0.0)
        self.first = probe.first or self.first
        if probe.counters is not None:
            self.counters, self.counted = probe.counters, now - probe.counted
            self.own = 1 if self.asking else 0
            for key, digest in probe.progress.items():
                self.steps.note_value("counters", digest, now, key)
        self._note_waiting(status, now)

    def _note_waiting(self, status: Observed, now: float) -> None:
        """Record canaries that wait or fail; time counts only for an active server."""
        probe, waits = self.probe, dict(self.probe.asking)
        noun = _answer_noun(status)
        texts = set()
        for key, (age, code, text) in probe.failing.items():
            waits[key] = max(age, waits.get(key, 0.0))
            problem = f"canary failed: HTTP {code}" if code else f"canary got no {noun}"
            texts.add(f"{problem}: {text}")
        self.failing = "; ".join(sorted(texts))
        if probe.rests or not probe.answers or status.state != "ready":
            self.steps.forget(now)
        else:
            self.steps.note_canaries({key: now - wait for key, wait in waits.items()})

    def list_waits(self, now: float) -> list[Wait]:
        """Return the time without an ended step, for each canary that waits or fails; no replica is
        named if any of several may answer.
        """
        behind = self.spec.replicas_behind(self.process)
        replicas = {str(replica): replica for replica in behind}
        only = behind.start if len(behind) == 1 else None
        return [
            Wait(self.node, replicas.get(part, only), seconds)
            for part, seconds in self.steps.stalled_seconds(now).items()
        ]

    def health(self, status: Observed) -> EndpointHealth:
        """Return the verdict on this endpoint of a ready server, apart from stalls."""
        probe = self.probe
        if probe.rests:
            return EndpointHealth(verdict="resting", reason=probe.rests)
        if not probe.answers:
            return EndpointHealth(
                verdict="unknown", reason=f"the agent on {self.node} cannot reach the API"
            )
        if self.failing:
            return EndpointHealth(verdict="busy", reason=self.failing)
        if self.asking > _BUSY:
            reason = f"canary: no {_answer_noun(status)} after {self.asking:.0f} s"
            return EndpointHealth(verdict="busy", reason=reason)
        return EndpointHealth(verdict="answering", seconds=probe.seconds)

    @property
    def dead(self) -> bool:
        """True if the API itself reports a dead engine."""
        probe = self.probe
        died = any("EngineDead" in text for _, _, text in probe.failing.values())
        return died or (probe.health == 503 and not probe.rests)


class Apis:
    """All APIs of one engine, from start to end; `launched` has the nodes of its processes."""

    def __init__(
        self, name: str, spec: Desired, lead: Leader, launched: Mapping[str, str], clock: Clock
    ) -> None:
        self.spec, self.launched, self.clock = spec, launched, clock
        self._apis = [Api(name, spec, process, lead, clock) for process in spec.apis]
        # requests that are open, and that failed so far: when it was last well, and as it was
        # counted last
        self._well: tuple[int, float] | None = None
        self._counted: tuple[int, float] | None = None
        self._tokens: tuple[float, float] | None = None  # when they were counted, and how many
        self._oldest = 0.0  # when the oldest of their counters were read

    def update(self, status: Observed) -> bool:
        """Process their newest reports; True if all have answered so far."""
        now = self.clock.monotonic()
        for api in self._apis:
            api.update(status, now, launched=bool(self.launched))
        status.asking = max(api.asking for api in self._apis)
        status.longest_step = max(status.longest_step, *(api.steps.longest for api in self._apis))
        status.first_answer = self._first_answer()
        status.held = {
            api.node: dict(api.counters.held)
            for api in self._apis
            if api.counters is not None and api.counters.held
        }
        if status.state == "ready":
            status.endpoints = {api.node: api.health(status) for api in self._apis}
        if any(api.probe.counters is not None for api in self._apis):
            self._add_counters(status)
        return all("" in api.probe.answers for api in self._apis)

    def _first_answer(self) -> FirstAnswer | Refusal | None:
        """Return the first answer; with several APIs the first text, and all replicas' seconds."""
        firsts = [api.first for api in self._apis if isinstance(api.first, FirstAnswer)]
        if len(firsts) < len(self._apis):
            refusals = [api.first for api in self._apis if isinstance(api.first, Refusal)]
            return max(refusals, key=lambda refusal: refusal.times, default=None)
        if len(firsts) == 1:
            return firsts[0]
        seconds = tuple(s for first in firsts for s in first.replicas or (first.seconds,))
        return replace(firsts[0], seconds=max(seconds), replicas=seconds)

    def list_waits(self) -> list[Wait]:
        """Return the time without an ended step, for each canary that waits or fails."""
        now = self.clock.monotonic()
        return [wait for api in self._apis for wait in api.list_waits(now)]

    def idle(self) -> float:
        """Return the seconds without any work."""
        now = self.clock.monotonic()
        return min(api.steps.idle(now) for api in self._apis)

    def _add_counters(self, status: Observed) -> None:
        """Add up their counters, once all have some."""
        counters = [api.counters for api in self._apis if api.counters is not None]
        if len(counters) < len(self._apis):
            return
        running, waiting = sum(c.running for c in counters), sum(c.waiting for c in counters)
        others = sum(
            max(0, c.running + c.waiting - api.own)
            for api, c in zip(self._apis, counters, strict=True)
        )
        failed = sum(c.failed for c in counters)
        self._oldest = min(api.counted for api in self._apis)
        recent = self._oldest - self.spec.policy.canary
        is_answering = all(api.last_answer >= recent and not api.asking for api in self._apis)
        # the queue has grown since it was well, and nothing has failed
        is_queueing = self._well is not None and others > self._well[0] and failed == self._well[1]
        self._counted = others, failed
        if is_answering or is_queueing:
            self._well = self._counted
        tokens, newest = sum(c.tokens for c in counters), max(api.counted for api in self._apis)
        previous_time, previous = self._tokens or (newest - 1, tokens)
        if newest - previous_time >= 1:
            self._tokens = newest, tokens
            rate = round(max(0.0, tokens - previous) / (newest - previous_time), 1)
            status.load = Load(running=running, waiting=waiting, tokens_per_s=rate)

    def rest_reason(self) -> str:
        """Return why the engine rests on purpose; empty if it does not."""
        return next((api.probe.rests for api in self._apis if api.probe.rests), "")

    def warning(self, status: Observed) -> str:
        """Return a warning if nothing but `/health` proves that it works."""
        first = status.first_answer
        if task_named(status.task) is not HEALTH or not isinstance(first, FirstAnswer):
            return ""
        return f"{ONLY_HEALTH} ({first.refused})"

    def dead_nodes(self, status: Observed) -> list[str]:
        """Return the nodes of a ready server whose API reports a dead engine."""
        return [api.node for api in self._apis if api.dead and status.state == "ready"]

    def lost_requests(self) -> int | None:
        """Return how many requests its death costs; None if unknown."""
        fresh = self.clock.monotonic() - self._oldest <= self.spec.policy.canary + 2
        return verdicts.lost_requests(self._well, self._counted, fresh)

    def stop(self) -> None:
        """Stop all queries."""
        for api in self._apis:
            api.stop()


def _answer_noun(status: Observed) -> str:
    """Return the noun for an answer of a server."""
    task = task_named(status.task)
    return "completion" if task is None else task.answer_noun
