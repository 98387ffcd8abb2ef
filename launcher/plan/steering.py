"""Who fetches from whom while a copy runs: a pure rule over what the nodes say, tested with what
they said.

A chain: each node fetches from the one before it. One that is dead is left out. One that is slow is
moved to the end, where it delays nobody; one that passes on wrong bytes as well. Nodes step over a
dead one by themselves, without waiting for this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

LOOKS = 5  # times in a row that a node must look slow
_SLOW = 0.60  # of the rate at which the node before it gets its bytes
_STALLED = 0.02  # of it; less is not slow: something is broken, and it is not this node's rate
_FILLS = 3.0  # backlog to the node before it, in what one node holds back
CALM = 6.0  # seconds after a change in which nobody is judged
_WRONG = 2  # times that wrong bytes came from a node


@dataclass(slots=True)
class _Seen:
    """What is known of a node: `rate` in bytes a second, over the last look."""

    have: int = 0
    at: float = 0.0
    rate: float = 0.0
    slow: int = 0
    wrong: int = 0
    complete: bool = False
    moved: bool = False


@dataclass(slots=True)
class Steering:
    """The order of a copy; its first node is the source.

    `fill` is what a node holds back before the next one gets it, in bytes. `moved` says of each
    node that was moved to the end why it was.
    """

    order: list[str]
    fill: int
    moved: dict[str, str] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _calm_until: float = 0.0

    def __post_init__(self) -> None:
        self._seen = {name: _Seen() for name in self.order}

    def before(self, name: str) -> tuple[str, ...]:
        """Return from whom a node fetches, the nearest first."""
        return tuple(reversed(self.order[: self.order.index(name)]))

    def orders(self) -> Mapping[str, tuple[str, ...]]:
        """Return this for all nodes but the source."""
        return {name: self.before(name) for name in self.order[1:]}

    def progress(self, name: str, have: int, now: float) -> None:
        """A node says how many bytes it has, at a time in seconds."""
        seen = self._seen[name]
        if seen.at and now > seen.at:
            seen.rate = max(0, have - seen.have) / (now - seen.at)
        seen.have, seen.at = have, now

    def complete(self, name: str) -> None:
        """A node has everything."""
        self._seen[name].complete = True

    def dead(self, name: str, now: float) -> None:
        """A node takes part no more."""
        if name in self.order:
            self.order.remove(name)
            self.changed(now)

    def wrong(self, name: str, now: float) -> bool:
        """Wrong bytes came from a node; True when it was moved for that."""
        if name not in self._seen or name not in self.order[1:]:
            return False
        self._seen[name].wrong += 1
        if self._seen[name].wrong < _WRONG:
            return False
        return self._to_the_end(name, "it passed on wrong bytes", now)

    def judge(self, now: float) -> bool:
        """Look who is slow; to be called about once a second. True when the order has changed."""
        if now < self._calm_until:
            return False
        for before, name in pairwise(self.order[1:]):
            faster, seen = self._seen[before], self._seen[name]
            slow = (
                not seen.complete
                and _STALLED * faster.rate < seen.rate < _SLOW * faster.rate
                and faster.have - seen.have > _FILLS * self.fill
            )
            seen.slow = seen.slow + 1 if slow else 0
            if seen.slow >= LOOKS:
                share = f"{seen.rate / faster.rate:.0%}" if faster.rate else "little"
                return self._to_the_end(name, f"it took {share} of what came to {before}", now)
        return False

    def _to_the_end(self, name: str, why: str, now: float) -> bool:
        seen = self._seen[name]
        if seen.moved or self.order[-1] == name:
            return False
        seen.moved = True
        self.moved[name] = why
        self.order.remove(name)
        self.order.append(name)
        self.changed(now)
        return True

    def changed(self, now: float) -> None:
        """Judge nobody for a while: what has changed makes innocent nodes look slow."""
        self._calm_until = now + CALM
        for each in self._seen.values():
            each.slow = 0
