"""What is known of a running engine: which ranks it has, and the signs of its death. What its APIs
say is `apis.py`.

It decides nothing: `keeper.py` does. One is made for each start of an engine. Standard library
only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .apis import Apis
from .background import Background
from .cause import LONGEST
from .crew import Lead
from .desired import Desired
from .faults import Trouble
from .health import Clock
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
        self, name: str, want: Desired, lead: Lead, view: RayView | None, clock: Clock
    ) -> None:
        self.name, self.want, self.lead, self.view, self.clock = name, want, lead, view, clock
        self.launched: dict[str, str] = {}
        self.apis = Apis(name, want, lead, self.launched, clock)
        self.stall = Stall(name, want, lead, clock)
        self.ranks: list[Rank] = []  # those that Ray runs for the server, as it said last
        self._met: set[str] = set()  # the actors of those whose processes have been seen
        self._bereft: float | None = None  # since when some of these have ended
        self._asked: Background[list[Rank]] | None = None

    def adopt(self) -> None:
        """Take up an engine that has run before: all of its processes have."""
        self.launched |= {each.node: self.lead.boot_of(each.node) for each in self.want.processes}

    def hear(self, seen: Observed) -> bool:
        """Note what has come; True when each of its APIs has answered."""
        self._met |= {rank.actor for rank in self.ranks if rank.pid in self._processes(rank.node)}
        came = self.apis.hear(seen)
        self.stall.turn(self.apis.waits(), seen.longest_step, _workers(self.ranks) or self.ranks)
        return came

    def _processes(self, node: str) -> Sequence[object]:
        """Return the processes of Ray's ranks that live on a node."""
        found = (self.lead.report(node, self.name) or {}).get("ranks")
        return found if isinstance(found, list) else []

    def meet(self, seen: Observed) -> bool:
        """Find out which ranks it has, and where; true when the record has changed."""
        if self.view is None:
            before, seen.ranks = seen.ranks, placed(self.want)
            return before != seen.ranks
        self._ask_for_ranks(self.view, seen)
        before = {node: list(held) for node, held in seen.ranks.items()}
        # Of replicas Ray runs the engines as well; where there are ranks, these are what a node
        # holds.
        found: dict[str, set[str]] = {node: set() for node in self.want.nodes}
        for rank in _workers(self.ranks) or self.ranks:
            found.setdefault(rank.node, set()).add(rank.name)
        # Ray has them in any order.
        if there := {node: sorted(held, key=by_number) for node, held in found.items() if held}:
            seen.ranks = there
        return before != seen.ranks

    def _ask_for_ranks(self, view: RayView, seen: Observed) -> None:
        """Ask Ray for the ranks until it knows all of them: engines are in it before their ranks,
        and one replica's ranks before the other's.
        """
        if self._asked is not None and self._asked.over:
            self.ranks = self._asked.value or self.ranks
        if len(_workers(self.ranks)) >= sum(self.want.places.values()):
            return
        pause = _SOON if self.ranks and seen.state == "starting" else _MEET
        if self._asked is None or self.clock.monotonic() - self._asked.began > pause:
            pid = (self.lead.report(self.want.api_node, self.name) or {}).get("pid")
            self._asked = Background(lambda: view.ranks(pid)) if isinstance(pid, int) else None

    def living(self, seen: Observed) -> dict[str, dict[str, bool]]:
        """Return which ranks live, by node; one of which nobody can say it is not among them."""
        found: dict[str, dict[str, bool]] = {}
        if self.view is None:
            for each in self.want.processes:
                said = self.lead.report(each.node, self.name) or {}
                if self.lead.fresh(each.node) and said.get("last") == seen.generation:
                    ranks = seen.ranks.get(each.node, ())
                    runs = said.get("state") == RUNNING
                    found.setdefault(each.node, {}).update(dict.fromkeys(ranks, runs))
            return found
        for rank in _workers(self.ranks) or self.ranks:
            lives = rank.pid in self._processes(rank.node)
            if self.lead.fresh(rank.node) and (lives or rank.actor in self._met):
                found.setdefault(rank.node, {})[rank.name] = lives
        return found

    # --- signs of its death

    def signs(self, seen: Observed) -> list[Trouble]:
        """Return what says that it is dead."""
        found = [
            *self._lost_processes(seen.generation),
            *(self._lost_nodes(seen.ranks) if self.view is not None else ()),
            *self._lost_ranks(seen),
            *self._admitted(seen),
        ]
        return found if len(self.want.apis) == 1 else [self._blamed(each) for each in found]

    def _blamed(self, trouble: Trouble) -> Trouble:
        """Let a sign be about the node that it says was lost: replicas that compute together die of
        one another, and Gloo says of whom (`Connection closed by peer [10.0.0.2]:61130`).
        """
        text = f"{trouble.cause}\n{trouble.evidence}"
        for number, each in enumerate(self.want.processes):
            address = re.escape(self.want.addresses.get(each.node) or "-")
            closed = re.search(rf"closed by peer \[{address}\]", text)
            if closed and each.node != trouble.node and "killed" not in trouble.what:
                what = f"{trouble.what}: it has lost {each.node}"
                return replace(trouble, what=what, node=each.node, rank=str(number))
        return trouble

    def _lost_processes(self, generation: int) -> list[Trouble]:
        """Return which of its processes have ended, or cannot be asked."""
        want = self.want
        found: list[Trouble] = []
        for number, process in enumerate(want.processes):
            said, node = self.lead.report(process.node, self.name), process.node
            rank = "" if len(want.processes) == 1 else str(number)
            boot = self.lead.boot_of(node)
            if said is None:
                found += self._absent(node, rank)
            elif said.get("last") == generation:
                self.launched.setdefault(node, boot)
                if said.get("state") != RUNNING:
                    found.append(self._ended(number, rank, node, said))
            elif node in self.launched and self.launched[node] != boot:
                found.append(_restarted(node, rank))
        return found

    def _lost_ranks(self, seen: Observed) -> list[Trouble]:
        """Return that ranks of Ray's have ended, as their agents see it, and vLLM goes on.

        vLLM sees it, too, and ends within seconds, with words that tell more; but not always: its
        v1/executor/ray_executor_v2.py shuts all ranks down, and the engine may wait for ever for an
        answer of theirs. Where it has several replicas, it may have ended some on purpose: it is
        dead only when no work is done.
        """
        lost, now = self._ended_ranks(), self.clock.monotonic()
        if not lost or self.apis.rests(seen):
            self._bereft = None
            return []
        self._bereft = now if self._bereft is None else self._bereft
        works = self.want.replicas > 1 and self.apis.idle() < _rest(self.want)
        if works or now - self._bereft < _LAST_WORDS:
            return []
        said = self.lead.report(self.want.api_node, self.name) or {}
        if len(lost) > 1:  # whose end was first, Ray may know
            return [_of(Trouble(1, "vLLM goes on, though its ranks have ended"), said)]
        (one,) = lost
        what = f"vLLM goes on, though its rank {one.name} has ended"
        return [_of(Trouble(1, what, one.node, one.name, certain=True), said)]

    def _ended_ranks(self) -> list[Rank]:
        """Return the ranks whose processes were there, and are not any more."""
        return [
            rank
            for rank in self.ranks
            if rank.actor in self._met
            and self.lead.fresh(rank.node)
            and rank.pid not in self._processes(rank.node)
        ]

    def _lost_nodes(self, ranks: Mapping[str, list[str]]) -> list[Trouble]:
        """Return which nodes that hold ranks of Ray's have gone, or were started anew."""
        found: list[Trouble] = []
        for node, held in ranks.items():
            boot = self.lead.boot_of(node)
            self.launched.setdefault(node, boot)
            if not self.lead.here(node):
                found += self._absent(node, " ".join(held))
            elif self.launched[node] not in ("", boot):
                found.append(_restarted(node, " ".join(held)))
        return found

    def _admitted(self, seen: Observed) -> list[Trouble]:
        """Return that a server which was ready says itself that its engine is dead, of several APIs
        on which node.
        """
        found = []
        for node in self.apis.dead(seen):
            of, named = (f" of {node}", node) if len(self.want.apis) > 1 else ("", "")
            trouble = Trouble(1, f"the engine{of} says that it is dead", named)
            found.append(_of(trouble, self.lead.report(node, self.name) or {}))
        return found

    def _absent(self, node: str, rank: str) -> list[Trouble]:
        """A node that cannot be asked is gone when it had time to come back and the engine does no
        work without it.
        """
        why = self.lead.gone(node)
        if not why or self.apis.idle() < _rest(self.want):
            return []
        why = f"its agent: {why}"
        return [Trouble(5, f"{node} is gone", node, rank, evidence=why, certain=True)]

    def _ended(self, number: int, rank: str, node: str, said: Mapping[str, Any]) -> Trouble:
        """A killed process is nearer to the cause than one that ended by itself; the first one's
        own ends with any other.
        """
        how = str(said.get("ended") or "was stopped")
        weight = 4 if "killed" in how else 3 if number else 2
        of = f"vLLM's process on {node}" if rank else "vLLM"
        return _of(Trouble(weight, f"{of} {how}", node if rank else "", rank), said)


def _rest(want: Desired) -> float:
    """Return for how many seconds no work is done by an engine that works no more."""
    return 3 * want.policy.canary


def _restarted(node: str, rank: str) -> Trouble:
    return Trouble(5, f"the container of {node} was started anew", node, rank, certain=True)


def _of(trouble: Trouble, said: Mapping[str, Any]) -> Trouble:
    """Add what a node's engine printed."""
    evidence, cause = said.get("evidence"), said.get("cause")
    return replace(
        trouble,
        evidence=evidence if isinstance(evidence, str) else "",
        cause=cause[:LONGEST] if isinstance(cause, str) else "",
    )


def _workers(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks without the engines beside them."""
    return [each for each in ranks if each.name != ENGINE]
