"""Keeps one server as it is wanted: one state machine, which alone judges its health and alone gives up. Standard library only.

    waiting → starting → ready → stopping → pausing → waiting …        and at the end: stopped, failed, gave-up

`turn` is called several times a second and never blocks: what takes its time runs in a thread or a program of its own. What it
wants of each node is in `orders`; what it knows comes from the agents' reports (`crew.Lead`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from . import children, health, state
from .cause import LONGEST
from .crew import Lead
from .desired import Desired, Process
from .health import Movement
from .node import KEEP, PREPARE, RUN, Order
from .observed import EVIDENCE, FAULTS, OVER, Fault, Load, Observed
from .probe import Probe
from .process import IDLE, RUNNING
from .ray_view import SILENT, Culprit, Rank, RayView
from .wire import say

_SOON = 30.0  # seconds in which a start or an end is over, if nothing is amiss
_SETTLE = 1.0  # seconds in which several signs of one death are gathered, so that the nearest to its cause is told
_LASTED = 600.0  # seconds of being ready after which a fault is no part of a streak
_ABSENT = 30.0  # seconds for a node that cannot be asked to come back, before a server counts as stopped without it
_FREE = 20.0  # seconds for Ray to take reserved GPUs back
_SUSPECT = 10.0  # seconds without any movement, after which GPUs are asked whether they compute
_AGAIN = 1.0  # seconds between two questions to Ray
_EXPLAIN = 15.0  # seconds for Ray to say whose death came first
_RESERVE = 30.0  # seconds between two attempts to set GPUs aside in Ray
_NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # what an odd report of an agent raises
T = TypeVar("T")


class Background(Generic[T]):
    """Something that takes its time, in a thread: `value` is there when it is `over`; None where it could not be had."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.value: T | None = None
        self.error = ""
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self.value = work()
        except SILENT as error:
            self.error = f"{type(error).__name__}: {error}"

    @property
    def over(self) -> bool:
        """True when it has ended, well or not."""
        return not self._thread.is_alive()


@dataclass(frozen=True)
class Trouble:
    """A sign of an engine's death; `weight` is how near it is to the cause: what a death brings about comes a moment later."""

    weight: int
    what: str
    node: str = ""
    rank: str = ""
    evidence: str = ""
    cause: str = ""


