"""What a start of a server needs: its nodes' agents, nothing of an earlier engine on any node, and
GPUs that are free, in Ray and in fact.

It looks and asks, and starts nothing: `keeper.py` does. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .background import Background
from .crew import Lead
from .desired import Desired
from .health import Clock
from .observed import Observed
from .process import IDLE
from .ray_view import RayView
from .reservation import Reservation

_AGAIN = 1.0  # seconds between two questions to Ray
_MOST = 1 << 31  # engines that nobody has started


class Needs:
    """What the starts of one name's server need."""

    def __init__(self, name: str, lead: Lead, clock: Clock) -> None:
        self.name, self.lead, self.clock = name, lead, clock
        self._asked: Background[str] | None = None  # of Ray, what it lacks
        self._again = 0.0

    def lacking(
        self,
        want: Desired,
        seen: Observed,
        view: RayView | None,
        reserved: Reservation | None,
    ) -> str:
        """Say what the next start waits for; empty when all is there."""
        missing = [node for node in want.nodes if not self.lead.here(node)]
        if missing:
            return f"waiting for the agent of {', '.join(missing)}"
        reports = {node: self.lead.report(node, self.name) or {} for node in want.reach}
        return (
            _busy(reports)
            or (self._in_ray(view, seen) if view is not None else "")
            or self._unprepared(want, reports, seen.generation + 1)
            or _unreserved(want, reserved)
        )

    def _unprepared(
        self, want: Desired, reports: Mapping[str, Mapping[str, Any]], generation: int
    ) -> str:
        """Describe what a start waits for on its nodes; Ray may use the free GPUs of any."""
        waiting = [
            node
            for node in want.nodes
            if reports[node].get("prepared") != generation or not self.lead.settled(node)
        ]
        free = {node: _free(said, generation) for node, said in reports.items()}
        enough = sum(count or 0 for count in free.values()) >= sum(want.places.values())
        known = all(free[node] is not None for node in waiting)
        if not waiting or (want.backend == "ray" and enough and known):
            return ""
        told = [
            f"{node}: {said['waits']}"
            for node, said in reports.items()
            if isinstance(said.get("waits"), str)
        ]
        return "; ".join(told) or "looking at the nodes"

    def latest(self, want: Desired) -> int:
        """Return the highest generation that a node has started: a head that has lost its record
        counts on from there.
        """
        reports = [self.lead.report(node, self.name) or {} for node in want.nodes]
        lasts = [said.get("last") for said in reports]
        return max((each for each in lasts if isinstance(each, int) and each < _MOST), default=0)

    def forget(self) -> None:
        """Forget what Ray said: the next start, or that of another server, asks anew."""
        self._asked = None

    def _in_ray(self, view: RayView, seen: Observed) -> str:
        """Return what Ray lacks for a start.

        Twice in a row nothing, after a death: what died may not have been noticed yet.
        """
        if self._asked is None:
            if self.clock.monotonic() < self._again:
                return seen.doing
            looks = 2 if seen.fault_count else 1
            self._asked = Background(lambda: view.lacking(looks))
        if not self._asked.over:
            told = seen.doing and "agent" not in seen.doing
            return seen.doing if told else "asking Ray for free GPUs"
        lacking = self._asked.value or ""
        if self._asked.error:
            lacking = "waiting for Ray's dashboard to answer"
        if lacking:
            self._asked, self._again = None, self.clock.monotonic() + _AGAIN
        return lacking


def _busy(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Say where something of an earlier engine runs."""
    busy = [node for node, said in reports.items() if said.get("state", IDLE) != IDLE]
    return f"waiting until the engine of {', '.join(busy)} has ended" if busy else ""


def _free(said: Mapping[str, Any], generation: int) -> int | None:
    """Return how many GPUs of a node have enough free memory for a start; None where unknown."""
    match said.get("room"):
        case [at, int(free)] if at == generation:
            return free
    return None


def _unreserved(want: Desired, reserved: Reservation | None) -> str:
    """Say what keeps Ray from setting GPUs aside; which ones they are must be known only where it
    is some of a node's.
    """
    if reserved is None or reserved.ready or want.ray is None or not want.ray.partial:
        return ""
    return reserved.doing
