"""One run of each command: start it on empty hosts, inject the fault, observe, heal, repeat, take
down.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from benchmarks import engines
from benchmarks.faults import inject, jobs, judge
from benchmarks.faults.cases import BY_ID, REAL, SERVES, Case
from benchmarks.faults.inject import NoTargetError, Scene
from benchmarks.faults.judge import Run
from benchmarks.faults.testbed import (
    API_KEY,
    CommandResult,
    FaultTestbed,
    RunningCommand,
    list_traces,
    wait_until,
)
from benchmarks.faults.traffic import Traffic, send_request
from launcher.agent import state
from launcher.core.errors import VlaunchError
from launcher.lab.host_configs import MODEL

DEADLINES = {
    "up": 420.0,
    **dict.fromkeys(SERVES, 420.0),
    "batch": 420.0,
    "status": 90.0,
    "down": 180.0,
}
_COLLECT = 180.0
_SETTLE = 6.0  # seconds for processes and containers to exit after `down`
_UNDER_LOAD = 10.0  # a server's fault happens within these seconds under load
_LASTS = 35.0  # seconds until a lasting fault is healed
_RECOVERS = {REAL: 300.0}
_RECOVERS_STAND_IN = 150.0
_QUIET = 22.0  # seconds without a failed request after which the fault had no effect
_CALM = 5.0
_SURE = 5.0  # seconds after which a dead part counts against a command that succeeded
_SENT = 3.0  # seconds until a killed launcher's requests have arrived
_RENEWED = 5.0  # seconds after which a running supervisor has written again
_OLD = 15.0  # seconds after which the supervisor's record is stale

# Errors of the lab hosts themselves.
HOST_ERRORS = (VlaunchError, OSError, subprocess.SubprocessError)


@dataclass(slots=True)
class Stage:
    """A run in progress: the case, the hosts, and the results."""

    testbed: FaultTestbed
    case: Case
    run: Run
    before: list[str] = field(default_factory=list)

    @property
    def inventory(self) -> str:
        """The inventory of the run; only servers have a stand-in."""
        return (
            "stand-in.yaml"
            if self.case.verb in SERVES and self.case.engine != REAL
            else "real.yaml"
        )

    def vlaunch(self, *arguments: str, timeout: float | None = None) -> CommandResult:
        """Run a command; record it when it hangs or crashes."""
        result = self.testbed.vlaunch(
            self.inventory, *arguments, timeout=timeout or DEADLINES[arguments[0]]
        )
        self.note_result(arguments[0], result)
        return result

    def note_result(self, verb: str, result: CommandResult) -> None:
        """Record a command that hung or crashed."""
        if result.hung:
            self.run.hung.append(f"`vlaunch {verb}`")
        if crash := judge.find_traceback(result.output):
            self.run.crashed.append(f"`vlaunch {verb}`: {crash}")

    def run_checked(self, *arguments: str) -> CommandResult:
        """Run a command that has to succeed; record its message when it fails."""
        result = self.vlaunch(*arguments)
        if result.code != 0:
            message = judge.last_message(result.output)
            self.run.broken.append(f"`vlaunch {arguments[0]}` ended with {result.code}: {message}")
        return result


def reset_hosts(testbed: FaultTestbed) -> None:
    """Repair the hosts and take down all that is on them."""
    inject.repair_hosts(testbed)
    testbed.vlaunch("real.yaml", "down", "--yes", timeout=DEADLINES["down"])
    inject.remove_disks(testbed)


def new_run(case: Case, seconds: float) -> Run:
    """Return the empty run of a case; `seconds` is the command's duration without a fault."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    span = seconds if case.verb not in SERVES or BY_ID[case.fault].early else _UNDER_LOAD
    return Run(
        fault=case.fault,
        verb=case.verb,
        seed=case.seed,
        engine=case.engine,
        host=case.host,
        moment=case.moment(span),
        at=now,
    )