class Keeper:
    """One name's server: what is wanted under that name, now or soon."""

    def __init__(self, name: str, folder: str, lead: Lead, clock: Callable[[], float] = time.time) -> None:
        self.name, self.folder, self.lead, self.clock = name, folder, lead, clock
        self.asked: Desired | None = None  # what the file says
        self.want: Desired | None = None  # what is kept; another one than asked for only until the engine has ended
        self.seen: Observed | None = None
        self._file: object = ()
        self._phase = ""  # of the orders; empty: nothing should run
        self._launched: dict[str, str] = {}  # node → its agent's boot when its process ran
        self._movement = Movement(0.0)
        self._began = self._suspected = self._last_answer = 0.0
        self._troubles: list[Trouble] = []
        self._lacking: Background[str] | None = None
        self._explain: Background[Culprit | None] | None = None
        self._ranks: Background[list[Rank]] | None = None
        self._view: RayView | None = None
        self._reserved: Reservation | None = None
        self._well: tuple[int, float] | None = None
        self._counted: tuple[int, float] | None = None
        self._tokens: tuple[float, float] | None = None
        self._saved = self._looked = self._fresh = 0.0
        self._busy = False
        self._eye: Probe | None = None  # on a server whose node's agent cannot be asked
        self._leaving: float | None = None
        self._freed: Background[tuple[int, str]] | None = None

    @property
    def changing(self) -> bool:
        """True while a server is about to be started or ended, unless it waits for something that takes longer."""
        seen = self.seen
        moving = self.want != self.asked or (seen is not None and seen.state in ("waiting", "stopping"))
        return moving and (seen is None or self.clock() - seen.since < _SOON)

    # --- the state machine

    def turn(self) -> None:
        """Look once, and do what follows."""
        self._read()
        if self.want != self.asked:
            self._leave()
            return
        if self.want is None and self.seen is None:
            self._close()
        if self.want is None or self.seen is None:
            return
        {
            "waiting": self._wait, "starting": self._start, "ready": self._watch, "stopping": self._stop,
            "pausing": self._pause,
        }.get(self.seen.state, self._rest)()  # fmt: skip
        if self._reserved is not None:
            self._reserved.turn(self._phase == RUN)
        if time.monotonic() - self._saved >= self.want.policy.canary:
            self._save(durable=False)  # so that whoever reads it knows that somebody looks

    def _read(self) -> None:
        """Read what is wanted, when its file has changed."""
        path = state.path(self.name, state.DESIRED, self.folder)
        try:
            found = os.stat(path)
            mark: object = (found.st_mtime_ns, found.st_ino, found.st_size)
        except OSError:
            mark = None
        if mark == self._file:
            return
        self._file = mark
        try:
            self.asked = state.wanted(self.name, self.folder) if mark else None
        except ValueError as error:
            say(f"{self.name}: {path} cannot be read: {error}")
            self.asked = None

    def _close(self) -> None:
        """Write down that a server is over that somebody stopped while no agent was here."""
        self.seen = state.seen(self.name, self.folder)
        if self.seen is not None and self.seen.state not in OVER:
            self.seen.state, self.seen.doing = "stopped", ""
            with contextlib.suppress(OSError):
                state.write(state.path(self.name, state.OBSERVED, self.folder), self.seen.as_json())

    def _leave(self) -> None:
        """End what is not wanted any more, then turn to what is."""
        if self.want is not None and self.seen is not None:
            self._phase = ""
            if self.seen.state != "stopping" or self._leaving is None:
                self._leaving = time.monotonic()
                self._set("stopping", "it was stopped" if self.asked is None else "another server takes its place")
            absent = [node for node in self._launched if not self.lead.here(node)]
            if not self._gone() or (absent and time.monotonic() - self._leaving < _ABSENT) or not self._released():
                return
            if self.asked is None:
                left = f"{', '.join(absent)} could not be asked: what runs there ends when it is back" if absent else ""
                self._set("stopped", left)
                say(f"{self.name}: stopped {left}")
        self._leaving = None
        self.want = self.asked
        if self.want is not None:
            self._adopt(self.want)

    def _adopt(self, want: Desired) -> None:
        """Begin with a server: anew, or where the agent was when it ended, for its container or host may have restarted."""
        before = state.seen(self.name, self.folder)
        same = before is not None and (before.id, before.asked) == (want.id, want.asked)
        here = state.container()
        self._view = RayView(want.ray, want.tp, want.addresses) if want.ray and want.backend == "ray" else None
        self._reserved = Reservation(want) if want.ray and want.ray.reserve else None
        self._launched, self._troubles, self._phase = {}, [], ""
        if before is None or not same:
            generation = before.generation if before is not None else 0
            self.seen = Observed(
                name=want.name, id=want.id, asked=want.asked, model=want.model, generation=generation, container=here,
                since=self.clock(),
            )  # fmt: skip
            self._set("waiting", "looking at the nodes")
            return
        replaced = bool(here and before.container) and here != before.container
        self.seen = replace(before, container=here)
        if before.state in ("starting", "ready"):
            self._phase, self._began = KEEP, time.monotonic()
            if any(each.node == self.lead.name for each in want.processes):  # it has ended with this container
                self._lose(before, replaced=replaced)
            else:
                self._set("waiting", "looking for the engine that ran before")
        elif before.state in ("stopping", "waiting", "pausing"):
            self._set("stopping", "ending what is left of the engine")

    def _lose(self, before: Observed, *, replaced: bool) -> None:
        """Take up a server whose engine ended with the head's container; what somebody has done on purpose is no fault."""
        self._phase = ""
        if replaced or before.ready_at is None:
            self._set("stopping", "the head's container was replaced" if replaced else "the head's container was restarted")
        else:
            self._fail(Trouble(9, "the head's container was restarted", node=self.lead.name), at_once=before.streak <= 1)

    def _wait(self) -> None:
        """Start when all is there that the engine needs."""
        want, seen = self._both()
        missing = [node for node in self._nodes() if not self.lead.here(node)]
        if self._phase == KEEP:
            return self._look_back(missing)
        self._phase = PREPARE
        if missing:
            return self._doing(f"waiting for the agent of {', '.join(missing)}")
        reports = {node: self.lead.report(node, self.name) or {} for node in self._nodes()}
        if busy := [node for node, said in reports.items() if said.get("state", IDLE) != IDLE]:
            return self._doing(f"waiting until the engine of {', '.join(busy)} has ended")
        if self._view is not None and (lacking := self._lacks(self._view)):
            return self._doing(lacking)
        waits = [(node, said) for node, said in reports.items() if said.get("prepared") != seen.generation + 1]
        if waits:
            said = [f"{node}: {report['waits']}" for node, report in waits if isinstance(report.get("waits"), str)]
            return self._doing("; ".join(said) or "looking at the nodes")
        if self._reserved is not None and want.ray is not None and want.ray.partial and not self._reserved.ready:
            return self._doing(self._reserved.doing)
        return self._launch(want, seen)

    def _look_back(self, missing: list[str]) -> None:
        """Go on with an engine that has outlived the head's agent, if all of it does."""
        want, seen = self._both()
        reports = [self.lead.report(each.node, self.name) or {} for each in want.processes]
        alive = [each.get("state") == RUNNING and each.get("last") == seen.generation for each in reports]
        if all(alive):
            say(f"{self.name}: its engine has gone on meanwhile")
            self._launched = {each.node: self.lead.boot_of(each.node) for each in want.processes}
            self._movement = self._parts()
            self._set("starting" if seen.ready_at is None else "ready")
        elif not missing:
            self._lose(seen, replaced=False)
        else:  # what cannot be asked is unknown: it may well be serving
            self._doing(f"looking for the engine that ran before: {', '.join(missing)} cannot be asked yet")

    def _lacks(self, view: RayView) -> str:
        """Return what Ray lacks for a start. Twice in a row nothing, after a death: what died may not have been noticed yet."""
        seen = self._seen()
        if self._lacking is None:
            if time.monotonic() < self._looked:
                return seen.doing
            looks = 2 if seen.fault_count else 1
            self._lacking = Background(lambda: view.lacking(looks))
        if not self._lacking.over:
            return seen.doing if seen.doing and "agent" not in seen.doing else "asking Ray for free GPUs"
        lacking = self._lacking.value if not self._lacking.error else "waiting for Ray's dashboard to answer"
        if lacking:
            self._lacking, self._looked = None, time.monotonic() + _AGAIN
        return lacking or ""

    def _launch(self, want: Desired, seen: Observed) -> None:
        self._reached("whole")
        seen.generation += 1
        self._phase, self._launched, self._troubles = RUN, {}, []
        self._began = time.monotonic()
        self._movement = self._parts()
        self._lacking = self._ranks = self._tokens = None
        self._well = self._counted = None
        self._reached("started")
        self._set("starting", "starting the engine")
        say(f"{self.name}: starting the engine of {want.model} (generation {seen.generation})")

    def _start(self) -> None:
        """Wait for the first answer. The first start of all has no deadline, whoever waits for it has; later ones have."""
        want, seen = self._both()
        if self._hear():
            took = time.monotonic() - self._began
            seen.first_start = seen.first_start or round(took, 1)
            now = self.clock()
            for each in seen.faults:
                if each.ready_again_after is None:
                    each.ready_again_after = round(now - each.at, 3)
            seen.ready_at, seen.next_start = now, None
            self._set("ready")
            with contextlib.suppress(OSError):
                state.answered(want, now, self.folder)
            say(f"{self.name}: answers, {took:.1f} s after its start")
            if self._view is not None:
                self._meet_ranks(self._view)
            else:
                seen.ranks = _placed(want)
                self._save()
            return
        if seen.doing != "starting the engine" and not self._troubles:
            self._doing("starting the engine")
        late = time.monotonic() - self._began
        limit = max(want.policy.start_timeout, 2 * (seen.first_start or 0.0))
        if seen.ready_at is not None and late > limit and want.policy.restarts != 0:
            self._fail(Trouble(0, f"no answer within {limit:.0f} s of a restart"))
        else:
            self._judge()

    def _watch(self) -> None:
        """Look whether the engine lives."""
        want, seen = self._both()
        self._hear()
        if self._ranks is not None and self._ranks.over:
            if self._ranks.value:
                for rank in self._ranks.value:
                    held = seen.ranks.setdefault(rank.node, [])
                    if rank.name not in held:
                        held.append(rank.name)
                self._save()
            elif self._view is not None and time.monotonic() - self._ranks.began > 10:
                self._meet_ranks(self._view)
        self._judge()
        if seen.state != "ready":
            return
        now = time.monotonic()
        still, part = self._movement.still(now)
        whose = "" if part is None else f" of replica {part}"
        seen.still = round(still, 1) if still > 2 * want.policy.canary else 0.0
        self._busy = still > _SUSPECT
        if seen.still and self._rests():
            self._movement.moved(now, *self._all_parts())
        elif still >= want.policy.stuck and want.policy.restarts != 0:
            nothing = "no answer, no counter, no line, no CPU or GPU time"
            self._fail(Trouble(1, f"nothing{whose} has moved for {still:.0f} s: {nothing}"))
            return
        note = self._note(whose)
        if note != seen.doing or self._warning() != seen.warning:
            seen.warning = self._warning()
            self._set("ready", note)

    def _stop(self) -> None:
        """Wait until the engine has ended wherever somebody can be asked, then pause."""
        want, seen = self._both()
        self._phase = ""
        if not self._gone():
            return
        self._reached("stopped")
        if self._explain is not None:
            if not self._explain.over and time.monotonic() - self._explain.began < _EXPLAIN:
                return
            self._blame(self._explain.value)
            self._explain = None
        last = seen.faults[-1] if seen.faults and seen.next_start is not None else None
        if seen.next_start is None:
            self._set("waiting", "looking at the nodes")
        elif seen.ready_at is None or want.policy.restarts == 0:
            why = f"{last.what}{f': {last.cause}' if last.cause else ''}" if last else "it ended"
            seen.next_start = None
            self._release()
            self._set("failed", f"it never answered: {why}" if seen.ready_at is None else why)
            say(f"{self.name}: FAILED: {seen.doing}")
        elif seen.restarts_left == 0:
            seen.next_start = None
            self._release()
            self._set("gave-up", f"no restart is left of {want.policy.restarts}; the last fault: {last.what if last else ''}")
            say(f"{self.name}: GIVES UP: {seen.doing}. `vlaunch serve` starts it anew")
        else:
            self._set("pausing", "waiting before the next start")

    def _pause(self) -> None:
        """Wait, longer each time that a start did not last: what kills an engine may still be there."""
        seen = self._seen()
        if seen.next_start is None or self.clock() >= seen.next_start:
            seen.restarts.append(self.clock())
            seen.next_start = None
            self._set("waiting", "looking at the nodes")

    def _rest(self) -> None:
        """Do nothing: it failed or has given up, until somebody asks anew."""
        self._phase = ""

    # --- what is known

    def _both(self) -> tuple[Desired, Observed]:
        assert self.want is not None and self.seen is not None  # noqa: S101 - `turn` has looked
        return self.want, self.seen

    def _seen(self) -> Observed:
        return self._both()[1]

    def _nodes(self) -> list[str]:
        """Return the nodes whose agents a start needs: those of the processes, then of the ranks."""
        want, _ = self._both()
        return list(dict.fromkeys((*(each.node for each in want.processes), *want.places)))

    def _gone(self) -> bool:
        """True when nothing of the engine runs, wherever somebody can be asked; who comes back later ends it then."""
        reports = [self.lead.report(node, self.name) for node in self._nodes()]
        return all(each is None or each.get("state", IDLE) == IDLE for each in reports)

    def _hear(self) -> bool:
        """Note what has moved; True when an answer has come since the last time."""
        want, seen = self._both()
        now, moved = time.monotonic(), self._movement
        for number, process in enumerate(want.processes):
            said = self.lead.report(process.node, self.name)
            if not said or said.get("last") != seen.generation:
                continue
            if not self.lead.fresh(process.node):  # what it said last is no news, and what cannot be asked may well move
                moved.moved(now, *self._all_parts())
                continue
            with contextlib.suppress(*_NONSENSE):
                self._note_node(number, process, said, now)
        for rank in self._known_ranks():
            ranks = (self.lead.report(rank.node, self.name) or {}).get("ranks")
            if isinstance(ranks, Mapping) and (worked := ranks.get(str(rank.pid))) is not None:
                replica = re.match(r"DP(\d+)", rank.name)
                moved.worked((rank.actor, "work"), worked, now, None, *([int(replica[1])] if replica else []))
        return self._note_probe(self._probe(), now)

    def _note_node(self, number: int, process: Process, said: Mapping[str, Any], now: float) -> None:
        """Note what a node's processes did: each replica's own where they name themselves, else all that the node has."""
        want, _ = self._both()
        first, held = process.replicas
        here = range(first, first + held) if want.replicas > 1 else ()
        work: Mapping[str, Any] = said.get("work") or {}
        for key, count in work.items():
            unnamed = (each for each in here if str(each) not in work)
            parts = (int(key),) if key else (None, *(() if self._view else unnamed))
            self._movement.worked((number, "work", key), count, now, *parts)
        for key, printed in (said.get("lines") or {}).items():
            self._movement.changed((number, "lines", key), printed, now, int(key) if key else None)
        if isinstance(busy := said.get("busy"), (int, float)) and busy > 0:
            self._movement.moved(now, None, *here)

    def _note_probe(self, probe: Mapping[str, Any], now: float) -> bool:
        seen = self._seen()
        moved, came = self._movement, False
        try:
            for key, (count, age) in probe.get("answers", {}).items():
                part = int(key) if key else None
                moved.changed(("answers", key), (count, self._eye is None), now, part, progress=True)
                if key == "":
                    came, self._last_answer = True, now - float(age)
                    at = round(self.clock() - float(age), 2)
                    if seen.answered is None or at - seen.answered > 0.5:
                        seen.answered, seen.seconds = at, float(probe.get("seconds", 0.0))
            seen.asking = max((float(each) for each in probe.get("asking", {}).values()), default=0.0)
            if isinstance(counted := probe.get("counters"), Mapping):
                self._count(counted, now)
        except _NONSENSE:
            return False
        return came

    def _count(self, counted: Mapping[str, Any], now: float) -> None:
        seen, taken = self._seen(), now - float(counted["age"])
        for key, digest in counted["progress"].items():
            self._movement.changed(("counters", key), digest, now, int(key) if key else None, progress=True)
        running, waiting, tokens = int(counted["running"]), int(counted["waiting"]), float(counted["tokens"])
        canaries = 1 if seen.asking else 0
        figures = (max(0, running + waiting - canaries), float(counted["failed"]))
        self._counted = figures
        if self._last_answer >= taken - self._both()[0].policy.canary and not seen.asking:
            self._well = figures
        elif self._well is not None and figures[0] > self._well[0] and figures[1] == self._well[1]:
            self._well = figures  # a queue that has grown, and nothing failed yet
        if self._tokens is None or taken - self._tokens[0] >= 1:
            rate = 0.0 if self._tokens is None else max(0.0, tokens - self._tokens[1]) / (taken - self._tokens[0])
            self._tokens = (taken, tokens)
            seen.load = Load(running=running, waiting=waiting, tokens_per_s=round(rate, 1))
        self._fresh = taken

    def _probe(self) -> Mapping[str, Any]:
        """Return what is known of the server's API: from the agent beside it, or from here while that one cannot be asked."""
        want, seen = self._both()
        if self.lead.fresh(want.api_node) or seen.state != "ready" or not self._launched:
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

    def _rests(self) -> str:
        said = self._probe().get("rests")
        return said if isinstance(said, str) else ""

    def _note(self, whose: str) -> str:
        seen = self._seen()
        if rests := self._rests():
            return f"{rests}: left alone"
        if seen.still:
            return f"nothing{whose} has moved for {seen.still:.0f} s"
        gone = [node for node in self._nodes() if not self.lead.fresh(node)]
        return f"the agent of {', '.join(gone)} cannot be asked" if gone else ""

    def _warning(self) -> str:
        odd = self._probe().get("odd")
        if not isinstance(odd, list) or len(odd) != 2:
            return ""
        return f"our own completion was answered with {odd[0]}: {odd[1]}" if odd[0] else f"no completion for us: {odd[1]}"

    def _all_parts(self) -> tuple[int | None, ...]:
        want, _ = self._both()
        return (None, *range(want.replicas)) if want.replicas > 1 else (None,)

    def _parts(self) -> Movement:
        return Movement(time.monotonic(), self._all_parts())

    def _meet_ranks(self, view: RayView) -> None:
        """Ask Ray which ranks the engine has, and where."""
        said = self.lead.report(self._both()[0].api_node, self.name) or {}
        pid = said.get("pid")
        if isinstance(pid, int):
            self._ranks = Background(lambda: view.ranks(pid))

    # --- what kills it

    def _judge(self) -> None:
        """Find out whether the engine is dead; several signs of one death are waited for."""
        found = self._signs()
        if not found and not self._troubles:
            return
        now = time.monotonic()
        if not self._troubles:
            self._suspected = now
        self._troubles = [*self._troubles, *(each for each in found if each not in self._troubles)]
        if not found:
            self._troubles = []  # it was none
        elif now - self._suspected >= _SETTLE:
            self._fail(max(self._troubles, key=lambda each: each.weight))

    def _signs(self) -> list[Trouble]:
        want, seen = self._both()
        found: list[Trouble] = []
        for number, process in enumerate(want.processes):
            said, node = self.lead.report(process.node, self.name), process.node
            rank = "" if len(want.processes) == 1 else str(number)
            boot = self.lead.boot_of(node)
            if said is None:
                found += self._absent(node, rank)
            elif said.get("last") == seen.generation:
                self._launched.setdefault(node, boot)
                if said.get("state") != RUNNING:
                    found.append(self._ended(number, rank, node, said))
            elif node in self._launched and self._launched[node] != boot:
                found.append(Trouble(5, f"the container of {node} was started anew", node, rank))
        for node, held in seen.ranks.items() if self._view is not None else ():
            self._launched.setdefault(node, self.lead.boot_of(node))
            if not self.lead.here(node):
                found += self._absent(node, " ".join(held))
            elif self._launched[node] not in ("", self.lead.boot_of(node)):
                found.append(Trouble(5, f"the container of {node} was started anew", node, " ".join(held)))
        probe = self._probe()
        odd = probe.get("odd")
        if seen.state == "ready" and (probe.get("health") == 503 or (odd and "EngineDead" in str(odd))):
            said = self.lead.report(want.api_node, self.name) or {}
            found.append(_of(Trouble(1, "the engine says that it is dead"), said))
        return found

    def _absent(self, node: str, rank: str) -> list[Trouble]:
        """A node that cannot be asked is gone when it had time to come back and the engine does no work without it."""
        why = self.lead.gone(node)
        if not why or self._movement.idle(time.monotonic()) < 3 * self._both()[0].policy.canary:
            return []
        return [Trouble(5, f"{node} is gone", node, rank, evidence=f"its agent: {why}")]

    def _ended(self, number: int, rank: str, node: str, said: Mapping[str, Any]) -> Trouble:
        """A killed process is nearer to the cause than one that ended by itself; the first one's own ends with any other."""
        how = str(said.get("ended") or "was stopped")
        weight = 4 if "killed" in how else 3 if number else 2
        of = f"vLLM's process on {node}" if rank else "vLLM"
        return _of(Trouble(weight, f"{of} {how}", node if rank else "", rank), said)

    def _fail(self, trouble: Trouble, *, at_once: bool = False) -> None:
        """End what is left of the engine, and write down why. `at_once`: it was no engine's doing, so no pause is due."""
        want, seen = self._both()
        now = self.clock()
        lasted = now - seen.ready_at if seen.ready_at is not None else 0.0
        ready = seen.state == "ready"
        if not at_once:
            seen.streak = 1 if ready and lasted >= _LASTED else seen.streak + 1
        put_off = 0.0 if at_once else health.pause(want.policy.pause, want.policy.longest_pause, seen.streak)
        fresh = time.monotonic() - self._fresh <= want.policy.canary + 2
        fault = Fault(
            at=now, what=trouble.what, cause=trouble.cause, node=trouble.node, rank=trouble.rank,
            evidence=trouble.evidence[:EVIDENCE], pause=put_off,
            lost=health.lost(self._well, self._counted, fresh) if ready else None,
        )  # fmt: skip
        seen.faults = [*seen.faults, fault][-FAULTS:]
        seen.fault_count += 1
        seen.next_start, seen.still, seen.asking, seen.warning, seen.load = now + put_off, 0.0, 0.0, "", None
        say(f"{self.name}: {fault.what}{f': {fault.cause}' if fault.cause else ''}; ending what is left of the engine")
        ranks = self._known_ranks()
        if self._view is not None and ranks and not fault.rank:
            view = self._view
            self._explain = Background(lambda: view.culprit(ranks, fault.evidence))
        self._phase, self._troubles, seen.ranks = "", [], {}
        self._set("stopping", "ending what is left of the engine")

    def _blame(self, culprit: Culprit | None) -> None:
        """Add to the last fault which rank on which node died first, where Ray knows it."""
        if culprit is not None:
            last = self._seen().faults[-1]
            last.node, last.rank = culprit.node, culprit.rank
            last.cause = last.cause or (f"a rank died: {culprit.evidence}" if culprit.evidence else "a rank died")[:LONGEST]
            last.evidence = "\n".join(each for each in (culprit.evidence, last.evidence) if each)[:EVIDENCE]

    # --- what is ordered

    def orders(self) -> dict[str, Order]:
        """Return what each node is to do for this server; a node that is not in it is to stop."""
        if self.want is None or self.seen is None or not self._phase:
            return {}
        want, seen = self.want, self.seen
        generation = seen.generation + (self._phase == PREPARE)
        ranks = self._known_ranks()
        found = {}
        for number, process in enumerate(want.processes):
            node = process.node
            chosen = (self._reserved.gpus(node) if self._reserved else None) or process.gpus
            env = dict(process.env)
            if chosen is not None and want.visible:
                env[want.visible] = ",".join(map(str, chosen))
            # A process that has run once is only kept: an agent whose container started anew must not start it alone.
            phase = KEEP if self._phase == RUN and node in self._launched else self._phase
            found[node] = Order(
                generation=generation, phase=phase, argv=process.argv, env=env, grace=want.policy.grace,
                api=(want.api_host, want.port) if number == 0 else None, replicas=want.replicas, canary=want.policy.canary,
                pids=tuple(each.pid for each in ranks if each.node == node and each.pid), share=self._share(node), gpus=chosen,
                busy=self._busy,
            )  # fmt: skip
        for node in want.places:
            if node not in found:
                pids = tuple(each.pid for each in ranks if each.node == node and each.pid)
                phase = PREPARE if self._phase == PREPARE else KEEP
                found[node] = Order(generation=generation, phase=phase, pids=pids, share=self._share(node), busy=self._busy)
        return found

    def _known_ranks(self) -> list[Rank]:
        """Return the ranks that Ray runs for the server, once it has said so."""
        return (self._ranks.value if self._ranks is not None and self._ranks.over else None) or []

    def _share(self, node: str) -> float | None:
        want, _ = self._both()
        return want.memory_share if want.places.get(node) else None

    def _release(self) -> None:
        """Begin to give reserved GPUs back to Ray."""
        if self._reserved is not None:
            self._freed = self._reserved.free()
            self._reserved = None

    def _released(self) -> bool:
        """True when Ray has reserved GPUs back, or does not answer."""
        self._release()
        return self._freed is None or self._freed.over or time.monotonic() - self._freed.began > _FREE

    # --- what is written down

    def _doing(self, what: str) -> None:
        seen = self._seen()
        if what != seen.doing:
            say(f"{self.name}: {what}")
            self._set(seen.state, what)

    def _set(self, to: str, doing: str = "") -> None:
        seen = self._seen()
        changed = to != seen.state
        if changed:
            seen.since = self.clock()
        seen.state, seen.doing = to, doing
        self._save(durable=changed)

    def _reached(self, phase: str) -> None:
        """Write down how many seconds after the last fault a part of the recovery was over: stopped, whole, or started."""
        seen = self._seen()
        last = seen.faults[-1] if seen.faults else None
        if last is not None and last.ready_again_after is None and phase not in last.phases:
            last.phases[phase] = round(self.clock() - last.at, 3)

    def _save(self, *, durable: bool = True) -> None:
        """Write the record. A disk that is full must not end the server: it is kept without one."""
        seen, want = self.seen, self.want
        if seen is None or want is None:
            return
        now = self.clock()
        seen.restarts = [each for each in seen.restarts if each >= now - want.policy.window]
        cap = want.policy.restarts
        seen.restarts_left = None if cap is None else max(0, cap - len(seen.restarts))
        seen.written, self._saved = now, time.monotonic()
        with contextlib.suppress(OSError):
            state.write(state.path(self.name, state.OBSERVED, self.folder), seen.as_json(), durable=durable)


