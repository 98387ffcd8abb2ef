"""Supervisor of one server name: the only part that judges the server's health, restarts it, and
gives up.

    waiting → starting → ready → stopping → pausing → waiting …
    Final states: stopped, failed, gave-up.

`tick` runs several times a second and never blocks: slow work runs in a thread or a program of its
own. All facts come from the agents' reports (`leader.Leader`). `start_conditions.py` has the
conditions of a start, `orders.py` the orders for the nodes, `faults.py` the record of deaths.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

from .. import state
from ..background import Background
from ..desired import Desired
from ..front import rotation
from ..health import verdicts
from ..health.verdicts import Clock
from ..link.leader import Leader
from ..log import say
from ..observed import OVER, EndpointHealth, Observed
from ..processes.node import KEEP, PREPARE, RUN, Order
from ..processes.process import IDLE, RUNNING
from ..processes.ray_view import Culprit, RayView
from . import faults, orders
from .faults import DeathSign
from .monitor import Monitor
from .reservation import Reservation
from .start_conditions import StartConditions

_CHANGING_SECONDS = 30.0  # for which the agent's main loop runs faster after a change
# to gather several signs of one death: the one nearest to the cause is recorded
_GATHER_SECONDS = 1.0
_STREAK_SECONDS = 600.0  # of being ready after which a fault starts a new streak
# of being ready after which a restart of the head's container is not the engine's doing
_STABLE_SECONDS = 60.0
# for an unreachable node to reconnect, before a server counts as stopped without it
_RECONNECT_SECONDS = 30.0
_CULPRIT_SECONDS = 15.0  # for Ray to name the rank that died first
_STARTING, _CHECKING = "starting the engine", "checking the nodes"  # activities in the status
_STOPPING = "stopping the rest of the engine"


class Supervisor:
    """Supervisor of one name: runs the server of its spec, after the previous one stopped."""

    def __init__(self, name: str, folder: str, lead: Leader, clock: Clock = time) -> None:
        self.name, self.folder, self.lead, self.clock = name, folder, lead, clock
        self.spec: Desired | None = None  # the spec on disk
        self.server: ServerRun | None = None  # of the spec that runs, or still stops
        # True if the spec on disk is unreadable and no earlier one is known: running engines are
        # left alone until the spec is readable or removed.
        self.unreadable = False
        # a server that drains since an earlier agent, and has another spec than that on disk
        self._previous: Observed | None = None
        self._file: object = ()

    @property
    def status(self) -> Observed | None:
        """Status of the server; None if none is supervised."""
        return self.server.status if self.server is not None else self._previous

    @property
    def leaves_alone(self) -> bool:
        """True if running engines get no orders, and are not stopped either."""
        return self.unreadable or self._previous is not None

    @property
    def changing(self) -> bool:
        """True while a server is about to start or stop, unless it waits for something slower."""
        server = self.server
        return (
            server is not None
            and (server.spec != self.spec or server.status.state in ("waiting", "stopping"))
            and 0 <= self.clock.time() - server.status.since < _CHANGING_SECONDS
        )

    def tick(self) -> None:
        """Run one round of the state machine."""
        first, server = self._file == (), self.server
        self._load_spec()
        if first:
            self._previous = self._read_draining()
        if self._previous is not None:
            self._update_drain(self._previous)
            return
        if server is not None and server.spec == self.spec:
            server.tick()
        elif server is None or server.stop(replaced=self.spec is not None):
            self.server = None
            if self.spec is not None:
                self.server = ServerRun(self.name, self.spec, self.folder, self.lead, self.clock)
            elif first and not self.unreadable:
                self._record_stopped()

    def orders(self) -> dict[str, Order]:
        """Return the orders of all nodes for this server; a node without one stops it."""
        return self.server.orders() if self.server is not None else {}

    def _load_spec(self) -> None:
        """Load the spec if its file has changed."""
        path = state.server_file(self.name, state.DESIRED, self.folder)
        try:
            file = os.stat(path)
            mark: object = (file.st_mtime_ns, file.st_ino, file.st_size)
        except OSError:
            mark = None
        if mark == self._file:
            return
        self._file = mark
        try:
            self.spec = state.read_spec(self.name, self.folder) if mark else None
            self.unreadable = False
        except ValueError as error:
            self.unreadable = self.server is None
            say(
                f"{self.name}: unreadable {path}, probably of another version of vlaunch: {error};"
                " its engines are left alone"
            )

    def _read_draining(self) -> Observed | None:
        """Return the status of a server that drains, and has another spec than that on disk."""
        status, spec = state.read_status(self.name, self.folder), self.spec
        is_same = status and spec and (status.id, status.asked) == (spec.id, spec.asked)
        return status if status and status.draining and not is_same else None

    def _update_drain(self, status: Observed) -> None:
        """Wait for the requests of a server whose drain an earlier agent began."""
        now = self.clock.monotonic()
        if status.draining is not None:
            status.draining = rotation.update_drain(status.draining, self.name, self.lead, now)
        if status.draining is None:
            self._previous = None
            if self.spec is None:
                self._record_stopped()

    def _record_stopped(self) -> None:
        """Record the end of a server that was stopped while no agent ran."""
        status = state.read_status(self.name, self.folder)
        if status is not None and status.state not in OVER:
            status.state, status.verdict = "stopped", "stopped"
            status.doing = status.reason = ""
            status.endpoints, status.wedge, status.draining = {}, None, None
            with contextlib.suppress(OSError):
                state.write_json(
                    state.server_file(self.name, state.OBSERVED, self.folder), status.as_json()
                )


class ServerRun:
    """Run of one spec of a server, from its first wait until another spec replaces it; resumes from
    the record after a restart of the agent's container or host.
    """

    def __init__(self, name: str, spec: Desired, folder: str, lead: Leader, clock: Clock) -> None:
        self.name, self.spec, self.folder = name, spec, folder
        self.lead, self.clock = lead, clock
        self.monitor: Monitor | None = None  # of the engine that runs, or did last
        self._began, self._suspected, self._saved = clock.monotonic(), 0.0, 0.0
        self._signs: list[DeathSign] = []
        self._needs = StartConditions(name, lead, clock)
        self._explain: Background[Culprit | None] | None = None
        self._history_facts: object = None  # the capacity and the longest step in the history
        self._pause_end: float | None = None  # None: follows from the record
        self._stopping: float | None = None  # when the stop for good, or for a new spec, began
        ray = spec.ray
        in_ray = ray is not None and spec.backend == "ray"
        self._view = RayView(ray, spec.tp, spec.addresses) if ray and in_ray else None
        self._reserved = Reservation(spec) if ray and ray.reserve else None
        before, container = state.read_status(name, folder), state.container_id()
        if before is not None and (before.id, before.asked) == (spec.id, spec.asked):
            self.status = replace(before, container=container)
            self._resume(replaced=bool(container and before.container not in ("", container)))
            return
        self.status = Observed(
            name=spec.name,
            id=spec.id,
            asked=spec.asked,
            model=spec.model,
            generation=before.generation if before is not None else 0,
            container=container,
            since=clock.time(),
            longest_step=state.longest_step(spec.name, spec.id, folder),
        )
        self._set_state("waiting", _CHECKING)

    def tick(self) -> None:
        """Act on the current state."""
        self._stopping = None
        if self.status.draining is not None:  # its spec is back
            self.status.draining = None
            self._set_state(self.status.state)
        match self.status.state:
            case "waiting" if self.status.resumes:
                self._adopt_engine()
            case "waiting":
                self._await_nodes()
            case "starting":
                self._await_first_answer()
            case "ready":
                self._check_engine()
            case "stopping":
                self._await_end()
            case "pausing":
                self._pause()
        now = self.clock.monotonic()
        if self._reserved is not None:
            runs = self.status.state in ("starting", "ready")
            self._reserved.tick(now, self.lead.ray, runs=runs)
        if now - self._saved >= self.spec.policy.canary:
            self._save(durable=False)  # a sign of life of the supervisor

    # --- the end of a spec, and the start of this agent

    def stop(self, *, replaced: bool) -> bool:
        """Stop for good, or for a replacement; True once nothing runs on a reachable node.

        A server that answers is drained first.
        """
        now = self.clock.monotonic()
        if self._stopping is None and self._drain():
            return False
        if self._stopping is None:  # the last reports were sent before this order
            self._stopping = now
            self._set_state(
                "stopping", "another server replaces it" if replaced else "it was stopped"
            )
            return False
        launched = self.monitor.launched if self.monitor is not None else {}
        absent = [node for node in launched if not self.lead.is_connected(node)]
        if not self._is_gone() or (absent and now - self._stopping < _RECONNECT_SECONDS):
            return False
        if self._reserved is not None and not self._reserved.release():
            return False
        if not replaced:
            nodes = ", ".join(absent)
            remark = f"{nodes} did not answer: processes there stop on reconnection"
            self._set_state("stopped", remark if absent else "")
            say(f"{self.name}: stopped {self.status.doing}")
        return True

    def _drain(self) -> bool:
        """Take the server out of rotation; True while a front has a request in progress on it."""
        status, before, now = self.status, self.status.draining, self.clock.monotonic()
        if before is not None:
            status.draining = rotation.update_drain(before, self.name, self.lead, now)
        elif "ready" in (status.state, status.resumes):
            limit = self.spec.policy.drain
            status.draining = rotation.begin_drain(self.name, self.lead, limit, now)
        if (drain := status.draining) is None:
            if before is not None:
                cut = f"; still {before.text}" if now - before.since >= before.limit else ""
                say(f"{self.name}: drained for {now - before.since:.1f} s{cut}")
            return False
        if drain.text != status.doing:
            self._set_state(status.state, drain.text)
        elif self.clock.monotonic() - self._saved >= self.spec.policy.canary:
            self._save(durable=False)
        return True

    def _resume(self, *, replaced: bool) -> None:
        """Resume after a restart of the agent; `replaced` means that the container is a new one."""
        before = self.status.resumes or self.status.state
        if before in ("stopping", "waiting", "pausing"):
            self._set_state("stopping", _STOPPING)
        elif before in ("starting", "ready"):
            # a process on this node has ended with its container
            if any(process.node == self.lead.name for process in self.spec.processes):
                self._record_lost(replaced=replaced)
            else:
                self.status.resumes = before
                self._set_state("waiting", "looking for the previous engine")

    def _adopt_engine(self) -> None:
        """Adopt an engine that has outlived the head's agent, if all of its processes have."""
        spec, status = self.spec, self.status
        # An agent that has just connected has not reported yet, and may well run it.
        missing = [node for node in spec.nodes if not self.lead.orders_done(node)]
        reports = [self.lead.report(process.node, self.name) for process in spec.processes]
        if all(report.state == RUNNING and report.last == status.generation for report in reports):
            say(f"{self.name}: its engine is still running")
            self._observe().adopt()
            self._set_state(status.resumes, _STARTING if status.resumes == "starting" else "")
        elif not missing:
            self._record_lost(replaced=False)
        else:  # an unreachable node is unknown: it may well be serving
            nodes = ", ".join(missing)
            self._note_activity(f"looking for the previous engine: no answer from {nodes} yet")

    def _record_lost(self, *, replaced: bool) -> None:
        """Handle an engine that ended with the head's container; a replacement is no fault."""
        status = self.status
        what = f"the head's container was {'replaced' if replaced else 'restarted'}"
        if replaced or status.ready_at is None:
            self._set_state("stopping", what)
        else:
            was_stable = status.written - status.ready_at >= _STABLE_SECONDS
            self._fail(DeathSign(9, what, node=self.lead.name), at_once=was_stable)

    # --- the states

    def _await_nodes(self) -> None:
        """Start once the nodes have the engine's resources."""
        spec, status = self.spec, self.status
        status.generation = max(status.generation, self._needs.latest_generation(spec))
        if reason := self._needs.wait_reason(spec, status, self._view, self._reserved):
            self._note_activity(reason)
            return
        faults.record_phase(status, "whole", self.clock.time())
        status.generation += 1
        # the model's files, or vLLM, may have changed since the last start
        status.task, status.first_answer = "", None
        self._signs = []
        self._needs.forget()
        self._began = self.clock.monotonic()
        self._observe()
        faults.record_phase(status, "started", self.clock.time())
        self._set_state("starting", _STARTING)
        say(f"{self.name}: {_STARTING} of {spec.model} (generation {status.generation})")

    def _observe(self) -> Monitor:
        if self.monitor is not None:
            self.monitor.apis.stop()
        self.monitor = Monitor(self.name, self.spec, self.lead, self._view, self.clock)
        return self.monitor

    def _engine(self) -> Monitor:
        # there is one for every engine that was started
        assert self.monitor is not None  # noqa: S101
        return self.monitor

    def _await_first_answer(self) -> None:
        """Wait for the first answer.

        The very first start has no deadline, since its client has one; a restart has.
        """
        status, policy = self.status, self.spec.policy
        if self._engine().update(status):
            self._note_answer()
            return
        limit = max(policy.start_timeout, 2 * (status.first_start or 0.0))
        late = self.clock.monotonic() - self._began > limit
        if late and status.ready_at is not None and policy.restarts != 0:
            self._fail(DeathSign(0, f"no answer within {limit:.0f} s of a restart"))
        else:
            self._judge_signs()

    def _note_answer(self) -> None:
        """Record the engine's first answer, and watch it from now on."""
        status, now = self.status, self.clock.time()
        took = self.clock.monotonic() - self._began
        status.first_start = status.first_start or round(took, 1)
        faults.record_recovery(status, now)
        status.ready_at, status.next_start, self._history_facts = now, None, None
        self._set_state("ready")
        say(f"{self.name}: ready {took:.1f} s after its start")
        self._check_engine()

    def _check_engine(self) -> None:
        """Check that the engine is alive and makes progress."""
        status, monitor = self.status, self._engine()
        before = status.verdict, status.warning
        monitor.update(status)
        self._write_history()
        if monitor.find_ranks(status):
            self._save()
        self._judge_signs()
        if status.state == "ready":
            self._judge_health()
            if (status.verdict, status.warning) != before:
                self._save(durable=False)

    def _write_history(self) -> None:
        """Add the spec to the history after its first answer, for `vlaunch rollback`; with its
        longest step, and its capacity for `vlaunch plan`.
        """
        status, capacity = self.status, self.status.held.get(self.spec.api_node, {})
        facts = capacity, round(status.longest_step)
        if facts == self._history_facts or status.ready_at is None:
            return
        self._history_facts = facts
        longest = round(status.longest_step, 1)
        newest = state.HistoryEntry(
            at=status.ready_at, desired=self.spec, held=capacity, longest_step=longest
        )
        with contextlib.suppress(OSError):
            state.note_answered(newest, self.folder)

    def _await_end(self) -> None:
        """Wait until the engine has stopped on every reachable node; then pause, or give up."""
        status = self.status
        if not self._is_gone():
            return
        faults.record_phase(status, "stopped", self.clock.time())
        if not self._is_explained():
            return
        last, cap = status.last_fault, self.spec.policy.restarts
        if status.next_start is None:
            self._set_state("waiting", _CHECKING)
        elif status.ready_at is None or cap == 0:
            reason = last.summary if last else "the engine exited"
            self._give_up(
                "failed", f"it never answered: {reason}" if status.ready_at is None else reason
            )
            say(f"{self.name}: FAILED: {status.doing}")
        elif status.restarts_left == 0:
            what = last.what if last else ""
            self._give_up("gave-up", f"restart limit of {cap} reached; last fault: {what}")
            say(f"{self.name}: GIVING UP: {status.doing}. Start it again: `vlaunch serve`")
        else:
            self._set_state("pausing", "waiting before the next restart")

    def _is_explained(self) -> bool:
        """True once Ray has named the first dead rank, was not queried, or takes too long."""
        explain = self._explain
        if explain is None:
            return True
        if not explain.done and self.clock.monotonic() - explain.began < _CULPRIT_SECONDS:
            return False
        if explain.value is not None:
            faults.add_culprit(self.status.faults[-1], explain.value)
        self._explain = None
        return True

    def _give_up(self, state_name: str, reason: str) -> None:
        """Stay stopped, failed or at the restart limit, until the next `vlaunch serve`."""
        self.status.next_start = None
        if self._reserved is not None:
            self._reserved.release()
        self._set_state(state_name, reason)

    def _pause(self) -> None:
        """Wait, longer after each start that did not last: the cause may persist."""
        status, now = self.status, self.clock.monotonic()
        if self._pause_end is None:
            rest = (status.next_start or 0.0) - self.clock.time()
            self._pause_end = now + min(rest, self.spec.policy.longest_pause)
        if now >= self._pause_end:
            status.restarts.append(self.clock.time())
            status.next_start = None
            self._set_state("waiting", _CHECKING)

    # --- health and faults

    def _is_gone(self) -> bool:
        """True if nothing of the engine runs on any reachable node; others stop it later."""
        connected = [node for node in self.spec.possible_nodes if self.lead.is_connected(node)]
        reports = [self.lead.report(node, self.name) for node in connected]
        return all(map(self.lead.orders_done, connected)) and all(
            report.state == IDLE for report in reports
        )

    def _judge_signs(self) -> None:
        """Decide whether the engine is dead, once the signs of one death are collected."""
        signs = self._engine().death_signs(self.status)
        now = self.clock.monotonic()
        if not self._signs:
            self._suspected = now
        if not signs:
            self._signs = []
            return
        self._signs += [sign for sign in signs if sign not in self._signs]
        if now - self._suspected >= _GATHER_SECONDS:
            self._fail(max(self._signs, key=lambda sign: sign.weight))

    def _judge_health(self) -> None:
        """Judge a ready server; stop it if it has hung for too long."""
        status, monitor, policy = self.status, self._engine(), self.spec.policy
        waits, stall = monitor.apis.list_waits(), monitor.stall
        hangs = stall.verdict == "suspect" and stall.seconds >= policy.stuck
        if hangs and policy.restarts != 0:
            self._fail(DeathSign(1, "the supervisor stopped it"))  # evidence of the hang
            return
        status.still = round(max((wait.seconds for wait in waits), default=0.0), 1)
        status.wedge = stall.wedge if stall.verdict else None
        status.verdict, status.reason = verdicts.combine_verdicts(status.endpoints)
        if stall.verdict:
            status.verdict, status.reason = stall.verdict, stall.reason
            endpoint = EndpointHealth(verdict=stall.verdict, reason=stall.reason)
            quiet = (wait for wait in waits if verdicts.is_quiet(wait.seconds, status.longest_step))
            status.endpoints |= {wait.node: endpoint for wait in quiet}
        silent = [node for node in self.spec.nodes if not self.lead.is_reporting(node)]
        remark = f"no answer from the agent of {', '.join(silent)}" if silent else ""
        status.stopped = [
            f"{process} on {node} is stopped (SIGSTOP)"
            for node in self.spec.possible_nodes
            if self.lead.is_reporting(node)
            for process in self.lead.report(node, self.name).stopped
        ]
        remarks = (monitor.apis.warning(status), remark, *status.stopped)
        status.warning = "; ".join(filter(None, remarks))

    def _fail(self, sign: DeathSign, *, at_once: bool = False) -> None:
        """Stop the rest of the engine, and record the fault.

        `at_once`: the engine did not cause it, so no pause is due.
        """
        policy, status, monitor = self.spec.policy, self.status, self.monitor
        now, pause = self.clock.time(), 0.0
        ready = status.state == "ready"
        if not at_once:
            lasted = now - status.ready_at if ready and status.ready_at is not None else 0.0
            status.streak = 1 if lasted >= _STREAK_SECONDS else status.streak + 1
            pause = verdicts.next_pause(policy.pause, policy.longest_pause, status.streak)
        lost, cause = None, sign
        if ready and monitor is not None:
            cause = monitor.stall.attribute_death(sign)
            # vLLM counts requests when a step ends: those that came in a hang are not among them
            lost = monitor.apis.lost_requests() if cause is sign else None
        fault = faults.add_fault(status, cause, at=now, pause=pause, lost=lost)
        status.next_start, self._pause_end = now + pause, self.clock.monotonic() + pause
        status.still, status.asking, status.warning, status.load = 0.0, 0.0, "", None
        say(f"{self.name}: {fault.summary}; {_STOPPING}")
        view, ranks = self._view, monitor.ranks if monitor is not None else []
        if cause is sign and view is not None and ranks and not fault.rank:
            self._explain = Background(lambda: view.find_culprit(ranks, fault.evidence))
        self._signs, status.ranks = [], {}
        self._set_state("stopping", _STOPPING)

    # --- orders and the record

    def orders(self) -> dict[str, Order]:
        """Return the orders of all nodes; a node without one stops the server."""
        waits = KEEP if self.status.resumes else PREPARE
        phases = {"waiting": waits, "starting": RUN, "ready": RUN}
        if (phase := phases.get(self.status.state)) is None:
            return {}
        generation = self.status.generation + (phase == PREPARE)
        return orders.build_orders(self.spec, phase, generation, self.monitor, self._reserved)

    def _note_activity(self, activity: str) -> None:
        if activity != self.status.doing:
            say(f"{self.name}: {activity}")
            self._set_state(self.status.state, activity)

    def _set_state(self, state_name: str, doing: str = "") -> None:
        changed = state_name != self.status.state
        if changed:
            self.status.since = self.clock.time()
        if state_name != "waiting":
            self.status.resumes = ""
        self.status.state, self.status.doing = state_name, doing
        self._save(durable=changed)

    def _save(self, *, durable: bool = True) -> None:
        """Write the record. On a full disk the server goes on without one."""
        status, cap, now = self.status, self.spec.policy.restarts, self.clock.time()
        # the clock may have been set back
        restarts = [min(at, now) for at in status.restarts]
        status.restarts = [at for at in restarts if at >= now - self.spec.policy.window]
        status.restarts_left = None if cap is None else max(0, cap - len(status.restarts))
        monitor = self.monitor if status.state in ("starting", "ready") else None
        status.alive = monitor.living_ranks(status) if monitor is not None else {}
        if status.draining is not None:
            status.verdict, status.reason = "stopping", status.doing
        elif status.state != "ready":
            status.stopped, status.drained = [], False
            is_stopping = self._stopping is not None and status.state not in OVER
            verdict = verdicts.server_verdict(status.state, status.fault_count)
            status.verdict = "stopping" if is_stopping else verdict
            status.reason, status.endpoints, status.wedge = status.doing, {}, None
        status.written, self._saved = now, self.clock.monotonic()
        path = state.server_file(self.name, state.OBSERVED, self.folder)
        with contextlib.suppress(OSError):
            state.write_json(path, status.as_json(), durable=durable)
