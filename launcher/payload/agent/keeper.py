"""Keeps one server as it is wanted: one state machine, which alone judges its health and alone
gives up. Standard library only.

    waiting → starting → ready → stopping → pausing → waiting …        and at the end: stopped,
    failed, gave-up

`turn` is called several times a second and never blocks: what takes its time runs in a thread or a
program of its own. What it knows comes from the agents' reports (`crew.Lead`). `needs.py` says what
a start waits for, `orders.py` what each node is to do, `faults.py` what is kept of each death.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

from . import faults, health, orders, state
from .background import Background
from .crew import Lead
from .desired import Desired
from .faults import Trouble
from .health import Clock
from .log import say
from .monitor import Monitor
from .needs import Needs
from .node import KEEP, PREPARE, RUN, Order
from .observed import OVER, EndpointHealth, Fault, Observed
from .process import IDLE, RUNNING
from .ray_view import Culprit, RayView
from .reservation import Reservation

_SOON = 30.0  # seconds in which a start or an end is over, if nothing is amiss
# seconds in which several signs of one death are gathered, so that the nearest to its cause is told
_SETTLE = 1.0
_LASTED = 600.0  # seconds of being ready after which a fault is no part of a streak
# seconds of being ready after which a restart of the head's container is no engine's doing
_UNHURT = 60.0
# seconds for a node that cannot be asked to come back, before a server counts as stopped without it
_ABSENT = 30.0
_FREE = 20.0  # seconds for Ray to take reserved GPUs back
_EXPLAIN = 15.0  # seconds for Ray to say whose death came first
_STARTS = "starting the engine"  # what it does until the first answer


class Keeper:
    """One name's server: what is wanted under that name, now or soon."""

    def __init__(
        self,
        name: str,
        folder: str,
        lead: Lead,
        clock: Clock = time,
    ) -> None:
        self.name, self.folder, self.lead, self.clock = name, folder, lead, clock
        self.asked: Desired | None = None  # what the file says
        # what is kept; another one than asked for only until the engine has ended
        self.want: Desired | None = None
        self.seen: Observed | None = None
        self._file: object = ()
        self._phase = ""  # of the orders; empty: nothing should run
        self._monitor: Monitor | None = None  # of the engine that runs, or did last
        self._began = self._suspected = 0.0
        self._troubles: list[Trouble] = []
        self._needs = Needs(name, lead, clock)
        self._explain: Background[Culprit | None] | None = None
        self._view: RayView | None = None
        self._reserved: Reservation | None = None
        self._known: object = None  # what it holds and its longest step, as they were written down
        self._saved = 0.0
        self._leaving: float | None = None
        self._freed: Background[tuple[int, str]] | None = None

    @property
    def changing(self) -> bool:
        """True while a server is about to be started or ended, unless it waits for something that
        takes longer.
        """
        seen = self.seen
        moving = self.want != self.asked or (
            seen is not None and seen.state in ("waiting", "stopping")
        )
        return moving and (seen is None or self.clock.time() - seen.since < _SOON)

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
            "waiting": self._wait,
            "starting": self._start,
            "ready": self._watch,
            "stopping": self._stop,
            "pausing": self._pause,
        }.get(self.seen.state, self._rest)()
        if self._reserved is not None:
            self._reserved.turn(self.clock.monotonic(), self.lead.ray, runs=self._phase == RUN)
        if self.clock.monotonic() - self._saved >= self.want.policy.canary:
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
            say(f"{self.name}: {path} cannot be read, and changes nothing: {error}")

    def _close(self) -> None:
        """Write down that a server is over that somebody stopped while no agent was here."""
        self.seen = state.seen(self.name, self.folder)
        if self.seen is not None and self.seen.state not in OVER:
            self.seen.state, self.seen.verdict = "stopped", "stopped"
            self.seen.doing = self.seen.reason = ""
            self.seen.endpoints, self.seen.wedge = {}, None
            with contextlib.suppress(OSError):
                state.write(state.path(self.name, state.OBSERVED, self.folder), self.seen.as_json())

    def _leave(self) -> None:
        """End what is not wanted any more, then turn to what is."""
        if self.want is not None and self.seen is not None and not self._ended():
            return
        self._leaving = None
        self.want = self.asked
        if self.want is not None:
            self._adopt(self.want)

    def _ended(self) -> bool:
        """True when what is not wanted any more has ended, wherever somebody could be asked in
        time.
        """
        self._phase = ""
        if self._leaving is None:  # what is reported now is of before it was told
            self._leaving = self.clock.monotonic()
            self._set(
                "stopping",
                "it was stopped" if self.asked is None else "another server takes its place",
            )
            return False
        absent = self._absent()
        awaited = absent and self.clock.monotonic() - self._leaving < _ABSENT
        if not self._gone() or awaited or not self._released():
            return False
        if self.asked is None:
            self._stopped(absent)
        return True

    def _absent(self) -> list[str]:
        """Return the nodes where the engine ran and that cannot be asked now."""
        launched = self._monitor.launched if self._monitor is not None else {}
        return [node for node in launched if not self.lead.here(node)]

    def _stopped(self, absent: list[str]) -> None:
        """Write down that nobody wants it any more; `absent` are nodes that were not asked."""
        left = (
            f"{', '.join(absent)} could not be asked: what runs there ends when it is back"
            if absent
            else ""
        )
        self._set("stopped", left)
        say(f"{self.name}: stopped {left}")

    def _adopt(self, want: Desired) -> None:
        """Begin with a server: anew, or where the agent was when it ended, for its container or
        host may have restarted.
        """
        before = state.seen(self.name, self.folder)
        here = state.container()
        ray = want.ray
        self._view = (
            RayView(ray, want.tp, want.addresses) if ray and want.backend == "ray" else None
        )
        self._reserved = Reservation(want) if ray and ray.reserve else None
        self._monitor, self._troubles, self._phase = None, [], ""
        self._needs.forget()
        if before is not None and (before.id, before.asked) == (want.id, want.asked):
            self._resume(want, before, here)
            return
        self.seen = Observed(
            name=want.name,
            id=want.id,
            asked=want.asked,
            model=want.model,
            generation=before.generation if before is not None else 0,
            container=here,
            since=self.clock.time(),
            longest_step=state.longest_step(want.name, want.id, self.folder),
        )
        self._set("waiting", "looking at the nodes")

    def _resume(self, want: Desired, before: Observed, here: str) -> None:
        """Go on where the agent was when it ended; `here` is the container that it runs in now."""
        replaced = bool(here and before.container) and here != before.container
        self.seen = replace(before, container=here)
        if before.state in ("starting", "ready"):
            self._phase, self._began = KEEP, self.clock.monotonic()
            # it has ended with this container
            if any(each.node == self.lead.name for each in want.processes):
                self._lose(before, replaced=replaced)
            else:
                self._set("waiting", "looking for the engine that ran before")
        elif before.state in ("stopping", "waiting", "pausing"):
            self._set("stopping", "ending what is left of the engine")

    def _lose(self, before: Observed, *, replaced: bool) -> None:
        """Take up a server whose engine ended with the head's container; what somebody has done on
        purpose is no fault.
        """
        self._phase = ""
        if replaced or before.ready_at is None:
            self._set(
                "stopping",
                (
                    "the head's container was replaced"
                    if replaced
                    else "the head's container was restarted"
                ),
            )
        else:
            lasted = before.written - before.ready_at >= _UNHURT
            self._fail(
                Trouble(9, "the head's container was restarted", node=self.lead.name),
                at_once=lasted,
            )

    def _wait(self) -> None:
        """Start when all is there that the engine needs."""
        want, seen = self._both()
        if self._phase == KEEP:
            self._look_back()
            return
        seen.generation = max(seen.generation, self._needs.latest(want))
        self._phase = PREPARE
        if lacking := self._needs.lacking(want, seen, self._view, self._reserved):
            self._doing(lacking)
        else:
            self._launch(want, seen)

    def _look_back(self) -> None:
        """Go on with an engine that has outlived the head's agent, if all of it does."""
        want, seen = self._both()
        # Whoever has just connected has not reported yet, and may well run it.
        missing = [node for node in want.nodes if not self.lead.settled(node)]
        reports = [self.lead.report(each.node, self.name) or {} for each in want.processes]
        alive = [
            each.get("state") == RUNNING and each.get("last") == seen.generation for each in reports
        ]
        if all(alive):
            say(f"{self.name}: its engine has gone on meanwhile")
            self._observe(want).adopt()
            self._set("starting" if seen.ready_at is None else "ready")
        elif not missing:
            self._lose(seen, replaced=False)
        else:  # what cannot be asked is unknown: it may well be serving
            self._doing(
                f"looking for the engine that ran before: {', '.join(missing)} cannot be asked yet"
            )

    def _launch(self, want: Desired, seen: Observed) -> None:
        faults.reached(seen, "whole", self.clock.time())
        seen.generation += 1
        # another model may be behind it, or another vLLM
        seen.task, seen.first_answer = "", {}
        self._phase, self._troubles = RUN, []
        self._needs.forget()
        self._began = self.clock.monotonic()
        self._observe(want)
        faults.reached(seen, "started", self.clock.time())
        self._set("starting", _STARTS)
        say(f"{self.name}: starting the engine of {want.model} (generation {seen.generation})")

    def _observe(self, want: Desired) -> Monitor:
        if self._monitor is not None:
            self._monitor.apis.over()
        self._monitor = Monitor(self.name, want, self.lead, self._view, self.clock)
        return self._monitor

    def _start(self) -> None:
        """Wait for the first answer.

        The first start of all has no deadline, whoever waits for it has; others have.
        """
        want, seen, monitor = *self._both(), self._engine()
        if monitor.hear(seen):
            self._answered()
            return
        if seen.doing != _STARTS and not self._troubles:
            self._doing(_STARTS)
        late = self.clock.monotonic() - self._began
        limit = max(want.policy.start_timeout, 2 * (seen.first_start or 0.0))
        if not self._first(seen) and late > limit and want.policy.restarts != 0:
            start = "start" if seen.ready_at is None else "restart"
            self._fail(Trouble(0, f"no answer within {limit:.0f} s of a {start}"))
        else:
            self._judge()

    def _first(self, seen: Observed) -> bool:
        """True for a start that somebody waits for: a mistake of theirs would stay one."""
        return seen.ready_at is None

    def _answered(self) -> None:
        """Note that the engine has given its first answer."""
        want, seen = self._both()
        took, now = self.clock.monotonic() - self._began, self.clock.time()
        seen.first_start = seen.first_start or round(took, 1)
        faults.over(seen, now)
        seen.ready_at, seen.next_start = now, None
        self._set("ready")
        self._note_answered(want, now)
        say(f"{self.name}: answers, {took:.1f} s after its start")
        self._engine().hear(seen)  # now as one that is ready
        self._engine().meet(seen)
        self._judge_health()
        self._save()

    def _note_answered(self, want: Desired, at: float) -> None:
        """Write down what has answered, for `vlaunch rollback`, what it holds, for `vlaunch plan`,
        and its longest step.
        """
        seen, held = self._seen(), self._engine().apis.held
        self._known = held, round(seen.longest_step)
        with contextlib.suppress(OSError):
            state.answered(want, at, self.folder, held=held, longest_step=seen.longest_step)

    def _watch(self) -> None:
        """Look whether the engine lives."""
        (want, seen), monitor = self._both(), self._engine()
        before = seen.verdict, seen.warning
        monitor.hear(seen)
        known = monitor.apis.held, round(seen.longest_step)
        if known != self._known and seen.ready_at is not None:
            self._note_answered(want, seen.ready_at)
        if monitor.meet(seen):
            self._save()
        self._judge()
        if seen.state == "ready":
            self._judge_health()
            if (seen.verdict, seen.warning) != before:
                self._save(durable=False)

    def _judge_health(self) -> None:
        """Judge a server that is ready; end it when it has hung for too long."""
        want, seen, monitor = *self._both(), self._engine()
        waits, stall = monitor.apis.waits(), monitor.stall
        hangs = stall.verdict == "suspect" and stall.seconds >= want.policy.stuck
        if hangs and want.policy.restarts != 0:
            self._fail(Trouble(1, "it was ended"))
            return
        seen.still = round(max((each.seconds for each in waits), default=0.0), 1)
        seen.wedge = stall.wedge if stall.verdict else None
        seen.verdict, seen.reason = health.together(seen.endpoints)
        if stall.verdict:
            seen.verdict, seen.reason = stall.verdict, stall.reason
            hung = EndpointHealth(verdict=stall.verdict, reason=stall.reason)
            quiet = (each for each in waits if health.quiet(each.seconds, seen.longest_step))
            seen.endpoints |= {each.node: hung for each in quiet}
        gone = [node for node in want.nodes if not self.lead.fresh(node)]
        away = f"the agent of {', '.join(gone)} cannot be asked" if gone else ""
        seen.warning = "; ".join(filter(None, (monitor.apis.warning(seen), away)))

    def _stop(self) -> None:
        """Wait until the engine has ended wherever somebody can be asked, then pause."""
        want, seen = self._both()
        self._phase = ""
        if not self._gone():
            return
        faults.reached(seen, "stopped", self.clock.time())
        if not self._explained():
            return
        last = seen.last_fault
        if seen.next_start is None:
            self._set("waiting", "looking at the nodes")
        elif self._first(seen) or want.policy.restarts == 0:
            why = last.summary if last else "it ended"
            self._give_up("failed", f"it never answered: {why}" if seen.ready_at is None else why)
            say(f"{self.name}: FAILED: {seen.doing}")
        elif seen.restarts_left == 0:
            why = last.what if last else ""
            self._give_up(
                "gave-up", f"no restart is left of {want.policy.restarts}; the last fault: {why}"
            )
            say(f"{self.name}: GIVES UP: {seen.doing}. `vlaunch serve` starts it anew")
        else:
            self._set("pausing", "waiting before the next start")

    def _explained(self) -> bool:
        """True when Ray has said which rank died first, where it was asked, or takes too long."""
        explain = self._explain
        if explain is None:
            return True
        if not explain.over and self.clock.monotonic() - explain.began < _EXPLAIN:
            return False
        if explain.value is not None:
            faults.blame(self._seen().faults[-1], explain.value)
        self._explain = None
        return True

    def _give_up(self, to: str, why: str) -> None:
        """Start no more: it has failed or has given up, until somebody asks anew."""
        self._seen().next_start = None
        self._release()
        self._set(to, why)

    def _pause(self) -> None:
        """Wait, longer each time that a start did not last: what kills an engine may still be
        there.
        """
        seen = self._seen()
        if seen.next_start is None or self.clock.time() >= seen.next_start:
            seen.restarts.append(self.clock.time())
            seen.next_start = None
            self._set("waiting", "looking at the nodes")

    def _rest(self) -> None:
        """Do nothing: it failed or has given up, until somebody asks anew."""
        self._phase = ""

    # --- what is known

    def _engine(self) -> Monitor:
        # there is one for every engine that was started
        assert self._monitor is not None  # noqa: S101
        return self._monitor

    def _both(self) -> tuple[Desired, Observed]:
        assert self.want is not None and self.seen is not None  # noqa: S101 - `turn` has looked
        return self.want, self.seen

    def _seen(self) -> Observed:
        return self._both()[1]

    def _gone(self) -> bool:
        """True when nothing of the engine runs, wherever somebody can be asked; who comes back
        later ends it then.
        """
        want, _ = self._both()
        here = [node for node in want.reach if self.lead.here(node)]
        reports = [self.lead.report(node, self.name) or {} for node in here]
        return all(map(self.lead.settled, here)) and all(
            each.get("state", IDLE) == IDLE for each in reports
        )

    # --- what kills it

    def _judge(self) -> None:
        """Find out whether the engine is dead; several signs of one death are waited for."""
        found = self._engine().signs(self._seen())
        if not found and not self._troubles:
            return
        now = self.clock.monotonic()
        if not self._troubles:
            self._suspected = now
        self._troubles = [*self._troubles, *(each for each in found if each not in self._troubles)]
        if not found:
            self._troubles = []  # it was none
        elif now - self._suspected >= _SETTLE:
            self._fail(max(self._troubles, key=lambda each: each.weight))

    def _fail(self, trouble: Trouble, *, at_once: bool = False) -> None:
        """End what is left of the engine, and write down why.

        `at_once`: it was no engine's doing, so no pause is due.
        """
        want, seen = self._both()
        now, pause = self.clock.time(), 0.0
        ready = seen.state == "ready"
        if not at_once:
            lasted = now - seen.ready_at if ready and seen.ready_at is not None else 0.0
            seen.streak = 1 if lasted >= _LASTED else seen.streak + 1
            pause = health.pause(want.policy.pause, want.policy.longest_pause, seen.streak)
        lost, sign = None, trouble
        if ready and self._monitor is not None:
            trouble = self._monitor.stall.judge(sign)
            # vLLM counts requests when a step ends: what came in a hang is not among them
            lost = self._monitor.apis.lost() if trouble is sign else None
        fault = faults.add(seen, trouble, at=now, pause=pause, lost=lost)
        seen.next_start = now + pause
        seen.still, seen.asking, seen.warning, seen.load = 0.0, 0.0, "", None
        say(f"{self.name}: {fault.summary}; ending what is left of the engine")
        if trouble is sign:
            self._ask_who_died_first(fault)
        self._phase, self._troubles, seen.ranks = "", [], {}
        self._set("stopping", "ending what is left of the engine")

    def _ask_who_died_first(self, fault: Fault) -> None:
        """Begin to ask Ray, where nothing else has told the rank."""
        view, ranks = self._view, self._monitor.ranks if self._monitor is not None else []
        if view is not None and ranks and not fault.rank:
            self._explain = Background(lambda: view.culprit(ranks, fault.evidence))

    # --- what is ordered

    def orders(self) -> dict[str, Order]:
        """Return what each node is to do for this server; a node that is not in it is to stop."""
        if self.want is None or self.seen is None or not self._phase:
            return {}
        generation = self.seen.generation + (self._phase == PREPARE)
        return orders.for_nodes(self.want, self._phase, generation, self._monitor, self._reserved)

    def _release(self) -> None:
        """Begin to give reserved GPUs back to Ray."""
        if self._reserved is not None:
            self._freed = self._reserved.free()
            self._reserved = None

    def _released(self) -> bool:
        """True when Ray has reserved GPUs back, or does not answer."""
        self._release()
        return (
            self._freed is None
            or self._freed.over
            or self.clock.monotonic() - self._freed.began > _FREE
        )

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
            seen.since = self.clock.time()
        seen.state, seen.doing = to, doing
        self._save(durable=changed)

    def _save(self, *, durable: bool = True) -> None:
        """Write the record. A disk that is full must not end the server: it is kept without one."""
        seen, want = self.seen, self.want
        if seen is None or want is None:
            return
        now = self.clock.time()
        seen.restarts = [each for each in seen.restarts if each >= now - want.policy.window]
        cap = want.policy.restarts
        seen.restarts_left = None if cap is None else max(0, cap - len(seen.restarts))
        runs = self._monitor if seen.state in ("starting", "ready") else None
        seen.alive = runs.living(seen) if runs is not None else {}
        if seen.state != "ready":
            leaves = want != self.asked and seen.state not in OVER
            seen.verdict = "stopping" if leaves else health.verdict(seen.state, seen.fault_count)
            seen.reason, seen.endpoints, seen.wedge = seen.doing, {}, None
        seen.written, self._saved = now, self.clock.monotonic()
        with contextlib.suppress(OSError):
            state.write(
                state.path(self.name, state.OBSERVED, self.folder), seen.as_json(), durable=durable
            )