class Reservation:
    """The GPUs that Ray sets aside for a server that runs outside of it; `doing` says what is waited for."""

    def __init__(self, want: Desired) -> None:
        self.want = want
        self.doing, self._found = "setting its GPUs aside in Ray", dict[str, list[int]]()
        self._asked: Background[tuple[int, str]] | None = None
        self._again, self.ready = 0.0, False

    def turn(self, runs: bool) -> None:
        """Ask Ray, and ask again when it had none: a head that restarted has forgotten."""
        now = time.monotonic()
        if self._asked is None:
            if not self.ready and now >= self._again:
                pairs = [f"{self.want.addresses[node]}={count}" for node, count in self.want.places.items() if count]
                self._asked = Background(lambda: _reserve("take", self.want.name, *pairs))
            return
        if not self._asked.over:
            return
        code, out = self._asked.value or (1, self._asked.error)
        self._asked, self._again = None, now + (_RESERVE if runs else _AGAIN)
        try:
            said = json.loads(out.strip().rpartition("\n")[2])
        except ValueError:
            said = {"error": out[-300:]}
        if code == 0 and isinstance(said.get("gpus"), dict):
            names = {ip: node for node, ip in self.want.addresses.items()}
            self._found = {names.get(ip, ip): [int(each) for each in found] for ip, found in said["gpus"].items()}
            self.ready = True
        else:
            self.doing = f"waiting for Ray to set its GPUs aside: {said.get('error', '')}"

    def gpus(self, node: str) -> tuple[int, ...] | None:
        """Return which GPUs of a node they are; None where the server has all."""
        return tuple(self._found[node]) if node in self._found else None

    def free(self) -> Background[tuple[int, str]]:
        """Begin to give them back."""
        name = self.want.name
        return Background(lambda: _reserve("free", name))


