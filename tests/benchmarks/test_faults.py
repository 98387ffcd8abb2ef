"""The campaign's pure parts: which runs there are, how a run is judged, and the table.

Nothing is broken here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.faults import __main__ as command
from benchmarks.faults import cases, inject, judge, table, verbs
from benchmarks.faults.cases import BY_ID, FAULTS, REAL, SERVES, STAND_IN, Case
from benchmarks.faults.inject import Scene
from benchmarks.faults.judge import Outage, Run, Sample
from benchmarks.faults.testbed import FaultTestbed, RunningCommand, wait_until
from launcher.lab import layout

BEGAN = 1000.0


def run(**changes: Any) -> Run:
    """Return a run that is good, with changes."""
    good = {
        "fault": "gcs",
        "verb": "serve",
        "seed": 1,
        "engine": STAND_IN,
        "host": "node1",
        "moment": 3.0,
    }
    return Run(**{**good, **changes})


def stream(outcomes: str, *, every: float = 1.0) -> list[Sample]:
    """Return requests that end one after the other, `.` answered and `x` failed; the fault is at
    the first one's begin.
    """
    return [
        Sample(began=BEGAN + at * every, ended=BEGAN + (at + 0.9) * every, ok=outcome == ".")
        for at, outcome in enumerate(outcomes)
    ]


# -- Cases -----------------------------------------------------------------------------------------


def test_every_fault_can_be_made_to_happen() -> None:
    """By its name."""
    assert set(inject._INJECT) == set(BY_ID)


def test_the_campaign_is_as_large_as_was_promised() -> None:
    """Three seeds of every fault for `up`, two for batches, one for each kind of server, each run
    once.
    """
    campaign = list(cases.list_cases())

    assert len({case.key for case in campaign}) == len(campaign)
    for verb, seeds in (("up", 3), ("serve", 1), ("serve-mp", 1), ("serve-dp", 1), ("batch", 2)):
        for fault in FAULTS:
            number = sum(case.fault == fault.id and case.verb == verb for case in campaign)
            assert number == (seeds if cases.applies(fault, verb, STAND_IN) else 0), (
                fault.id,
                verb,
            )


def test_every_fault_comes_once_before_any_comes_again() -> None:
    """So that a campaign that is cut short has seen all of them."""
    seeds = [case.seed for case in cases.list_cases(verbs=["up"])]

    assert seeds == sorted(seeds)


def test_the_same_case_meets_the_same_host_at_the_same_moment() -> None:
    """Whatever was run before; other seeds meet another moment, and the hosts take turns."""
    first, second = Case(fault="raylet", verb="up", seed=1), Case(fault="raylet", verb="up", seed=2)

    assert first.moment(30) == Case(fault="raylet", verb="up", seed=1).moment(30)
    assert first.moment(30) != second.moment(30)
    assert {first.host, second.host} == {"node1", "node2"}
    assert all(0 < case.moment(30) < 30 for case in cases.list_cases())


def test_a_narrower_campaign() -> None:
    """By command, fault, seeds and engine."""
    campaign = list(cases.list_cases(verbs=["batch"], only=["engine", "gcs"], seeds=1, engine=REAL))

    assert [case.key for case in campaign] == [
        ("engine", "batch", 1, REAL),
        ("gcs", "batch", 1, REAL),
    ]


@pytest.mark.parametrize("verb", SERVES)
def test_eight_faults_are_tried_on_vllm_itself(verb: str) -> None:
    """For each kind of server; backends beside each other meet both hosts."""
    assert sum(1 for _ in cases.list_cases(verbs=[verb], engine=REAL, seeds=1)) == 8
    assert {Case(fault="container", verb=kind, seed=1).host for kind in SERVES} == {
        "node1",
        "node2",
    }


def test_what_is_harmless_is_tried() -> None:
    """Only what is tried on a server can be found to do it no harm."""
    assert all(set(fault.harmless) <= set(fault.verbs) & set(SERVES) for fault in FAULTS)
    assert all(verb in cases.DISKS for verb in cases.VERBS)


def test_until_looks_half_a_day_back_and_half_a_day_ahead() -> None:
    """A campaign that begins before midnight goes on after it; one that is called too late runs
    nothing.
    """
    at = command.parse_minutes

    assert [
        command.is_past(at("01:10"), at(now)) for now in ("23:50", "01:09", "01:10", "09:00")
    ] == [
        False,
        False,
        True,
        True,
    ]
    assert [command.is_past(at("9:05"), at(now)) for now in ("8:59", "10:00")] == [False, True]
    with pytest.raises(ValueError, match="soon"):
        at("soon")


# -- What clients saw ------------------------------------------------------------------------------


def test_no_outage() -> None:
    """Without a failed request; one that had failed before the fault is not the fault's."""
    before = [Sample(began=BEGAN - 2, ended=BEGAN - 1, ok=False)]

    assert judge.find_outage(before + stream("..."), BEGAN) == Outage()


