"""Keeps one server as it is wanted: one state machine, which alone judges its health and alone
gives up. Standard library only.

    waiting → starting → ready → stopping → pausing → waiting …        and at the end: stopped,
    failed, gave-up

`turn` is called several times a second and never blocks: what takes its time runs in a thread or a
program of its own. What it wants of each node is in `orders`; what it knows comes from the agents'
reports (`crew.Lead`).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

from . import health, state
from .background import Background
from .cause import LONGEST
from .crew import Lead
from .desired import Desired
from .monitor import Clock, Monitor, Trouble
from .node import KEEP, PREPARE, RUN, Order
from .observed import EVIDENCE, FAULTS, OVER, Fault, Observed
from .process import IDLE, RUNNING
from .ray_view import Culprit, RayView
from .reservation import Reservation
from .wire import say

_SOON = 30.0  # seconds in which a start or an end is over, if nothing is amiss
# seconds in which several signs of one death are gathered, so that the nearest to its cause is told
_SETTLE = 1.0
_LASTED = 600.0  # seconds of being ready after which a fault is no part of a streak
# seconds of being ready after which a restart of the head's container is no engine's doing
_UNHURT = 60.0
# seconds for a node that cannot be asked to come back, before a server counts as stopped without it
_ABSENT = 30.0
_FREE = 20.0  # seconds for Ray to take reserved GPUs back
_AGAIN = 1.0  # seconds between two questions to Ray
_EXPLAIN = 15.0  # seconds for Ray to say whose death came first


class Keeper:
    """One name's server: what is wanted under that name, now or soon."""

    def __init__(self, name: str, folder: str, lead: Lead, clock: Clock = time) -> None:
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
        self._lacking: Background[str] | None = None
        self._explain: Background[Culprit | None] | None = None
        self._view: RayView | None = None
        self._reserved: Reservation | None = None
        self._saved = self._looked = 0.0
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
            self.seen.state, self.seen.doing = "stopped", ""
            with contextlib.suppress(OSError):
                state.write(state.path(self.name, state.OBSERVED, self.folder), self.seen.as_json())

    def _leave(self) -> None:
        """End what is not wanted any more, then turn to what is."""
        if self.want is not None and self.seen is not None:
            self._phase = ""
            if self._leaving is None:  # what is reported now is of before it was told
                self._leaving = self.clock.monotonic()
                self._set(
                    "stopping",
                    "it was stopped" if self.asked is None else "another server takes its place",
                )
                return
            launched = self._monitor.launched if self._monitor is not None else {}
            absent = [node for node in launched if not self.lead.here(node)]
            if (
                not self._gone()
                or (absent and self.clock.monotonic() - self._leaving < _ABSENT)
                or not self._released()
            ):
                return
            if self.asked is None:
                left = (
                    f"{', '.join(absent)} could not be asked: what runs there ends when it is back"
                    if absent
                    else ""
                )
                self._set("stopped", left)
                say(f"{self.name}: stopped {left}")
        self._leaving = None
        self.want = self.asked
        if self.want is not None:
            self._adopt(self.want)

    def _adopt(self, want: Desired) -> None:
        """Begin with a server: anew, or where the agent was when it ended, for its container or
        host may have restarted.
        """
        before = state.seen(self.name, self.folder)
        same = before is not None and (before.id, before.asked) == (want.id, want.asked)
        here = state.container()
        self._view = (
            RayView(want.ray, want.tp, want.addresses)
            if want.ray and want.backend == "ray"
            else None
        )
        self._reserved = Reservation(want) if want.ray and want.ray.reserve else None
        self._monitor, self._troubles, self._phase = None, [], ""
        if before is None or not same:
            generation = before.generation if before is not None else 0
            self.seen = Observed(
                name=want.name,
                id=want.id,
                asked=want.asked,
                model=want.model,
                generation=generation,
                container=here,
                since=self.clock.time(),
            )
            self._set("waiting", "looking at the nodes")
            return
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
        waits = [
            (node, said)
            for node, said in reports.items()
            if said.get("prepared") != seen.generation + 1
        ]
        if waits:
            said = [
                f"{node}: {report['waits']}"
                for node, report in waits
                if isinstance(report.get("waits"), str)
            ]
            return self._doing("; ".join(said) or "looking at the nodes")
        if (
            self._reserved is not None
            and want.ray is not None
            and want.ray.partial
            and not self._reserved.ready
        ):
            return self._doing(self._reserved.doing)
        return self._launch(want, seen)

    def _look_back(self, missing: list[str]) -> None:
        """Go on with an engine that has outlived the head's agent, if all of it does."""
        want, seen = self._both()
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

    def _lacks(self, view: RayView) -> str:
        """Return what Ray lacks for a start.

        Twice in a row nothing, after a death: what died may not have been noticed yet.
        """
        seen = self._seen()
        if self._lacking is None:
            if self.clock.monotonic() < self._looked:
                return seen.doing
            looks = 2 if seen.fault_count else 1
            self._lacking = Background(lambda: view.lacking(looks))
        if not self._lacking.over:
            return (
                seen.doing
                if seen.doing and "agent" not in seen.doing
                else "asking Ray for free GPUs"
            )
        lacking = (
            self._lacking.value
            if not self._lacking.error
            else "waiting for Ray's dashboard to answer"
        )
        if lacking:
            self._lacking, self._looked = None, self.clock.monotonic() + _AGAIN
        return lacking or ""

    def _launch(self, want: Desired, seen: Observed) -> None:
        self._reached("whole")
        seen.generation += 1
        self._phase, self._troubles, self._lacking = RUN, [], None
        self._began = self.clock.monotonic()
        self._observe(want)
        self._reached("started")
        self._set("starting", "starting the engine")
        say(f"{self.name}: starting the engine of {want.model} (generation {seen.generation})")

    def _observe(self, want: Desired) -> Monitor:
        if self._monitor is not None:
            self._monitor.over()
        self._monitor = Monitor(self.name, want, self.lead, self._view, self.clock)
        return self._monitor

    def _start(self) -> None:
        """Wait for the first answer.

        The first start of all has no deadline, whoever waits for it has; later ones have.
        """
        want, seen, monitor = *self._both(), self._engine()
        if monitor.hear(seen):
            took = self.clock.monotonic() - self._began
            seen.first_start = seen.first_start or round(took, 1)
            now = self.clock.time()
            for each in seen.faults:
                if each.ready_again_after is None:
                    each.ready_again_after = round(now - each.at, 3)
            seen.ready_at, seen.next_start = now, None
            self._set("ready")
            with contextlib.suppress(OSError):
                state.answered(want, now, self.folder)
            say(f"{self.name}: answers, {took:.1f} s after its start")
            monitor.meet(seen)
            self._save()
            return
        if seen.doing != "starting the engine" and not self._troubles:
            self._doing("starting the engine")
        late = self.clock.monotonic() - self._began
        limit = max(want.policy.start_timeout, 2 * (seen.first_start or 0.0))
        if seen.ready_at is not None and late > limit and want.policy.restarts != 0:
            self._fail(Trouble(0, f"no answer within {limit:.0f} s of a restart"))
        else:
            self._judge()

    def _watch(self) -> None:
        """Look whether the engine lives."""
        want, seen, monitor = *self._both(), self._engine()
        monitor.hear(seen)
        if monitor.meet(seen):
            self._save()
        self._judge()
        if seen.state != "ready":
            return
        still, part = monitor.still()
        whose = "" if part is None else f" of replica {part}"
        seen.still = round(still, 1) if still > 2 * want.policy.canary else 0.0
        rests, warning = monitor.rests(seen), monitor.warning(seen)
        if seen.still and rests:
            monitor.movement.moved(self.clock.monotonic(), *monitor.parts)
        elif still >= want.policy.stuck and want.policy.restarts != 0:
            nothing = "no answer, no counter, no line, no CPU or GPU time"
            self._fail(Trouble(1, f"nothing{whose} has moved for {still:.0f} s: {nothing}"))
            return
        note = self._note(whose, rests)
        if note != seen.doing or warning != seen.warning:
            seen.warning = warning
            self._set("ready", note)

    def _stop(self) -> None:
        """Wait until the engine has ended wherever somebody can be asked, then pause."""
        want, seen = self._both()
        self._phase = ""
        if not self._gone():
            return
        self._reached("stopped")
        if self._explain is not None:
            if not self._explain.over and self.clock.monotonic() - self._explain.began < _EXPLAIN:
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
            self._set(
                "gave-up",
                f"no restart is left of {want.policy.restarts}; the last fault:"
                f" {last.what if last else ''}",
            )
            say(f"{self.name}: GIVES UP: {seen.doing}. `vlaunch serve` starts it anew")
        else:
            self._set("pausing", "waiting before the next start")

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
        assert self._monitor is not None  # noqa: S101 - there is one for every engine that was started
        return self._monitor

    def _both(self) -> tuple[Desired, Observed]:
        assert self.want is not None and self.seen is not None  # noqa: S101 - `turn` has looked
        return self.want, self.seen

    def _seen(self) -> Observed:
        return self._both()[1]

    def _nodes(self) -> list[str]:
        """Return the nodes whose agents a start needs: those of the processes, then of the
        ranks.
        """
        want, _ = self._both()
        return list(dict.fromkeys((*(each.node for each in want.processes), *want.places)))

    def _gone(self) -> bool:
        """True when nothing of the engine runs, wherever somebody can be asked; who comes back
        later ends it then.
        """
        here = [node for node in self._nodes() if self.lead.here(node)]
        reports = [self.lead.report(node, self.name) or {} for node in here]
        return all(map(self.lead.settled, here)) and all(
            each.get("state", IDLE) == IDLE for each in reports
        )

    def _note(self, whose: str, rests: str) -> str:
        seen = self._seen()
        if rests:
            return f"{rests}: left alone"
        if seen.still:
            return f"nothing{whose} has moved for {seen.still:.0f} s"
        gone = [node for node in self._nodes() if not self.lead.fresh(node)]
        return f"the agent of {', '.join(gone)} cannot be asked" if gone else ""

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
        now = self.clock.time()
        lasted = now - seen.ready_at if seen.ready_at is not None else 0.0
        ready = seen.state == "ready"
        if not at_once:
            seen.streak = 1 if ready and lasted >= _LASTED else seen.streak + 1
        put_off = (
            0.0
            if at_once
            else health.pause(want.policy.pause, want.policy.longest_pause, seen.streak)
        )
        fault = Fault(
            at=now,
            what=trouble.what,
            cause=trouble.cause,
            node=trouble.node,
            rank=trouble.rank,
            evidence=trouble.evidence[:EVIDENCE],
            pause=put_off,
            lost=self._monitor.lost() if ready and self._monitor is not None else None,
        )
        seen.faults = [*seen.faults, fault][-FAULTS:]
        seen.fault_count += 1
        seen.next_start, seen.still, seen.asking, seen.warning, seen.load = (
            now + put_off,
            0.0,
            0.0,
            "",
            None,
        )
        say(
            f"{self.name}: {fault.what}{f': {fault.cause}' if fault.cause else ''}; ending what is"
            " left of the engine"
        )
        ranks = self._monitor.ranks if self._monitor is not None else []
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
            last.cause = (
                last.cause
                or (f"a rank died: {culprit.evidence}" if culprit.evidence else "a rank died")[
                    :LONGEST
                ]
            )
            last.evidence = "\n".join(each for each in (culprit.evidence, last.evidence) if each)[
                :EVIDENCE
            ]

    # --- what is ordered

    def orders(self) -> dict[str, Order]:
        """Return what each node is to do for this server; a node that is not in it is to stop."""
        if self.want is None or self.seen is None or not self._phase:
            return {}
        want, seen = self.want, self.seen
        generation = seen.generation + (self._phase == PREPARE)
        ranks = self._monitor.ranks if self._monitor is not None else []
        launched = (
            self._monitor.launched if self._monitor is not None and self._phase == RUN else {}
        )
        busy = self._monitor is not None and self._monitor.busy
        found = {}
        for number, process in enumerate(want.processes):
            node = process.node
            chosen = (self._reserved.gpus(node) if self._reserved else None) or process.gpus
            env = dict(process.env)
            if chosen is not None and want.visible:
                env[want.visible] = ",".join(map(str, chosen))
            # A process that has run once is only kept: an agent whose container started anew must
            # not start it alone.
            phase = KEEP if node in launched else self._phase
            found[node] = Order(
                generation=generation,
                phase=phase,
                argv=process.argv,
                env=env,
                grace=want.policy.grace,
                api=(want.api_host, want.port) if number == 0 else None,
                replicas=want.replicas,
                canary=want.policy.canary,
                pids=tuple(each.pid for each in ranks if each.node == node and each.pid),
                share=self._share(node),
                gpus=chosen,
                busy=busy,
            )
        for node in want.places:
            if node not in found:
                pids = tuple(each.pid for each in ranks if each.node == node and each.pid)
                phase = PREPARE if self._phase == PREPARE else KEEP
                found[node] = Order(
                    generation=generation,
                    phase=phase,
                    pids=pids,
                    share=self._share(node),
                    busy=busy,
                )
        return found

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

    def _reached(self, phase: str) -> None:
        """Write down how many seconds after the last fault a part of the recovery was over:
        stopped, whole, or started.
        """
        seen = self._seen()
        last = seen.faults[-1] if seen.faults else None
        if last is not None and last.ready_again_after is None and phase not in last.phases:
            last.phases[phase] = round(self.clock.time() - last.at, 3)

    def _save(self, *, durable: bool = True) -> None:
        """Write the record. A disk that is full must not end the server: it is kept without one."""
        seen, want = self.seen, self.want
        if seen is None or want is None:
            return
        now = self.clock.time()
        seen.restarts = [each for each in seen.restarts if each >= now - want.policy.window]
        cap = want.policy.restarts
        seen.restarts_left = None if cap is None else max(0, cap - len(seen.restarts))
        seen.written, self._saved = now, self.clock.monotonic()
        with contextlib.suppress(OSError):
            state.write(
                state.path(self.name, state.OBSERVED, self.folder), seen.as_json(), durable=durable
            )
