"""State of a running engine: its ranks, and the signs of its death. Its APIs are in `apis.py`.

It decides nothing: `supervisor.py` does. Each start of an engine has its own monitor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..background import Background
from ..cause import MAX_CAUSE_CHARS
from ..desired import Desired
from ..health.verdicts import Clock
from ..link.leader import Leader
from ..observed import Observed
from ..processes.node import ServerReport
from ..processes.process import RUNNING
from ..processes.rank_name import place_ranks, rank_sort_key
from ..processes.ray_view import ENGINE, RayRank, RayView
from .apis import Apis
from .faults import DeathSign
from .stall import Stall

_FIND_TIMEOUT = 10.0  # seconds between two questions to Ray for the ranks
_SOON = 1.0  # the same, while some are there already and the server starts
_START_PATIENCE = 50.0  # more seconds for a node to reconnect before the first answer
_EXIT_GRACE = 5.0  # seconds for vLLM to end when its ranks have


class Monitor:
    """One engine, from its start to its end.

    `launched` has each node where its process ran, with the boot of its agent.
    """

    def __init__(
        self, name: str, spec: Desired, lead: Leader, view: RayView | None, clock: Clock
    ) -> None:
        self.name, self.spec, self.lead, self.view, self.clock = name, spec, lead, view, clock
        self.launched: dict[str, str] = {}
        self.apis = Apis(name, spec, lead, self.launched, clock)
        self.stall = Stall(name, spec, lead, clock)
        self.ranks: list[RayRank] = []  # those that Ray runs for the server, by its last answer
        self._reported_actors: set[str] = set()  # actors with a process in an agent's report
        self._ranks_lost_at: float | None = None  # since when some of these have ended
        self._query: Background[list[RayRank]] | None = None

    def adopt(self) -> None:
        """Adopt an engine that was started before: all of its processes run."""
        self.launched |= {
            process.node: self.lead.boot_of(process.node) for process in self.spec.processes
        }

    def update(self, status: Observed) -> bool:
        """Process the newest reports; True if each of its APIs has answered."""
        self._reported_actors |= {rank.actor for rank in self.ranks if self._has_process(rank)}
        answered = self.apis.update(status)
        self.stall.tick(self.apis.list_waits(), status.longest_step, self._rank_holders)
        return answered

    def _report(self, node: str) -> ServerReport:
        return self.lead.report(node, self.name)

    @property
    def _rank_holders(self) -> Sequence[RayRank]:
        """Ray's ranks without engines; replicas that consist of engines only count by these."""
        return [rank for rank in self.ranks if rank.name != ENGINE] or self.ranks

    def _has_process(self, rank: RayRank) -> bool:
        return rank.pid in self._report(rank.node).ranks

    def _is_alive(self, rank: RayRank) -> bool | None:
        """Return whether a rank of Ray's is alive; None if no agent can tell or has seen it."""
        lives = self._has_process(rank)
        return (
            lives
            if self.lead.is_reporting(rank.node) and (lives or rank.actor in self._reported_actors)
            else None
        )

    def find_ranks(self, status: Observed) -> bool:
        """Update the ranks by node; True if the record has changed."""
        before = status.ranks
        if self.view is None:
            status.ranks = place_ranks(self.spec)
            return before != status.ranks
        self._query_ranks(self.view, status)
        names_by_node: dict[str, set[str]] = {node: set() for node in self.spec.nodes}
        for rank in self._rank_holders:
            names_by_node.setdefault(rank.node, set()).add(rank.name)
        # Ray has them in any order.
        if ranks := {
            node: sorted(names, key=rank_sort_key) for node, names in names_by_node.items() if names
        }:
            status.ranks = ranks
        return before != status.ranks

    def _query_ranks(self, view: RayView, status: Observed) -> None:
        """Query Ray for the ranks until they are complete: engines appear before their ranks, and
        one replica's ranks before another's.
        """
        if self._query is not None and self._query.done:
            self.ranks = self._query.value or self.ranks
        workers = sum(rank.name != ENGINE for rank in self.ranks)
        if workers >= sum(self.spec.places.values()):
            return
        pause = _SOON if self.ranks and status.state == "starting" else _FIND_TIMEOUT
        if self._query is None or self.clock.monotonic() - self._query.began > pause:
            pid = self._report(self.spec.api_node).pid
            self._query = None if pid is None else Background(lambda: view.query_ranks(pid))

    def living_ranks(self, status: Observed) -> dict[str, dict[str, bool]]:
        """Return which ranks are alive, by node, without unknown ones."""
        alive: dict[str, dict[str, bool]] = {}
        if self.view is None:
            for process in self.spec.processes:
                report, ranks = self._report(process.node), status.ranks.get(process.node, ())
                if self.lead.is_reporting(process.node) and report.last == status.generation:
                    runs = report.state == RUNNING
                    alive.setdefault(process.node, {}).update(dict.fromkeys(ranks, runs))
            return alive
        for rank in self._rank_holders:
            if (lives := self._is_alive(rank)) is not None:
                alive.setdefault(rank.node, {})[rank.name] = lives
        return alive

    # --- signs of its death

    def death_signs(self, status: Observed) -> list[DeathSign]:
        """Return the signs of its death."""
        signs = self._lost_processes(status)
        for node, names in status.ranks.items() if self.view is not None else ():
            self.launched.setdefault(node, self.lead.boot_of(node))
            signs += self._missing_signs(status, node, " ".join(names))
        signs += self._lost_ranks()
        several = len(self.spec.apis) > 1
        for node in self.apis.dead_nodes(status):
            suffix, sign_node = (f" of {node}", node) if several else ("", "")
            sign = DeathSign(1, f"the engine{suffix} reports that it is dead", sign_node)
            signs.append(_add_evidence(sign, self._report(node)))
        return [self._attribute(sign) for sign in signs] if several else signs

    def _attribute(self, sign: DeathSign) -> DeathSign:
        """Attribute a sign to the lost node that its text names: replicas that compute together die
        of one another, and Gloo names the cause (`Connection closed by peer [10.0.0.2]:61130`).
        """
        text = f"{sign.cause}\n{sign.evidence}"
        for number, process in enumerate(self.spec.processes):
            address = re.escape(self.spec.addresses.get(process.node) or "-")
            closed = re.search(rf"closed by peer \[{address}\]", text)
            if closed and process.node != sign.node and "killed" not in sign.what:
                what = f"{sign.what}: it lost contact with {process.node}"
                return replace(sign, what=what, node=process.node, rank=str(number))
        return sign

    def _lost_processes(self, status: Observed) -> list[DeathSign]:
        """Return signs for processes that have exited or cannot be queried."""
        signs: list[DeathSign] = []
        alone = len(self.spec.processes) == 1
        for number, process in enumerate(self.spec.processes):
            report, node, rank = self._report(process.node), process.node, str(number)
            if report.last == status.generation and self.lead.is_connected(node):
                self.launched.setdefault(node, self.lead.boot_of(node))
                if report.state != RUNNING:
                    signs.append(_exit_sign(number, "" if alone else node, report))
            else:
                signs += self._missing_signs(status, node, "" if alone else rank)
        return signs

    def _missing_signs(self, status: Observed, node: str, rank: str) -> list[DeathSign]:
        """Return a sign for a restarted container or an unreachable node: the node is gone after it
        had time to come back, if the engine does no work without it. Before the first answer no
        work can be seen, so the node gets more time.
        """
        if self.lead.is_connected(node):
            if self.launched.get(node, "") in ("", self.lead.boot_of(node)):
                return []
            what = f"the container of {node} was restarted"
            return [DeathSign(5, what, node, rank, certain=True)]
        patience = _START_PATIENCE if status.first_answer is None else 0.0
        why = self.lead.gone_reason(node, patience)
        if not why or self._is_working:
            return []
        what = f"{node} is gone"
        return [DeathSign(5, what, node, rank, evidence=f"its agent: {why}", certain=True)]

    @property
    def _is_working(self) -> bool:
        """True if some work was done a moment ago."""
        return self.apis.idle() < 3 * self.spec.policy.canary

    def _lost_ranks(self) -> list[DeathSign]:
        """Return a sign if ranks of Ray's have exited, by their agents' reports, and vLLM goes on.

        vLLM usually notices it and exits within seconds with a better message. Not always: its
        v1/executor/ray_executor_v2.py shuts all ranks down, and the engine may wait forever for
        their answers. With several replicas it may have stopped some on purpose: it is dead only if
        no work is done.
        """
        lost = [rank for rank in self.ranks if self._is_alive(rank) is False]
        if not lost or self.apis.rest_reason():
            self._ranks_lost_at = None
            return []
        now = self.clock.monotonic()
        self._ranks_lost_at = self._ranks_lost_at or now
        if (self.spec.replicas > 1 and self._is_working) or now - self._ranks_lost_at < _EXIT_GRACE:
            return []
        sign = DeathSign(1, "vLLM is running, but its ranks have exited")
        if len(lost) == 1:  # with several, Ray may know the first
            (rank,) = lost
            what = f"vLLM is running, but its rank {rank.name} has exited"
            sign = DeathSign(1, what, rank.node, rank.name, certain=True)
        return [_add_evidence(sign, self._report(self.spec.api_node))]


def _exit_sign(number: int, node: str, report: ServerReport) -> DeathSign:
    """Return the sign of an exited process. A killed process is nearer to the cause; the first
    process exits with any other. `node` is empty if it is the only one.
    """
    outcome = report.ended or "was stopped"
    weight = 4 if "killed" in outcome else 3 if number else 2
    subject, rank = (f"vLLM's process on {node}", str(number)) if node else ("vLLM", "")
    return _add_evidence(DeathSign(weight, f"{subject} {outcome}", node, rank), report)


def _add_evidence(sign: DeathSign, report: ServerReport) -> DeathSign:
    """Add the output of a node's engine."""
    return replace(sign, evidence=report.evidence, cause=report.cause[:MAX_CAUSE_CHARS])