def _placed(want: Desired) -> dict[str, list[str]]:
    """Return what each node holds of a server whose processes vLLM numbers itself: whole replicas, or ranks in their order."""
    if want.replicas > 1:
        return {each.node: [f"DP{each.replicas[0] + i}" for i in range(each.replicas[1])] for each in want.processes}
    found, rank, world = dict[str, list[str]](), 0, sum(want.places.values())
    for each in want.processes:
        here = range(rank, rank + want.places.get(each.node, 0))
        rank = here.stop
        names = [
            (f"TP{r % want.tp}", f"PP{r // want.tp}")[want.tp == 1 :] if world > want.tp else (f"TP{r % want.tp}",)
            for r in here
        ]
        found[each.node] = [" ".join(each) for each in names] if world > 1 else ["the only rank"]
    return found


def _reserve(*words: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    return children.run((sys.executable, "-m", "vlaunch_agent.reserve", *words), 120.0, environment)


def _of(trouble: Trouble, said: Mapping[str, Any]) -> Trouble:
    """Add what a node's engine printed."""
    evidence, cause = said.get("evidence"), said.get("cause")
    return replace(
        trouble, evidence=evidence if isinstance(evidence, str) else "", cause=cause[:LONGEST] if isinstance(cause, str) else ""
    )
