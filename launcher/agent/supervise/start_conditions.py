"""Conditions for the start of a server: connected agents, no earlier engine on any node, and free
GPUs, both in Ray and in fact.

It only queries, and starts nothing: `supervisor.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..background import Background
from ..desired import Desired
from ..health.verdicts import Clock
from ..link.leader import Leader
from ..observed import Observed
from ..processes.node import ServerReport
from ..processes.process import IDLE
from ..processes.ray_view import RayView
from .reservation import Reservation

_AGAIN = 1.0  # seconds between two queries of Ray
_MOST = 1 << 31  # engines; no node has started as many


class StartConditions:
    """Conditions for the starts of one name's server."""

    def __init__(self, name: str, lead: Leader, clock: Clock) -> None:
        self.name, self.lead, self.clock = name, lead, clock
        self._query: Background[str] | None = None  # of Ray's missing resources
        self._again = 0.0

    def wait_reason(
        self, spec: Desired, status: Observed, view: RayView | None, reserved: Reservation | None
    ) -> str:
        """Return the reason why the next start waits; empty if nothing is missing."""
        missing = [node for node in spec.nodes if not self.lead.is_connected(node)]
        if missing:
            return f"waiting for the agent of {', '.join(missing)}"
        reports = {node: self.lead.report(node, self.name) for node in spec.possible_nodes}
        busy = [node for node, report in reports.items() if report.state != IDLE]
        if busy:
            return f"waiting for the engine of {', '.join(busy)} to stop"
        reason = self._missing_in_ray(view, status) if view is not None else ""
        reason = reason or self._node_wait_reason(spec, reports, status.generation + 1)
        if not reason and reserved is not None and not reserved.ready:
            # which GPUs they are must be known only where it is some of a node's
            return reserved.doing if spec.ray is not None and spec.ray.partial else ""
        return reason

    def _node_wait_reason(
        self, spec: Desired, reports: Mapping[str, ServerReport], generation: int
    ) -> str:
        """Return the reason why a start waits for its nodes; Ray may use the free GPUs of any."""
        waiting = [
            node
            for node in spec.nodes
            if reports[node].prepared != generation or not self.lead.orders_done(node)
        ]
        rooms = {node: report.room for node, report in reports.items()}
        free = {node: room[1] for node, room in rooms.items() if room and room[0] == generation}
        enough = sum(free.values()) >= sum(spec.places.values())
        if not waiting or (spec.backend == "ray" and enough and {*waiting} <= {*free}):
            return ""
        waits = [f"{node}: {report.waits}" for node, report in reports.items() if report.waits]
        return "; ".join(waits) or "checking the nodes"

    def latest_generation(self, spec: Desired) -> int:
        """Return the highest generation started on a node, for a head that lost its record."""
        lasts = [self.lead.report(node, self.name).last for node in spec.nodes]
        return max((last for last in lasts if last < _MOST), default=0)

    def forget(self) -> None:
        """Forget Ray's last answer: the next start queries it again."""
        self._query = None

    def _missing_in_ray(self, view: RayView, status: Observed) -> str:
        """Return the resources that Ray is missing for a start.

        After a death Ray must report nothing missing twice in a row: it may not have noticed the
        death yet.
        """
        if self._query is None:
            if self.clock.monotonic() < self._again:
                return status.doing
            looks = 2 if status.fault_count else 1
            self._query = Background(lambda: view.missing_reason(looks))
        if not self._query.done:
            is_reason = status.doing and "agent" not in status.doing
            return status.doing if is_reason else "checking for free GPUs in Ray"
        failed = "waiting for Ray's dashboard to answer" if self._query.error else ""
        if reason := failed or self._query.value or "":
            self._query, self._again = None, self.clock.monotonic() + _AGAIN
        return reason
