"""What is known of a running engine: what of it moved when, what its API says, which ranks it has,
and the signs of its death.

It decides nothing: `keeper.py` does. One is made for each start of an engine. Standard library
only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from . import health
from .background import Background
from .cause import LONGEST
from .crew import Lead
from .desired import Desired, Process
from .faults import Trouble
from .health import Movement
from .observed import Load, Observed
from .probe import Probe
from .process import RUNNING
from .rank_name import by_number, placed
from .ray_view import ENGINE, Rank, RayView
from .task import HEALTH, ONLY_HEALTH, named

_SUSPECT = 10.0  # seconds without any movement, after which GPUs are asked whether they compute
_MEET = 10.0  # seconds between two questions to Ray for the ranks
_SOON = 1.0  # the same, while some are there already and the server starts
_LAST_WORDS = 5.0  # seconds for vLLM to end when its ranks have
# what an odd report of an agent raises
_NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


class Clock(Protocol):
    """The module `time`, or what stands in for it."""

    def time(self) -> float:
        """Return seconds since 1970."""

    def monotonic(self) -> float:
        """Return seconds that only grow."""


class Monitor:
    """One engine, from its start to its end.

    `launched` has each node where its process ran, with its agent's boot then.
    """

    def __init__(
        self, name: str, want: Desired, lead: Lead, view: RayView | None, clock: Clock
    ) -> None:
        self.name, self.want, self.lead, self.view, self.clock = name, want, lead, view, clock
        self.launched: dict[str, str] = {}
        self.busy = False  # ask for the GPUs' utilisation
        self.movement = Movement(clock.monotonic(), self.parts)
        self.ranks: list[Rank] = []  # those that Ray runs for the server, as it said last
        self._met: set[str] = set()  # the actors of those whose processes have been seen
        self._bereft: float | None = None  # since when some of these have ended
        self._asked: Background[list[Rank]] | None = None
        self._eye: Probe | None = None  # on a server whose node's agent cannot be asked
        self._last_answer = self._fresh = 0.0
        self._well: tuple[int, float] | None = None
        self._counted: tuple[int, float] | None = None
        self._tokens: tuple[float, float] | None = None

    @property
    def parts(self) -> tuple[int | None, ...]:
        """All of the engine (None), and each of its replicas."""
        return (None, *range(self.want.replicas)) if self.want.replicas > 1 else (None,)

    def adopt(self) -> None:
        """Take up an engine that has run before: all of its processes have."""
        self.launched = {each.node: self.lead.boot_of(each.node) for each in self.want.processes}

    def over(self) -> None:
        """Look no more."""
        self._look_from_here(None)

    def hear(self, seen: Observed) -> bool:
        """Note what has moved; True when an answer has come since the last time."""
        now, moved = self.clock.monotonic(), self.movement
        for number, process in enumerate(self.want.processes):
            said = self.lead.report(process.node, self.name)
            if not said or said.get("last") != seen.generation:
                continue
            # what it said last is no news, and what cannot be asked may well move
            if not self.lead.fresh(process.node):
                moved.moved(now, *self.parts)
                continue
            with contextlib.suppress(*_NONSENSE):
                self._note_node(number, process, said, now)
        for rank in self.ranks:
            if (worked := self._processes(rank.node).get(str(rank.pid))) is not None:
                self._met.add(rank.actor)
                replica = re.match(r"DP(\d+)", rank.name)
                moved.worked(
                    (rank.actor, "work"), worked, now, None, *([int(replica[1])] if replica else [])
                )
        return self._note_probe(self._probe(seen), seen, now)

    def _processes(self, node: str) -> Mapping[str, Any]:
        """Return at how many looks each rank of Ray's on a node had worked, by its process."""
        found = (self.lead.report(node, self.name) or {}).get("ranks")
        return found if isinstance(found, Mapping) else {}

    def _note_node(
        self, number: int, process: Process, said: Mapping[str, Any], now: float
    ) -> None:
        """Note what a node's processes did: each replica's own where they name themselves, else all
        that the node has.
        """
        here = self._replicas(process)
        work: Mapping[str, Any] = said.get("work") or {}
        unnamed = [] if self.view else [each for each in here if str(each) not in work]
        for key, count in work.items():
            parts = (int(key),) if key else (None, *unnamed)
            self.movement.worked((number, "work", key), count, now, *parts)
        for key, printed in (said.get("lines") or {}).items():
            self.movement.changed((number, "lines", key), printed, now, _part(key))
        if _positive(said.get("busy")):
            self.movement.moved(now, None, *here)

    def _replicas(self, process: Process) -> range:
        """Return the numbers of the replicas that a process runs; none where there is only one."""
        first, held = process.replicas
        return range(first, first + held) if self.want.replicas > 1 else range(0)

    def _note_probe(self, probe: Mapping[str, Any], seen: Observed, now: float) -> bool:
        moved, came = self.movement, False
        try:
            if (way := named(str(probe.get("task")))) is not None:
                seen.task = way.name
            for key, (count, age) in probe.get("answers", {}).items():
                answered = (count, self._eye is None)
                # `/health` answers, whatever the other nodes of the engine do
                work = way is not HEALTH
                moved.changed(("answers", key), answered, now, _part(key), progress=work)
                if key == "":
                    came, self._last_answer = True, now - float(age)
                    at = round(self.clock.time() - float(age), 2)
                    if seen.answered is None or at - seen.answered > 0.5:
                        seen.answered, seen.seconds = at, float(probe.get("seconds", 0.0))
            seen.asking = max(
                (float(each) for each in probe.get("asking", {}).values()), default=0.0
            )
            if isinstance(counted := probe.get("counters"), Mapping):
                self._count(counted, seen, now)
        except _NONSENSE:
            return False
        return came

    def _count(self, counted: Mapping[str, Any], seen: Observed, now: float) -> None:
        taken = now - float(counted["age"])
        for key, digest in counted["progress"].items():
            self.movement.changed(("counters", key), digest, now, _part(key), progress=True)
        running, waiting = int(counted["running"]), int(counted["waiting"])
        tokens, failed = float(counted["tokens"]), float(counted["failed"])
        canaries = 1 if seen.asking else 0
        self._counted = figures = (max(0, running + waiting - canaries), failed)
        answers = self._last_answer >= taken - self.want.policy.canary and not seen.asking
        if answers or self._queues(*figures):
            self._well = figures
        if (rate := self._rate(tokens, taken)) is not None:
            seen.load = Load(running=running, waiting=waiting, tokens_per_s=round(rate, 1))
        self._fresh = taken

    def _queues(self, unanswered: int, failed: float) -> bool:
        """True when the queue has grown since it was well, and nothing has failed."""
        return self._well is not None and unanswered > self._well[0] and failed == self._well[1]

    def _rate(self, tokens: float, taken: float) -> float | None:
        """Return tokens per second since the last look, 0 at the first; None where that was less
        than a second ago.
        """
        if self._tokens is None:
            self._tokens = (taken, tokens)
            return 0.0
        before, had = self._tokens
        if taken - before >= 1:
            self._tokens = (taken, tokens)
            return max(0.0, tokens - had) / (taken - before)
        return None

    def _probe(self, seen: Observed) -> Mapping[str, Any]:
        """Return what is known of the server's API: from the agent beside it, or from here while
        that one cannot be asked.
        """
        want = self.want
        if self.lead.fresh(want.api_node) or seen.state != "ready" or not self.launched:
            self._look_from_here(None)
            probe = (self.lead.report(want.api_node, self.name) or {}).get("probe")
            return probe if isinstance(probe, Mapping) else {}
        return self._look_from_here(want)

    def _look_from_here(self, want: Desired | None) -> Mapping[str, Any]:
        if want is None:
            if self._eye is not None:
                self._eye.stop()
                self._eye = None
            return {}
        if self._eye is None:
            host = want.addresses.get(want.api_node, "") if want.everywhere else want.host
            self._eye = Probe(host, want.port, want.replicas, want.policy.canary)
        return self._eye.report()

    def rests(self, seen: Observed) -> str:
        """Say that it stands still on purpose; empty when it does not."""
        said = self._probe(seen).get("rests")
        return said if isinstance(said, str) else ""

    def warning(self, seen: Observed) -> str:
        """Say what is odd about what we ask ourselves; empty when nothing is."""
        probe = self._probe(seen)
        odd, way = probe.get("odd"), named(seen.task)
        if not isinstance(odd, list) or len(odd) != 2:
            return f"{ONLY_HEALTH} ({probe.get('refused')})" if way is HEALTH else ""
        ours = "completion" if way is None else way.word
        how = f"our own {ours} was answered with {odd[0]}" if odd[0] else f"no {ours} for us"
        return f"{how}: {odd[1]}"

    def still(self) -> tuple[float, int | None]:
        """Return for how many seconds the stillest part has not moved, and which it is."""
        found = self.movement.still(self.clock.monotonic())
        self.busy = found[0] > _SUSPECT
        return found

    def lost(self) -> int | None:
        """Return how many requests its death costs; None where nobody knows."""
        fresh = self.clock.monotonic() - self._fresh <= self.want.policy.canary + 2
        return health.lost(self._well, self._counted, fresh)

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

    # --- signs of its death

    def signs(self, seen: Observed) -> list[Trouble]:
        """Return what says that it is dead."""
        return [
            *self._lost_processes(seen.generation),
            *(self._lost_nodes(seen.ranks) if self.view is not None else ()),
            *self._lost_ranks(seen),
            *self._admitted(seen),
        ]

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
        if not lost or self.rests(seen):
            self._bereft = None
            return []
        self._bereft = now if self._bereft is None else self._bereft
        works = self.want.replicas > 1 and self.movement.idle(now) < _rest(self.want)
        if works or now - self._bereft < _LAST_WORDS:
            return []
        said = self.lead.report(self.want.api_node, self.name) or {}
        if len(lost) > 1:  # whose end was first, Ray may know
            return [_of(Trouble(1, "vLLM goes on, though its ranks have ended"), said)]
        (one,) = lost
        what = f"vLLM goes on, though its rank {one.name} has ended"
        return [_of(Trouble(1, what, one.node, one.name), said)]

    def _ended_ranks(self) -> list[Rank]:
        """Return the ranks whose processes were there, and are not any more."""
        return [
            rank
            for rank in self.ranks
            if rank.actor in self._met
            and self.lead.fresh(rank.node)
            and str(rank.pid) not in self._processes(rank.node)
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
        """Return that a server which was ready says itself that its engine is dead."""
        probe = self._probe(seen)
        dead = probe.get("health") == 503 or "EngineDead" in str(probe.get("odd") or "")
        if seen.state != "ready" or not dead:
            return []
        said = self.lead.report(self.want.api_node, self.name) or {}
        return [_of(Trouble(1, "the engine says that it is dead"), said)]

    def _absent(self, node: str, rank: str) -> list[Trouble]:
        """A node that cannot be asked is gone when it had time to come back and the engine does no
        work without it.
        """
        why = self.lead.gone(node)
        if not why or self.movement.idle(self.clock.monotonic()) < _rest(self.want):
            return []
        return [Trouble(5, f"{node} is gone", node, rank, evidence=f"its agent: {why}")]

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


def _part(key: str) -> int | None:
    """Return the replica that a report names; None for the whole engine, whose name is empty."""
    return int(key) if key else None


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _restarted(node: str, rank: str) -> Trouble:
    return Trouble(5, f"the container of {node} was started anew", node, rank)


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
