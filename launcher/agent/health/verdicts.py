"""Arithmetic of a server's health: time without an ended step, pauses, lost requests. Pure.

A late answer alone means nothing: the server may be busy. One long step looks like a hang until it
ends; only the server's own longest step so far tells them apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol

from ..observed import OVER, EndpointHealth

_QUIET, _SUSPECT = (30.0, 3), (60.0, 5)  # seconds at least, and times the longest step so far
_LATEST = 240.0  # seconds until an inspection at the latest: vLLM ends its engine at 300
# of several endpoints, the verdict on the server, the worst first
_WORST = ("unknown", "resting", "busy", "answering")


class Clock(Protocol):
    """The module `time`, or a substitute."""

    def time(self) -> float:
        """Return seconds since 1970."""

    def monotonic(self) -> float:
        """Return seconds that only grow."""


class Wait(NamedTuple):
    """Seconds without an ended step behind the API of a node while a canary waits or fails, of one
    replica (None: of all).
    """

    node: str
    replica: int | None
    seconds: float


class Steps:
    """End times of the last steps behind one API: of all replicas (""), and of one, by its number.

    All times are seconds of a monotonic clock. Time counts only while a canary waits or fails;
    `longest` is the longest such time that ended in progress.
    """

    def __init__(self, now: float) -> None:
        self.longest = 0.0
        self._progress = self._counted_since = now
        self._ended: dict[str, float] = {}
        self._since: dict[str, float] = {}  # when a canary was sent that waits, or began to fail
        self._values: dict[Hashable, object] = {}

    def note_value(self, source: str, value: object, now: float, part: str) -> None:
        """Record a value that changes exactly when a step ends, such as a digest of counters."""
        if self._values.get((source, part), value) != value:
            self.longest = max(self.longest, self.stalled_seconds(now).get(part, 0.0))
            self._ended[part] = self._progress = now
        self._values[source, part] = value

    def note_canaries(self, since: dict[str, float]) -> None:
        """Record which parts have a canary that waits or fails, and since when."""
        self._since = since

    def forget(self, now: float) -> None:
        """Restart the count: the time until now is unknown."""
        self._counted_since, self._since = now, {}

    def idle(self, now: float) -> float:
        """Return the seconds without any work, ours or others'."""
        return now - self._progress

    def stalled_seconds(self, now: float) -> dict[str, float]:
        """Return the seconds without an ended step, for each part with a canary."""
        return {
            part: now - max(since, self._ended.get(part, self._counted_since), self._counted_since)
            for part, since in self._since.items()
        }


def quiet_after(longest: float) -> float:
    """Return the seconds without an ended step after which a server is quiet."""
    return min(max(_QUIET[0], _QUIET[1] * longest), _LATEST)


def is_quiet(stalled: float, longest: float) -> bool:
    """True after long enough without an ended step to warn and to inspect the ranks."""
    return stalled > quiet_after(longest)


def is_suspect(stalled: float, longest: float) -> bool:
    """True after so long without an ended step that the engine hangs, if its ranks do not move."""
    return stalled > max(_SUSPECT[0], _SUSPECT[1] * longest)


def server_verdict(state: str, faults: int) -> str:
    """Return the verdict on a server that is not ready, after `faults` faults."""
    if state in OVER:
        return state
    if faults:
        return "recovering"
    return state if state in ("starting", "stopping") else "waiting"


def combine_verdicts(endpoints: Mapping[str, EndpointHealth]) -> tuple[str, str]:
    """Return the verdict on a server with these endpoints and its reason, with the nodes if it does
    not hold for all.
    """
    verdicts = {endpoint.verdict for endpoint in endpoints.values()}
    worst = min(verdicts, key=_WORST.index, default="unknown")
    reasons: dict[str, list[str]] = {}
    for node, endpoint in endpoints.items():
        if endpoint.verdict == worst and endpoint.reason:
            reasons.setdefault(endpoint.reason, []).append(node)
    return worst, "; ".join(
        text if len(nodes) == len(endpoints) else f"{', '.join(nodes)}: {text}"
        for text, nodes in reasons.items()
    )


def next_pause(policy_pause: float, longest: float, streak: int) -> float:
    """Return the seconds before the next start, after `streak` starts that did not last."""
    return min(longest, policy_pause * 2.0 ** min(max(streak - 1, 0), 30))


def lost_requests(
    before: tuple[int, float] | None, after: tuple[int, float] | None, fresh: bool
) -> int | None:
    """Return how many requests an engine's death costs; None if unknown.

    Both arguments are open requests and 5xx answers so far: when it was last well, and at the last
    count. Requests that are open when an engine dies are answered with 5xx, or not at all: the
    larger figure counts. A figure that is not `fresh` tells nothing.
    """
    if before is None or after is None or not fresh:
        return None
    return int(max(before[0], after[1] - before[1], 0))