def test_an_outage_ends_with_the_first_answer_after_the_last_failure() -> None:
    """An answer between failures is none to rely on."""
    outage = judge.find_outage(stream(".xx.x..."), BEGAN)

    assert outage.failed == 3
    assert outage.first == pytest.approx(BEGAN + 1.9)
    assert outage.again == pytest.approx(BEGAN + 5.9)


def test_an_outage_without_an_end() -> None:
    """There is no time to tell."""
    assert judge.find_outage(stream("..xx"), BEGAN).again is None


@pytest.mark.parametrize(
    ("outcomes", "settled"),
    [
        pytest.param("." * 10, False, id="nothing yet"),
        pytest.param("." * 30, True, id="nothing happened"),
        pytest.param(".xx" + "." * 3, False, id="just back"),
        pytest.param(".xx" + "." * 8, True, id="back for good"),
        pytest.param("x" * 60, False, id="never back"),
    ],
)
def test_when_watching_may_end(outcomes: str, settled: bool) -> None:
    """After calm, whether or not there was a storm."""
    assert (
        judge.is_settled(stream(outcomes), BEGAN, BEGAN + len(outcomes), quiet=20, calm=5)
        is settled
    )


# -- Lies ------------------------------------------------------------------------------------------


def test_status_that_says_answering_while_nothing_is_answered() -> None:
    """It may say so when one of the requests of the same seconds was answered."""
    status = {"server": {"state": "answering"}}

    assert judge.find_false_status(status, BEGAN, BEGAN + 3, stream("xxx"))
    assert not judge.find_false_status(status, BEGAN, BEGAN + 3, stream("x.x"))
    assert not judge.find_false_status(
        {"server": {"state": "silent"}}, BEGAN, BEGAN + 3, stream("xxx")
    )


def test_a_record_that_stays_green() -> None:
    """For longer than a fault may stay unseen; red in time is fine, and so is green after the first
    answer.
    """
    dark = stream("x" * 30 + ".....")
    green = [(BEGAN + second, "busy") for second in range(35)]
    red = [
        (when, "busy" if when < BEGAN + 12 or when > BEGAN + 31 else "recovering")
        for when, _ in green
    ]

    assert "30 s" in judge.green_while_dead(green, dark, BEGAN)[0]
    assert judge.green_while_dead(red, dark, BEGAN) == []
    assert judge.green_while_dead(green, stream("." * 30), BEGAN) == []


def test_a_record_that_is_green_again_before_clients_are() -> None:
    """The seconds between the return of a server and its first answer are no part of the time in
    which it was dead.
    """
    dark = stream("x" * 30 + ".....")
    back = [
        (BEGAN + second, "busy" if second < 5 or second > 24 else "recovering")
        for second in range(35)
    ]

    assert judge.green_while_dead(back, dark, BEGAN) == []


def test_the_first_red_verdict_after_the_fault_counts() -> None:
    """Verdicts before the fault and warnings do not count."""
    states = [(BEGAN - 1, "unknown"), (BEGAN + 31, "quiet"), (BEGAN + 62, "suspect")]

    assert judge.seconds_to_red([*states, (BEGAN + 70, "recovering")], BEGAN) == 62
    assert judge.seconds_to_red(states[:2], BEGAN) is None


@pytest.mark.parametrize(
    ("age", "verdict", "state"),
    [(60, "busy", "unknown"), (2, "busy", "busy"), (2, "quiet", "quiet")],
)
def test_a_record_that_is_not_renewed_is_unknown(age: float, verdict: str, state: str) -> None:
    """The record stays unchanged when its writer is killed."""
    with verbs._states(cast(FaultTestbed, Alone(age, verdict))) as states:
        assert wait_until(lambda: len(states) > 1, 5)

    assert {verdict for _, verdict in states} == {state}


class Alone:
    """Lab hosts on which nothing runs, with the record of a server that was ready."""

    head = layout.make_lab(
        name="nothing", directory=Path("/nowhere"), subnet="10.79.99.0/24", nodes=1, gpus=1
    ).hosts[0]

    def __init__(self, age: float = 60, verdict: str = "busy") -> None:
        self.document = {"state": "ready", "verdict": verdict, "written": time.time() - age}

    def record(self, name: str) -> dict[str, Any]:
        """Return the record that the supervisor wrote `age` seconds ago."""
        return self.document


