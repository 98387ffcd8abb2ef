"""The arithmetic of a server's health: for how long no step has ended, pauses, lost requests. Pure.

A late answer alone means nothing, for the server may be busy. One long step looks like a hang until
it ends; only the time that the server's own steps have taken so far tells them apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol

from .observed import OVER, EndpointHealth

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
    """For how many seconds no step has ended behind the API of a node while a canary waits or
    fails, of one replica (None: of all).
    """

    node: str
    replica: int | None
    seconds: float


class Steps:
    """The times at which the last steps behind one API ended: of all replicas (""), and of one, by
    its number.

    All times are seconds of a monotonic clock. Time counts only while a canary waits or fails;
    `longest` is the longest such time that ended in progress.
    """

    def __init__(self, now: float) -> None:
        self.longest = 0.0
        self._progress = self._known = now
        self._ended: dict[str, float] = {}
        self._since: dict[str, float] = {}  # when a canary was sent that waits, or began to fail
        self._values: dict[Hashable, object] = {}

    def changed(self, source: str, value: object, now: float, part: str) -> None:
        """Note a value that differs exactly when a step has ended: a count of answers, a digest of
        counters.
        """
        if self._values.get((source, part), value) != value:
            self.longest = max(self.longest, self.still(now).get(part, 0.0))
            self._ended[part] = self._progress = now
        self._values[source, part] = value

    def asks(self, since: dict[str, float]) -> None:
        """Note which parts have a canary that waits or fails, and since when."""
        self._since = since

    def forget(self, now: float) -> None:
        """Begin to count again: nothing is known of the time until now."""
        self._known, self._since = now, {}

    def idle(self, now: float) -> float:
        """Return for how many seconds no work has been done, of ours or of others."""
        return now - self._progress

    def still(self, now: float) -> dict[str, float]:
        """Return for how long no step has ended, of the parts that have a canary."""
        return {
            part: now - max(since, self._ended.get(part, self._known), self._known)
            for part, since in self._since.items()
        }


def quiet_after(longest: float) -> float:
    """Return the seconds without an ended step after which a server is quiet."""
    return min(max(_QUIET[0], _QUIET[1] * longest), _LATEST)


def quiet(stalled: float, longest: float) -> bool:
    """True when no step has ended for long enough to warn, and to inspect the ranks."""
    return stalled > quiet_after(longest)


def suspect(stalled: float, longest: float) -> bool:
    """True when no step has ended for so long that the engine hangs, if its ranks do not move."""
    return stalled > max(_SUSPECT[0], _SUSPECT[1] * longest)


def verdict(state: str, faults: int) -> str:
    """Return the verdict on a server that is not ready, after so many faults."""
    if state in OVER:
        return state
    if faults:
        return "recovering"
    return state if state in ("starting", "stopping") else "waiting"


def together(endpoints: Mapping[str, EndpointHealth]) -> tuple[str, str]:
    """Return the verdict on a server with such endpoints, and the reason, with its nodes where it
    does not hold for all.
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


def pause(policy_pause: float, longest: float, streak: int) -> float:
    """Return how many seconds to wait before the next start, when it is the `streak`-th in a row
    that did not last.
    """
    return min(longest, policy_pause * 2.0 ** min(max(streak - 1, 0), 30))


def lost(
    before: tuple[int, float] | None, after: tuple[int, float] | None, fresh: bool
) -> int | None:
    """Return how many requests an engine's death cost; None where that is unknown.

    Both are open requests and answers of 5xx so far: when it was last well, and at the last count.
    Requests that are open when an engine dies are answered with 5xx, or not at all: the larger
    figure counts. A figure that is not `fresh` tells nothing.
    """
    if before is None or after is None or not fresh:
        return None
    return int(max(before[0], after[1] - before[1], 0))