def run_case(testbed: FaultTestbed, case: Case, seconds: float) -> Run:
    """Run a case on empty hosts, and leave them empty.

    Raises one of `HOST_ERRORS` when they cannot be repaired.
    """
    stage, scene = (
        Stage(testbed, case, new_run(case, seconds)),
        Scene(testbed=testbed, case=case),
    )
    inject.prepare(scene)
    stage.before = list_traces(testbed)
    try:
        _FLOWS[case.verb](stage, scene)
    except (NoTargetError, *HOST_ERRORS) as error:
        stage.run.void = str(error) or type(error).__name__
    finally:  # also after an interrupt
        inject.repair_hosts(testbed)
        if stage.run.defects:
            _keep_evidence(stage)
        _take_down(stage)
        inject.remove_disks(testbed)
    if stage.run.defects:
        reset_hosts(testbed)
    return stage.run


def _keep_evidence(stage: Stage) -> None:
    """Save the bundle of `vlaunch collect` and the head's Ray logs of a bad run."""
    testbed, run = stage.testbed, stage.run
    folder = testbed.folder / f"{run.verb}-{run.fault}-{run.seed}-{run.at.replace(':', '')}"
    folder.mkdir(exist_ok=True)
    bundle = str(folder / "collect.tar.gz")
    testbed.vlaunch(stage.inventory, "collect", "-o", bundle, timeout=_COLLECT)
    logs = f"{testbed.container(testbed.head)}:/tmp/ray/session_latest/logs"
    testbed.docker(testbed.head, "cp", "--follow-link", logs, str(folder))


def _take_down(stage: Stage) -> None:
    """Take everything down, and record leftovers."""
    stage.run_checked("down", "--yes")
    leftovers: list[str] = []

    def gone() -> bool:
        leftovers[:] = judge.find_leftovers(stage.before, list_traces(stage.testbed))
        return not leftovers

    wait_until(gone, _SETTLE, every=1.0)
    stage.run.leftovers = list(leftovers)


def measure_duration(testbed: FaultTestbed, verb: str, engine: str) -> float:
    """Return the duration of a command without a fault; exit when it fails."""
    case = Case(fault="launcher", verb=verb, seed=0, engine=engine)
    stage = Stage(testbed, case, Run(fault="", verb=verb, seed=0, engine=engine, host="", moment=0))
    stage.run_checked("up")  # may build the image
    if verb == "up":
        stage.run_checked("down", "--yes")
        result = stage.run_checked("up")
    elif verb in SERVES:
        result = stage.run_checked(*_serve_argv(case))
    else:
        job = jobs.write_job(testbed, case)
        result = stage.run_checked("batch", str(job))
        jobs.remove_job(testbed, job)
    stage.run_checked("down", "--yes")
    if stage.run.defects:
        raise SystemExit(
            f"`{verb}` does not work without a fault: {stage.run.defects}\n{result.output[-3000:]}"
        )
    return result.seconds


def _inject(stage: Stage, scene: Scene) -> float:
    """Inject the fault; return its time."""
    scene.note_time()
    if note := inject.inject(scene):
        stage.run.notes.append(note)
    return scene.at[-1]


def _status(stage: Stage) -> tuple[dict[str, object], float, float]:
    began = time.time()
    status = stage.vlaunch("status", "--json").document
    return status, began, time.time()


def _check_status(stage: Stage) -> None:
    """Compare `status` with the parts that are dead."""
    dead = stage.testbed.missing_parts()
    status, _, _ = _status(stage)
    still_dead = [part for part in stage.testbed.missing_parts() if part in dead]
    if status.get("whole") and still_dead:
        stage.run.lies.append(f"`status` said whole with {', '.join(still_dead)}")


# -- up --------------------------------------------------------------------------------------------


def _up(stage: Stage, scene: Scene) -> None:
    started = stage.testbed.start(stage.inventory, "up")
    fault, result = _inject_during(stage, scene, started)
    if result.code == 0 and result.ended - fault > _SURE:
        wait_until(lambda: not stage.testbed.missing_parts(), _SURE)
        if dead := stage.testbed.missing_parts():
            stage.run.lies.append(f"`up` said done with {', '.join(dead)}")
    _check_status(stage)
    inject.heal(scene)
    again = stage.run_checked("up")
    stage.run.ready = round(time.time() - fault, 1)
    if again.code == 0 and not _status(stage)[0].get("whole"):
        stage.run.broken.append("`status` does not say whole after `up`")