# -- Commands --------------------------------------------------------------------------------------


def started(tmp_path: Path, program: str) -> RunningCommand:
    """Start a program as a command of the campaign."""
    log = tmp_path / "log"
    with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=out, stderr=err, start_new_session=True
        )
    return RunningCommand(process, log)


def test_a_command_ends_when_it_ends(tmp_path: Path) -> None:
    """And not when somebody comes to see: a fault takes its time, too."""
    child = started(tmp_path, "print('done')")
    assert wait_until(lambda: child.is_over, 60)
    observed_at = time.time()
    time.sleep(0.3)
    ran = child.wait(60)

    assert (ran.code, ran.output, ran.hung) == (0, "done\n", False)
    assert ran.ended <= observed_at


def test_a_command_without_an_end(tmp_path: Path) -> None:
    """It is killed at its deadline, or when somebody interrupts the campaign."""
    first, second = (started(tmp_path, "import time; time.sleep(60)") for _ in range(2))
    second.kill()

    assert first.wait(0.1).hung
    assert second.is_over


def test_a_command_that_ended_before_the_fault_proves_nothing(tmp_path: Path) -> None:
    """Such a run is void, and not a good one."""
    case = Case(fault="memory", verb="up", seed=1)
    stage = verbs.Stage(cast(FaultTestbed, Alone()), case, verbs.new_run(case, 10))
    child = started(tmp_path, "print('done')")

    with pytest.raises(inject.NoTargetError, match="had ended before"):
        verbs._inject_during(stage, Scene(testbed=stage.testbed, case=case), child)


