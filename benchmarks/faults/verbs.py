"""One run of each command: begin with nothing, start it, let the fault happen, look, heal, do it
again, take it all down.
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
from benchmarks.faults.inject import NothingThere, Scene
from benchmarks.faults.judge import Run
from benchmarks.faults.practice import API_KEY, Practice, Ran, Started, traces, until
from benchmarks.faults.traffic import Traffic, ask
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
_SETTLE = 6.0  # seconds that processes and containers may take to be gone after `down`
_UNDER_LOAD = 10.0  # a server's fault happens within so many seconds under load
_LASTS = 35.0  # seconds until somebody comes and heals what lasts
_RECOVERS = {REAL: 300.0}
_RECOVERS_STAND_IN = 150.0
_QUIET = 22.0  # without a failed request for so long, nothing has happened
_CALM = 5.0
_SURE = 5.0  # seconds after which a dead part counts against a command that says done
_SENT = 3.0  # seconds that what a killed launcher has asked for may still be on its way
_RENEWED = 5.0  # seconds after which a keeper that lives has written again
_OLD = 15.0  # seconds after which what the keeper wrote is nobody's word any more

# What goes wrong when the practice hosts do not do as they are told.
BROKEN = (VlaunchError, OSError, subprocess.SubprocessError)


@dataclass(slots=True)
class Stage:
    """A run as it goes: the case, the hosts, and what is written down of it."""

    practice: Practice
    case: Case
    run: Run
    before: list[str] = field(default_factory=list)

    @property
    def inventory(self) -> str:
        """The inventory that it works with; only servers have a stand-in."""
        return (
            "stand-in.yaml"
            if self.case.verb in SERVES and self.case.engine != REAL
            else "real.yaml"
        )

    def vlaunch(self, *words: str, timeout: float | None = None) -> Ran:
        """Run a command to its end; one that has no end is written down."""
        ran = self.practice.vlaunch(self.inventory, *words, timeout=timeout or DEADLINES[words[0]])
        self.heard(words[0], ran)
        return ran

    def heard(self, word: str, ran: Ran) -> None:
        """Write down a command that had no end, or a bad one."""
        if ran.hung:
            self.run.hung.append(f"`vlaunch {word}`")
        if crash := judge.crash(ran.said):
            self.run.crashed.append(f"`vlaunch {word}`: {crash}")

    def must(self, *words: str) -> Ran:
        """Run a command that has to work; what it says is written down when it does not."""
        ran = self.vlaunch(*words)
        if ran.code != 0:
            self.run.broken.append(
                f"`vlaunch {words[0]}` ended with {ran.code}: {judge.last_words(ran.said)}"
            )
        return ran


def clear(practice: Practice) -> None:
    """Put the hosts right and take down what is on them, whatever was left there."""
    inject.mend(practice)
    practice.vlaunch("real.yaml", "down", "--yes", timeout=DEADLINES["down"])
    inject.tidy(practice)


def about(case: Case, seconds: float) -> Run:
    """Return the run of a case, with nothing in it yet; `seconds` is how long the command takes
    when nothing happens.
    """
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


def run(practice: Practice, case: Case, seconds: float) -> Run:
    """Do one run on hosts with nothing on them, and leave them so.

    Raises one of `BROKEN` when they cannot be put right.
    """
    stage, scene = Stage(practice, case, about(case, seconds)), Scene(practice=practice, case=case)
    inject.prepare(scene)
    stage.before = traces(practice)
    try:
        _FLOWS[case.verb](stage, scene)
    except (NothingThere, *BROKEN) as error:
        stage.run.void = str(error) or type(error).__name__
    finally:  # also when somebody interrupts
        inject.mend(practice)
        if stage.run.why:
            _keep_evidence(stage)
        _end(stage)
        inject.tidy(practice)
    if stage.run.why:
        clear(practice)
    return stage.run


def _keep_evidence(stage: Stage) -> None:
    """Write the bundle of `vlaunch collect` and the logs of the head's Ray into the folder of a run
    that was not good.
    """
    practice, run = stage.practice, stage.run
    folder = practice.folder / f"{run.verb}-{run.fault}-{run.seed}-{run.at.replace(':', '')}"
    folder.mkdir(exist_ok=True)
    bundle = str(folder / "collect.tar.gz")
    practice.vlaunch(stage.inventory, "collect", "-o", bundle, timeout=_COLLECT)
    logs = f"{practice.container(practice.head)}:/tmp/ray/session_latest/logs"
    practice.docker(practice.head, "cp", "--follow-link", logs, str(folder))


def _end(stage: Stage) -> None:
    """Take everything down, and look what is left."""
    stage.must("down", "--yes")
    left: list[str] = []

    def gone() -> bool:
        left[:] = judge.left_over(stage.before, traces(stage.practice))
        return not left

    until(gone, _SETTLE, every=1.0)
    stage.run.leftovers = list(left)


def measure(practice: Practice, verb: str, engine: str) -> float:
    """Return how long a command takes when nothing happens; ends the program when it does not work
    even then.
    """
    case = Case(fault="launcher", verb=verb, seed=0, engine=engine)
    stage = Stage(
        practice, case, Run(fault="", verb=verb, seed=0, engine=engine, host="", moment=0)
    )
    stage.must("up")  # which may build the image
    if verb == "up":
        stage.must("down", "--yes")
        ran = stage.must("up")
    elif verb in SERVES:
        ran = stage.must(*_serve_words(case))
    else:
        job = jobs.write(practice, case)
        ran = stage.must("batch", str(job))
        jobs.forget(practice, job)
    stage.must("down", "--yes")
    if stage.run.why:
        raise SystemExit(
            f"`{verb}` does not work without a fault: {stage.run.why}\n{ran.said[-3000:]}"
        )
    return ran.seconds


def _happen(stage: Stage, scene: Scene) -> float:
    """Let the fault happen; returns when it did."""
    scene.strikes()
    if note := inject.inject(scene):
        stage.run.notes.append(note)
    return scene.at[-1]


def _status(stage: Stage) -> tuple[dict[str, object], float, float]:
    began = time.time()
    seen = stage.vlaunch("status", "--json").document
    return seen, began, time.time()


def _broken_while_whole(stage: Stage) -> None:
    """Ask `status` while something may be dead, and compare."""
    dead = stage.practice.dead()
    seen, _, _ = _status(stage)
    still = [each for each in stage.practice.dead() if each in dead]
    if seen.get("whole") and still:
        stage.run.lies.append(f"`status` said whole with {', '.join(still)}")


# -- up --------------------------------------------------------------------------------------------


def _up(stage: Stage, scene: Scene) -> None:
    started = stage.practice.start(stage.inventory, "up")
    fault, ran = _during(stage, scene, started)
    if ran.code == 0 and ran.ended - fault > _SURE:
        until(lambda: not stage.practice.dead(), _SURE)
        if dead := stage.practice.dead():
            stage.run.lies.append(f"`up` said done with {', '.join(dead)}")
    _broken_while_whole(stage)
    inject.heal(scene)
    again = stage.must("up")
    stage.run.ready = round(time.time() - fault, 1)
    if again.code == 0 and not _status(stage)[0].get("whole"):
        stage.run.broken.append("`status` does not say whole after `up`")


def _during(stage: Stage, scene: Scene, started: Started) -> tuple[float, Ran]:
    """Let the fault happen while a command runs, and wait for the command's end.

    Raises NothingThere when it ended before.
    """
    try:
        if not inject.chooses(stage.case):
            until(lambda: started.over, stage.run.moment, every=0.02)
        if started.over:
            raise NothingThere("the command had ended before the fault came")
        fault = _happen(stage, replace(scene, launcher=started))
        ran = started.wait(DEADLINES[stage.case.verb])
    finally:
        started.end()
    stage.heard(stage.case.verb, ran)
    stage.run.code, stage.run.said = ran.code, judge.last_words(ran.said)
    if ran.code > 0:
        stage.run.detected = round(max(0.0, ran.ended - fault), 1)
    return fault, ran


# -- serve -----------------------------------------------------------------------------------------


def _serve_words(case: Case) -> tuple[str, ...]:
    outside = () if case.verb == "serve" else ("--backend", "mp")
    replicas = ("--data-parallel-size", "2") if case.verb == "serve-dp" else ()
    # What is tested with the stand-in is the keeper; the proof of the network has nothing to do
    # with it.
    return (
        "serve",
        *outside,
        *replicas,
        *(() if case.engine == REAL else ("--skip-network-check",)),
    )


def _serve(stage: Stage, scene: Scene) -> None:
    if stage.must("up").code != 0:
        return
    if BY_ID[stage.case.fault].early:
        started = stage.practice.start(stage.inventory, *_serve_words(stage.case))
        fault, ran = _during(stage, scene, started)

        def decided() -> bool:
            return _answers(stage.practice) or (
                time.time() > ran.ended + _SENT and not _wanted(stage.practice)
            )

        until(decided, _recovers(stage.case), every=1.0)
        if _answers(stage.practice):
            stage.run.ready, stage.run.alone = round(time.time() - fault, 1), True
        elif _wanted(stage.practice):
            stage.run.broken.append(
                f"the server did not come up by itself within {_recovers(stage.case):.0f} s"
            )
    elif stage.must(*_serve_words(stage.case)).code == 0:
        with _traffic(stage.practice) as traffic, _states(stage.practice) as states:
            _under_load(stage, scene, traffic, states)
    else:
        return
    stage.must("up")
    stage.must(*_serve_words(stage.case))
    if not _answers(stage.practice):
        stage.run.broken.append("no completion after `serve`")


def _under_load(
    stage: Stage, scene: Scene, traffic: Traffic, states: list[tuple[float, str]]
) -> None:
    """Let the fault happen to a server that answers requests, and watch until it answers again."""
    lasts, by_hand = BY_ID[stage.case.fault].lasts, BY_ID[stage.case.fault].by_hand
    until(lambda: len(traffic.samples) >= 4, 30)
    time.sleep(stage.run.moment)
    before = stage.practice.record(state.OBSERVED)
    fault = _happen(stage, scene)
    until(lambda: _noticed(stage.practice, traffic, fault), _LASTS if lasts else _QUIET)
    seen, began, ended = _status(stage)
    stage.run.lies += judge.lying(seen, began, ended, list(traffic.samples))
    healed = fault
    if lasts:
        time.sleep(max(0.0, fault + _LASTS - time.time()))
        inject.heal(scene)
        healed = time.time()
    if not by_hand:

        def settled() -> bool:
            return judge.settled(
                list(traffic.samples), fault, time.time(), quiet=_QUIET, calm=_CALM
            )

        until(settled, _recovers(stage.case))
    out = judge.outage(list(traffic.samples), fault)
    _note_outage(stage, out, healed, traffic)
    after = stage.practice.record(state.OBSERVED)
    if stage.case.verb in BY_ID[stage.case.fault].harmless:
        stage.run.hurt = judge.hurt(before, after)
    faults = [each for each in after.get("faults", ()) if each["at"] >= fault - 1]
    if faults:
        stage.run.detected = round(max(0.0, faults[0]["at"] - fault), 1)
        stage.run.said = str(faults[0]["what"])
    else:
        stage.run.said = _said(seen)
    stage.run.red = judge.red(list(states), fault)
    limit = judge.GREEN_SILENT if BY_ID[stage.case.fault].silent else judge.GREEN
    stage.run.lies += judge.green_while_dead(list(states), list(traffic.samples), fault, limit)


def _note_outage(stage: Stage, out: judge.Outage, healed: float, traffic: Traffic) -> None:
    run = stage.run
    run.requests, run.failed = len(traffic.samples), out.failed
    if out.first is None:
        run.notes.append("no request failed")
        return
    run.alone = out.again is not None
    if out.again is not None:
        run.ready = round(max(0.0, out.again - healed), 1)
    elif not BY_ID[stage.case.fault].by_hand:
        run.broken.append(
            f"the server did not come back by itself within {_recovers(stage.case):.0f} s"
        )


def _noticed(practice: Practice, traffic: Traffic, fault: float) -> bool:
    """Tell whether the keeper has seen a fault, or clients have for as long as it may take."""
    if any(each["at"] >= fault for each in practice.record(state.OBSERVED).get("faults", ())):
        return True
    first = judge.outage(list(traffic.samples), fault).first
    return first is not None and time.time() - first > 15


def _said(seen: dict[str, object]) -> str:
    server = seen.get("server")
    if not isinstance(server, dict):
        return "`status` gave no answer"
    return f"{server.get('state', '')}: {server.get('detail', '')}".rstrip(": ")


def _recovers(case: Case) -> float:
    return _RECOVERS.get(case.engine, _RECOVERS_STAND_IN)


def _url(practice: Practice) -> str:
    return f"http://{practice.head.ip}:8000/v1"


def _wanted(practice: Practice) -> bool:
    """Tell whether a server was asked for, so that one may come."""
    return bool(practice.record(state.DESIRED))


def _answers(practice: Practice) -> bool:
    return ask(_url(practice), API_KEY, MODEL, 15).ok


def _traffic(practice: Practice) -> Traffic:
    return Traffic(_url(practice), API_KEY, MODEL)


@contextmanager
def _states(practice: Practice) -> Iterator[list[tuple[float, str]]]:
    """Read the server's verdicts from its record while the block is entered; a record that is not
    renewed counts as `unknown`.
    """
    states: list[tuple[float, str]] = []
    over = threading.Event()

    def read_states() -> None:
        while not over.wait(0.3):
            record, now = practice.record(state.OBSERVED), time.time()
            age = now - float(record.get("written", 0))
            # `status` checks first whether the head's container runs.
            old = age >= _OLD or (age >= _RENEWED and engines.agent(practice.head) is None)
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
    if stage.must("up").code != 0:
        return
    job = jobs.write(stage.practice, stage.case)
    started = stage.practice.start(stage.inventory, "batch", str(job))
    try:
        fault, ran = _during(stage, scene, started)
        if ran.code == 0 and any(amiss := judge.rows_amiss(jobs.rows(job), jobs.ROWS)):
            stage.run.lies.append(
                "`batch` said done with {} rows lost and {} doubled".format(*amiss)
            )
        inject.heal(scene)
        stage.must("up")
        again = stage.must("batch", str(job))
        stage.run.ready = round(time.time() - fault, 1) if ran.code != 0 else None
        if again.code == 0:
            stage.run.rows = jobs.ROWS
            stage.run.lost, stage.run.doubled = judge.rows_amiss(jobs.rows(job), jobs.ROWS)
            stage.run.broken += jobs.torn(job)
    finally:
        jobs.forget(stage.practice, job)


_FLOWS: dict[str, Callable[[Stage, Scene], None]] = {
    "up": _up,
    **dict.fromkeys(SERVES, _serve),
    "batch": _batch,
}


def as_line(run: Run) -> str:
    """Return the line of the results file for a run."""
    return json.dumps(run.as_json(), ensure_ascii=False) + "\n"