def _inject_during(
    stage: Stage, scene: Scene, started: RunningCommand
) -> tuple[float, CommandResult]:
    """Inject the fault into a running command, and wait for the command.

    Raises NoTargetError when it exits first.
    """
    try:
        if not inject.chooses_moment(stage.case):
            wait_until(lambda: started.is_over, stage.run.moment, every=0.02)
        if started.is_over:
            raise NoTargetError("the command had ended before the fault came")
        fault = _inject(stage, replace(scene, launcher=started))
        result = started.wait(DEADLINES[stage.case.verb])
    finally:
        started.kill()
    stage.note_result(stage.case.verb, result)
    stage.run.code, stage.run.said = result.code, judge.last_message(result.output)
    if result.code > 0:
        stage.run.detected = round(max(0.0, result.ended - fault), 1)
    return fault, result


# -- serve -----------------------------------------------------------------------------------------


def _serve_argv(case: Case) -> tuple[str, ...]:
    backend = () if case.verb == "serve" else ("--backend", "mp")
    replicas = ("--data-parallel-size", "2") if case.verb == "serve-dp" else ()
    # The stand-in tests the supervisor, not the network check.
    return (
        "serve",
        *backend,
        *replicas,
        *(() if case.engine == REAL else ("--skip-network-check",)),
    )


def _serve(stage: Stage, scene: Scene) -> None:
    if stage.run_checked("up").code != 0:
        return
    if BY_ID[stage.case.fault].early:
        started = stage.testbed.start(stage.inventory, *_serve_argv(stage.case))
        fault, result = _inject_during(stage, scene, started)

        def decided() -> bool:
            return _is_answering(stage.testbed) or (
                time.time() > result.ended + _SENT and not _has_spec(stage.testbed)
            )

        wait_until(decided, _recovery_limit(stage.case), every=1.0)
        if _is_answering(stage.testbed):
            stage.run.ready, stage.run.alone = round(time.time() - fault, 1), True
        elif _has_spec(stage.testbed):
            stage.run.broken.append(
                f"the server did not come up by itself within {_recovery_limit(stage.case):.0f} s"
            )
    elif stage.run_checked(*_serve_argv(stage.case)).code == 0:
        with _traffic(stage.testbed) as traffic, _states(stage.testbed) as states:
            _under_load(stage, scene, traffic, states)
    else:
        return
    stage.run_checked("up")
    stage.run_checked(*_serve_argv(stage.case))
    if not _is_answering(stage.testbed):
        stage.run.broken.append("no completion after `serve`")


def _under_load(
    stage: Stage, scene: Scene, traffic: Traffic, states: list[tuple[float, str]]
) -> None:
    """Inject the fault into a server under load, and observe until it answers again."""
    lasts, by_hand = BY_ID[stage.case.fault].lasts, BY_ID[stage.case.fault].by_hand
    wait_until(lambda: len(traffic.samples) >= 4, 30)
    time.sleep(stage.run.moment)
    before = stage.testbed.record(state.OBSERVED)
    fault = _inject(stage, scene)
    wait_until(lambda: _is_noticed(stage.testbed, traffic, fault), _LASTS if lasts else _QUIET)
    status, began, ended = _status(stage)
    stage.run.lies += judge.find_false_status(status, began, ended, list(traffic.samples))
    healed = fault
    if lasts:
        time.sleep(max(0.0, fault + _LASTS - time.time()))
        inject.heal(scene)
        healed = time.time()
    if not by_hand:

        def settled() -> bool:
            return judge.is_settled(
                list(traffic.samples), fault, time.time(), quiet=_QUIET, calm=_CALM
            )

        wait_until(settled, _recovery_limit(stage.case))
    outage = judge.find_outage(list(traffic.samples), fault)
    _note_outage(stage, outage, healed, traffic)
    after = stage.testbed.record(state.OBSERVED)
    if stage.case.verb in BY_ID[stage.case.fault].harmless:
        stage.run.hurt = judge.find_restart(before, after)
    faults = [entry for entry in after.get("faults", ()) if entry["at"] >= fault - 1]
    if faults:
        stage.run.detected = round(max(0.0, faults[0]["at"] - fault), 1)
        stage.run.said = str(faults[0]["what"])
    else:
        stage.run.said = _describe_server(status)
    stage.run.red = judge.seconds_to_red(list(states), fault)
    limit = judge.GREEN_SILENT if BY_ID[stage.case.fault].silent else judge.GREEN
    stage.run.lies += judge.green_while_dead(list(states), list(traffic.samples), fault, limit)