@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError, inject.NoTargetError])
def test_hosts_are_put_right_whatever_becomes_of_a_run(
    how: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when somebody interrupts it; what is to be broken may be gone at the last moment, which
    ends no campaign.
    """
    done: list[str] = []

    def flow(_stage: object, _scene: object) -> None:
        raise how

    monkeypatch.setitem(verbs._FLOWS, "up", flow)
    monkeypatch.setattr(verbs, "list_traces", lambda _: [])
    monkeypatch.setattr(verbs, "_take_down", lambda _: done.append("down"))
    for name in ("prepare", "repair_hosts", "remove_disks"):
        monkeypatch.setattr(inject, name, lambda _, name=name: done.append(name))
    case = Case(fault="cut", verb="up", seed=1)
    if how is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            verbs.run_case(cast(FaultTestbed, Alone()), case, 10)
    else:
        assert verbs.run_case(cast(FaultTestbed, Alone()), case, 10).void == how.__name__

    assert done == ["prepare", "repair_hosts", "down", "remove_disks"]


def test_a_fault_is_timed_when_it_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be killed may have been waited for."""
    scene = Scene(testbed=cast(FaultTestbed, Alone()), case=Case(fault="cut", verb="up", seed=1))

    def late(scene: Scene) -> None:
        time.sleep(0.3)
        scene.note_time()

    monkeypatch.setitem(inject._INJECT, "cut", late)
    began = time.time()

    assert verbs._inject(cast(verbs.Stage, None), replace(scene, launcher=None)) - began >= 0.3


# -- Rows, leftovers, words ------------------------------------------------------------------------


def test_rows_lost_and_doubled() -> None:
    """Each is counted."""
    assert judge.count_row_errors([0, 1, 2, 3], 4) == (0, 0)
    assert judge.count_row_errors([0, 2, 2, 2], 4) == (2, 2)


def test_what_is_left_over() -> None:
    """Only what was not there before."""
    assert judge.find_leftovers(["node1: mount /"], ["node1: mount /", "node1: container a"]) == [
        "node1: container a"
    ]


def test_last_words() -> None:
    """The error outdoes its hint."""
    assert judge.last_message("Look\nerror: node2: gone\n\nhint: run\n") == "error: node2: gone"
    assert judge.last_message("one\ntwo\n\n") == "two"
    assert judge.last_message("") == ""


def test_a_traceback_is_no_error_message() -> None:
    """Unless it is what a node said, as evidence of an error."""
    trace = "Traceback (most recent call last):\n  File x\nKeyError: 'node2'\n"

    assert judge.find_traceback(f"ok node1\n{trace}") == "KeyError: 'node2'"
    assert judge.find_traceback(f"{trace}error: node2: gone\n") == ""
    assert judge.find_traceback("error: node2: gone\n") == ""


@pytest.mark.parametrize(
    ("changes", "defect"),
    [
        ({"hung": ["`vlaunch up`"]}, "hung"),
        ({"crashed": ["`vlaunch up`: KeyError"]}, "crashed"),
        ({"lies": ["`status` said whole"]}, "green while dead"),
        ({"lost": 1}, "1 rows lost"),
        ({"doubled": 2}, "2 rows doubled"),
        ({"leftovers": ["node1: container a"]}, "left over"),
        ({"hurt": ["generation 1 → 2: vLLM ended"]}, "a healthy server was ended"),
        ({"broken": ["`vlaunch up` ended with 1"]}, "afterwards"),
    ],
)
def test_one_of_them_is_enough(changes: dict[str, Any], defect: str) -> None:
    """A run is good only when nothing at all is wrong with it."""
    assert run().ok
    assert not run(**changes).ok
    assert defect in run(**changes).defects[0]


@pytest.mark.parametrize(
    ("after", "restarts"),
    [
        ({"generation": 3, "fault_count": 2, "faults": [{"what": "of before"}]}, []),
        (
            {"generation": 4, "fault_count": 3, "faults": [{"what": "node2 is gone"}]},
            ["generation 3 → 4: node2 is gone"],
        ),
        (
            {"generation": 3, "fault_count": 3, "faults": [{"what": "node2 is gone"}]},
            ["generation 3 → 3: node2 is gone"],
        ),
        ({}, ["generation 3 → None: no fault written down"]),
    ],
)
def test_a_healthy_server_that_was_ended(after: dict[str, Any], restarts: list[str]) -> None:
    """By the number of its engine, and by the count of faults: one may have been written down
    before the engine ends.
    """
    assert judge.find_restart({"generation": 3, "fault_count": 2}, after) == restarts


def test_a_run_in_which_nothing_was_tried_is_not_good() -> None:
    """Nor is it bad."""
    assert not run(void="no rank runs").ok
    assert run(void="no rank runs").defects == []


# -- Results and table -----------------------------------------------------------------------------


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """The last run of a key counts; a line that was cut off, or is of the future, does no harm."""
    path = tmp_path / "results.jsonl"
    first, second = run(detected=3.2, lost=1), run(detected=4.0)
    later = json.dumps({**second.as_json(), "unknown": 1}) + "\n"
    path.write_text(
        verbs.format_line(first)
        + json.dumps({"of": "up real", "duration": 21.5})
        + "\n"
        + later
        + '{"fault": "g'
    )

    assert command.load_results(path) == ({second.key: second}, {"up real": 21.5})
    assert command.load_results(tmp_path / "absent") == ({}, {})


def test_a_campaign_that_was_killed_goes_on_with_a_line_of_its_own(tmp_path: Path) -> None:
    """Else the run after a line that was cut off would be lost with it."""
    path = tmp_path / "results.jsonl"
    command.complete_last_line(path)
    assert not path.exists()
    path.write_text('{"fault": "g')
    for _ in range(2):
        command.complete_last_line(path)
    with path.open("a") as results:
        results.write(verbs.format_line(run()))

    assert command.load_results(path)[0] == {run().key: run()}


def test_a_line_of_the_table() -> None:
    """Medians, ranges, and what cells may not hold."""
    runs = [
        run(detected=4.0, ready=20.0, requests=50, failed=5, alone=True, said="a | b"),
        run(seed=2, detected=6.0, ready=30.0, requests=50, failed=7, alone=False, lost=1),
    ]
    line = table.table(runs, "serve").splitlines()[2]

    assert line.split(" | ")[1:3] == ["2", "1"]
    assert "a \\| b" in line
    assert "5.0 s (4–6) | – | 25.0 s (20–30) (after `up`) | 12 of 100" in line


def test_the_report_names_what_is_bad_and_what_was_not_run() -> None:
    """With the seed, so that it can be done again."""
    text = table.report([run(lies=["`status` said whole"]), run(fault="disk", void="no disk")])

    assert "- `serve`, gcs, seed 1, node1: green while dead: `status` said whole" in text
    assert "`up`: 42 of 42 runs" in text
    assert "- `serve`, disk, seed 1: no disk" in text
    assert "| a disk of the head is full |" not in text


def test_the_page_keeps_what_is_around_the_table() -> None:
    """And a page without marks is refused."""
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"

    assert (
        table.replace_part(page, "new") == f"before\n{table.BEGIN}\n\nnew\n\n{table.END}\nafter\n"
    )
    with pytest.raises(ValueError, match="campaign: begin"):
        table.replace_part("nothing", "new")


def test_the_page_shows_the_results() -> None:
    """The table in the documentation is what the results file gives."""
    runs, _ = command.load_results(command.RESULTS)
    page = command.PAGE.read_text()

    assert table.replace_part(page, table.report(list(runs.values()))) == page


def test_a_void_run_may_be_replaced() -> None:
    """By the same key."""
    assert replace(run(), void="nothing").key == run().key
