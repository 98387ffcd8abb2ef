"""Whether an engine lives: what each part of it did last, and how long nothing at all has moved.

Pure; standard library only.

A late answer alone means nothing, for the server may be busy; nor do counters that stand still, for
one long step stops them. What could not be asked is unknown: it neither moves nor stands still.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol


class Clock(Protocol):
    """The module `time`, or what stands in for it."""

    def time(self) -> float:
        """Return seconds since 1970."""

    def monotonic(self) -> float:
        """Return seconds that only grow."""


class Movement:
    """When each part of an engine last moved (seconds of a monotonic clock); a part is None (all)
    or a replica's number.
    """

    def __init__(self, now: float, parts: tuple[int | None, ...] = (None,)) -> None:
        self._moved = dict.fromkeys(parts, now)
        self._progress = now
        self._values: dict[Hashable, object] = {}
        self._known: set[int | None] = set()  # parts whose processes are looked at

    def changed(
        self,
        source: Hashable,
        value: object,
        now: float,
        *parts: int | None,
        progress: bool = False,
    ) -> None:
        """Note a value that is another one exactly when something has moved: a count of answers, a
        digest of counters.

        `progress` says that nothing but work that was done changes it: ranks that wait for a dead
        one may well be busy waiting.
        """
        if self._values.get(source, value) != value:
            self.moved(now, *parts)
            self._progress = now if progress else self._progress
        self._values[source] = value

    def worked(self, source: Hashable, count: object, now: float, *parts: int | None) -> None:
        """Note at how many looks processes had worked: only of what is looked at can be said that
        it stands still.
        """
        # what it did before is unknown
        self.moved(now, *(part for part in parts if part not in self._known))
        self._known.update(parts)
        self.changed(source, count, now, *parts)

    def moved(self, now: float, *parts: int | None) -> None:
        """Note that something has moved."""
        for part in parts:
            if part in self._moved:
                self._moved[part] = now

    def idle(self, now: float) -> float:
        """Return for how many seconds no work has been done."""
        return now - self._progress

    def still(self, now: float) -> tuple[float, int | None]:
        """Return for how long the stillest part has not moved, and which; only what is looked at
        can stand still.
        """
        found = [(now - at, part) for part, at in self._moved.items() if part in self._known]
        return max(found, key=lambda each: (each[0], each[1] is None), default=(0.0, None))


def pause(policy_pause: float, longest: float, streak: int) -> float:
    """Return how many seconds to wait before the next start, when it is the `streak`-th in a row
    that did not last.
    """
    return min(longest, policy_pause * 2.0 ** min(max(streak - 1, 0), 30))


def lost(
    before: tuple[int, float] | None, after: tuple[int, float] | None, fresh: bool
) -> int | None:
    """Return how many requests an engine's death cost; None where nobody knows.

    Both are open requests and answers of 5xx so far: when it was last well, and when it was last
    asked. What is open when an engine dies is answered with 5xx, or not at all: the larger figure
    counts. A figure that is not `fresh` says nothing.
    """
    if before is None or after is None or not fresh:
        return None
    return int(max(before[0], after[1] - before[1], 0))