def _note_outage(stage: Stage, outage: judge.Outage, healed: float, traffic: Traffic) -> None:
    run = stage.run
    run.requests, run.failed = len(traffic.samples), outage.failed
    if outage.first is None:
        run.notes.append("no request failed")
        return
    run.alone = outage.again is not None
    if outage.again is not None:
        run.ready = round(max(0.0, outage.again - healed), 1)
    elif not BY_ID[stage.case.fault].by_hand:
        run.broken.append(
            f"the server did not come back by itself within {_recovery_limit(stage.case):.0f} s"
        )


def _is_noticed(testbed: FaultTestbed, traffic: Traffic, fault: float) -> bool:
    """Return whether the supervisor has recorded the fault, or clients have failed for the time
    that this may take.
    """
    if any(entry["at"] >= fault for entry in testbed.record(state.OBSERVED).get("faults", ())):
        return True
    first = judge.find_outage(list(traffic.samples), fault).first
    return first is not None and time.time() - first > 15


def _describe_server(status: dict[str, object]) -> str:
    server = status.get("server")
    if not isinstance(server, dict):
        return "`status` gave no answer"
    return f"{server.get('state', '')}: {server.get('detail', '')}".rstrip(": ")


def _recovery_limit(case: Case) -> float:
    return _RECOVERS.get(case.engine, _RECOVERS_STAND_IN)


def _url(testbed: FaultTestbed) -> str:
    return f"http://{testbed.head.ip}:8000/v1"


def _has_spec(testbed: FaultTestbed) -> bool:
    """Return whether the server has a spec, so that it may come."""
    return bool(testbed.record(state.DESIRED))


def _is_answering(testbed: FaultTestbed) -> bool:
    return send_request(_url(testbed), API_KEY, MODEL, 15).ok


def _traffic(testbed: FaultTestbed) -> Traffic:
    return Traffic(_url(testbed), API_KEY, MODEL)


@contextmanager
def _states(testbed: FaultTestbed) -> Iterator[list[tuple[float, str]]]:
    """Read the server's verdicts from its record inside the block; a stale record counts as
    `unknown`.
    """
    states: list[tuple[float, str]] = []
    over = threading.Event()

    def read_states() -> None:
        while not over.wait(0.3):
            record, now = testbed.record(state.OBSERVED), time.time()
            age = now - float(record.get("written", 0))
            # As in `status`: no verdict without the head's container.
            old = age >= _OLD or (age >= _RENEWED and engines.find_agent(testbed.head) is None)
            states.append((now, "unknown" if old else str(record.get("verdict", ""))))

    thread = threading.Thread(target=read_states, daemon=True)
    thread.start()
    try:
        yield states
    finally:
        over.set()
        thread.join(5)


# -- batch -----------------------------------------------------------------------------------------


def _batch(stage: Stage, scene: Scene) -> None:
    if stage.run_checked("up").code != 0:
        return
    job = jobs.write_job(stage.testbed, stage.case)
    started = stage.testbed.start(stage.inventory, "batch", str(job))
    try:
        fault, result = _inject_during(stage, scene, started)
        if result.code == 0 and any(
            amiss := judge.count_row_errors(jobs.read_rows(job), jobs.ROWS)
        ):
            stage.run.lies.append(
                "`batch` said done with {} rows lost and {} doubled".format(*amiss)
            )
        inject.heal(scene)
        stage.run_checked("up")
        again = stage.run_checked("batch", str(job))
        stage.run.ready = round(time.time() - fault, 1) if result.code != 0 else None
        if again.code == 0:
            stage.run.rows = jobs.ROWS
            stage.run.lost, stage.run.doubled = judge.count_row_errors(
                jobs.read_rows(job), jobs.ROWS
            )
            stage.run.broken += jobs.partial_files(job)
    finally:
        jobs.remove_job(stage.testbed, job)


_FLOWS: dict[str, Callable[[Stage, Scene], None]] = {
    "up": _up,
    **dict.fromkeys(SERVES, _serve),
    "batch": _batch,
}


def format_line(run: Run) -> str:
    """Return the line of the results file for a run."""
    return json.dumps(run.as_json(), ensure_ascii=False) + "\n"
