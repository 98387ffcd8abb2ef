"""The state of a running engine: its ranks, and the signs of its death. Its APIs are in `apis.py`.

It decides nothing: `keeper.py` does. One is made for each start of an engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .apis import Apis
from .background import Background
from .cause import LONGEST
from .crew import Lead
from .desired import Desired
from .faults import Trouble
from .health import Clock
from .node import ServerReport
from .observed import Observed
from .process import RUNNING
from .rank_name import by_number, placed
from .ray_view import ENGINE, Rank, RayView
from .stall import Stall

_MEET = 10.0  # seconds between two questions to Ray for the ranks
_SOON = 1.0  # the same, while some are there already and the server starts
_LAST_WORDS = 5.0  # seconds for vLLM to end when its ranks have


class Monitor:
    """One engine, from its start to its end.

    `launched` has each node where its process ran, with its agent's boot then.
    """

    def __init__(
        self, name: str, spec: Desired, lead: Lead, view: RayView | None, clock: Clock
    ) -> None:
        self.name, self.spec, self.lead, self.view, self.clock = name, spec, lead, view, clock
        self.launched: dict[str, str] = {}
        self.apis = Apis(name, spec, lead, self.launched, clock)
        self.stall = Stall(name, spec, lead, clock)
        self.ranks: list[Rank] = []  # those that Ray runs for the server, by its last answer
        self._met: set[str] = set()  # the actors of those whose processes an agent has reported
        self._bereft: float | None = None  # since when some of these have ended
        self._query: Background[list[Rank]] | None = None

    def adopt(self) -> None:
        """Take up an engine that has run before: all of its processes have."""
        self.launched |= {
            process.node: self.lead.boot_of(process.node) for process in self.spec.processes
        }

    def update(self, status: Observed) -> bool:
        """Take the newest reports; True when each of its APIs has answered."""
        self._met |= {rank.actor for rank in self.ranks if self._has_process(rank)}
        answered = self.apis.update(status)
        self.stall.turn(self.apis.waits(), status.longest_step, self._holders)
        return answered

    def _report(self, node: str) -> ServerReport:
        return self.lead.report(node, self.name)

    @property
    def _holders(self) -> Sequence[Rank]:
        """Ray's ranks, without the engines beside them; of replicas that have no others, the
        engines are what a node holds.
        """
        return [rank for rank in self.ranks if rank.name != ENGINE] or self.ranks

    def _has_process(self, rank: Rank) -> bool:
        return rank.pid in self._report(rank.node).ranks

    def _lives(self, rank: Rank) -> bool | None:
        """Return whether a rank of Ray's lives; None where no agent can tell, or has met it."""
        lives = self._has_process(rank)
        return lives if self.lead.fresh(rank.node) and (lives or rank.actor in self._met) else None

    def meet(self, status: Observed) -> bool:
        """Find out which ranks it has, and where; true when the record has changed."""
        before = status.ranks
        if self.view is None:
            status.ranks = placed(self.spec)
            return before != status.ranks
        self._query_ranks(self.view, status)
        names_by_node: dict[str, set[str]] = {node: set() for node in self.spec.nodes}
        for rank in self._holders:
            names_by_node.setdefault(rank.node, set()).add(rank.name)
        # Ray has them in any order.
        if ranks := {
            node: sorted(names, key=by_number) for node, names in names_by_node.items() if names
        }:
            status.ranks = ranks
        return before != status.ranks

    def _query_ranks(self, view: RayView, status: Observed) -> None:
        """Query Ray for the ranks until it has all of them: engines are in it before their ranks,
        and one replica's ranks before the other's.
        """
        if self._query is not None and self._query.over:
            self.ranks = self._query.value or self.ranks
        workers = sum(rank.name != ENGINE for rank in self.ranks)
        if workers >= sum(self.spec.places.values()):
            return
        pause = _SOON if self.ranks and status.state == "starting" else _MEET
        if self._query is None or self.clock.monotonic() - self._query.began > pause:
            pid = self._report(self.spec.api_node).pid
            self._query = None if pid is None else Background(lambda: view.ranks(pid))

    def living(self, status: Observed) -> dict[str, dict[str, bool]]:
        """Return which ranks live, by node; an unknown one is not among them."""
        alive: dict[str, dict[str, bool]] = {}
        if self.view is None:
            for process in self.spec.processes:
                report, ranks = self._report(process.node), status.ranks.get(process.node, ())
                if self.lead.fresh(process.node) and report.last == status.generation:
                    runs = report.state == RUNNING
                    alive.setdefault(process.node, {}).update(dict.fromkeys(ranks, runs))
            return alive
        for rank in self._holders:
            if (lives := self._lives(rank)) is not None:
                alive.setdefault(rank.node, {})[rank.name] = lives
        return alive

    # --- signs of its death

    def signs(self, status: Observed) -> list[Trouble]:
        """Return what says that it is dead."""
        signs = self._lost_processes(status.generation)
        for node, names in status.ranks.items() if self.view is not None else ():
            self.launched.setdefault(node, self.lead.boot_of(node))
            signs += self._away(node, " ".join(names))
        signs += self._lost_ranks()
        several = len(self.spec.apis) > 1
        for node in self.apis.dead(status):
            suffix, sign_node = (f" of {node}", node) if several else ("", "")
            sign = Trouble(1, f"the engine{suffix} says that it is dead", sign_node)
            signs.append(_explained(sign, self._report(node)))
        return [self._blamed(sign) for sign in signs] if several else signs

    def _blamed(self, sign: Trouble) -> Trouble:
        """Let a sign be about the node that it says was lost: replicas that compute together die of
        one another, and Gloo says of whom (`Connection closed by peer [10.0.0.2]:61130`).
        """
        text = f"{sign.cause}\n{sign.evidence}"
        for number, process in enumerate(self.spec.processes):
            address = re.escape(self.spec.addresses.get(process.node) or "-")
            closed = re.search(rf"closed by peer \[{address}\]", text)
            if closed and process.node != sign.node and "killed" not in sign.what:
                what = f"{sign.what}: it has lost {process.node}"
                return replace(sign, what=what, node=process.node, rank=str(number))
        return sign

    def _lost_processes(self, generation: int) -> list[Trouble]:
        """Return which of its processes have ended, or cannot be queried."""
        signs: list[Trouble] = []
        alone = len(self.spec.processes) == 1
        for number, process in enumerate(self.spec.processes):
            report, node, rank = self._report(process.node), process.node, str(number)
            if report.last == generation and self.lead.here(node):
                self.launched.setdefault(node, self.lead.boot_of(node))
                if report.state != RUNNING:
                    signs.append(_ended(number, "" if alone else node, report))
            else:
                signs += self._away(node, "" if alone else rank)
        return signs

    def _away(self, node: str, rank: str) -> list[Trouble]:
        """Return that the container of a node has restarted, or that a node cannot be queried: it
        is gone when it had time to come back and the engine does no work without it.
        """
        if self.lead.here(node):
            if self.launched.get(node, "") in ("", self.lead.boot_of(node)):
                return []
            what = f"the container of {node} was restarted"
            return [Trouble(5, what, node, rank, certain=True)]
        why = self.lead.gone(node)
        if not why or self._works:
            return []
        what = f"{node} is gone"
        return [Trouble(5, what, node, rank, evidence=f"its agent: {why}", certain=True)]

    @property
    def _works(self) -> bool:
        """True when some work was done a moment ago."""
        return self.apis.idle() < 3 * self.spec.policy.canary

    def _lost_ranks(self) -> list[Trouble]:
        """Return that ranks of Ray's have ended, by the reports of their agents, and vLLM goes on.

        vLLM notices it, too, and ends within seconds, with words that tell more; but not always:
        its v1/executor/ray_executor_v2.py shuts all ranks down, and the engine may wait for ever
        for an answer of theirs. Where it has several replicas, it may have ended some on purpose:
        it is dead only when no work is done.
        """
        lost = [rank for rank in self.ranks if self._lives(rank) is False]
        if not lost or self.apis.rests():
            self._bereft = None
            return []
        now = self.clock.monotonic()
        self._bereft = self._bereft or now
        if (self.spec.replicas > 1 and self._works) or now - self._bereft < _LAST_WORDS:
            return []
        sign = Trouble(1, "vLLM goes on, though its ranks have ended")
        if len(lost) == 1:  # whose end was first, Ray may know
            (rank,) = lost
            what = f"vLLM goes on, though its rank {rank.name} has ended"
            sign = Trouble(1, what, rank.node, rank.name, certain=True)
        return [_explained(sign, self._report(self.spec.api_node))]


def _ended(number: int, node: str, report: ServerReport) -> Trouble:
    """A killed process is nearer to the cause than one that ended by itself; the first one's own
    ends with any other. `node` is empty where it is the only one.
    """
    outcome = report.ended or "was stopped"
    weight = 4 if "killed" in outcome else 3 if number else 2
    subject, rank = (f"vLLM's process on {node}", str(number)) if node else ("vLLM", "")
    return _explained(Trouble(weight, f"{subject} {outcome}", node, rank), report)


def _explained(sign: Trouble, report: ServerReport) -> Trouble:
    """Add what a node's engine printed."""
    return replace(sign, evidence=report.evidence, cause=report.cause[:LONGEST])
