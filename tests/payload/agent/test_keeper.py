"""The state machine of a server, with nodes, an engine and a clock that obey the test."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from launcher.payload.agent import keeper, monitor, needs, reservation, state
from launcher.payload.agent.desired import Desired, Ray
from launcher.payload.agent.health import Movement
from launcher.payload.agent.node import KEEP, PREPARE, RUN
from launcher.payload.agent.ray_view import Culprit, Rank
from tests.hostile import mutate
from tests.payload.agent import wanted
from tests.payload.agent.stage import KILLED, Clock, Engine, Node, Now, Stage

Make = Callable[..., Stage]
TWO = wanted.mp("gpu1", "gpu2")
AWAY = wanted.mp("gpu2", "gpu3")  # the head has no process of it


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for all that the keeper does."""
    made = Clock()
    for module in (keeper, monitor, needs, reservation):
        monkeypatch.setattr(module, "Background", Now)
    monkeypatch.setattr(state, "container", lambda: "first")
    monkeypatch.setattr(state.os, "fsync", lambda _: None)  # thousands of records
    return made


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Make:
    """Put a server on a stage."""
    return lambda want=TWO, *more: Stage(tmp_path, clock, want, *more)


@pytest.fixture
def ready(make: Make) -> Make:
    """Put a server on a stage, and let it answer."""

    def answered(want: Desired = TWO, *more: str) -> Stage:
        stage = make(want, *more)
        stage.until("ready")
        stage.run(10)
        return stage

    return answered


def policy(**more: Any) -> Any:
    return dataclasses.replace(wanted.POLICY, **more)


# ---- the first start -----------------------------------------------------------------------------


def test_a_server_starts_and_answers(make: Make) -> None:
    """From what is wanted to the first answer; what has answered is remembered."""
    stage = make()
    seen = stage.until("ready")

    assert [state for state, _ in stage.told] == sorted(
        {each for each, _ in stage.told}, key=("waiting starting ready").find
    )
    assert (seen.generation, seen.faults, seen.restarts_left, seen.doing) == (1, [], None, "")
    assert seen.first_start is not None and 3 <= seen.first_start <= 4
    assert stage.history == ["abcd1234"]


@pytest.mark.parametrize(
    ("each", "more", "ranks"),
    [
        (1, {}, [["PP0"], ["PP1"]]),
        (1, {"tp": 2}, [["TP0"], ["TP1"]]),
        (2, {"tp": 2}, [["TP0 PP0", "TP1 PP0"], ["TP0 PP1", "TP1 PP1"]]),
        (4, {"tp": 4, "replicas": 2}, [["DP0"], ["DP1"]]),
    ],
)
def test_what_each_node_holds(
    ready: Make, each: int, more: dict[str, int], ranks: list[list[str]]
) -> None:
    """The ranks in their order, by the names that vLLM gives them; of replicas, the whole of
    each.
    """
    processes = tuple(
        wanted.process(f"gpu{at + 1}", replicas=(at if "replicas" in more else 0, 1))
        for at in range(2)
    )
    stage = ready(
        wanted.mp("gpu1", "gpu2", processes=processes, places={"gpu1": each, "gpu2": each}, **more)
    )

    assert stage.seen.ranks == {"gpu1": ranks[0], "gpu2": ranks[1]}


def test_nothing_runs_before_all_nodes_are_there(make: Make) -> None:
    """However long it takes; which one is waited for is said."""
    stage = make()
    stage.lead.away["gpu2"] = ""
    stage.run(1000, step=5)
    assert (stage.seen.state, stage.seen.doing) == ("waiting", "waiting for the agent of gpu2")
    assert stage.lead.nodes["gpu1"].last == 0

    stage.lead.away.clear()
    stage.until("ready")


def test_what_is_ordered(make: Make) -> None:
    """First to look whether it could start, then to start, then only to go on.

    An agent whose container starts anew must not start its part alone.
    """
    stage = make()
    phases = []
    while stage.keeper.seen is None or stage.keeper.seen.state != "ready":
        stage.step()
        if stage.phases and (not phases or phases[-1] != stage.phases):
            phases.append(stage.phases)

    assert phases == [dict.fromkeys(("gpu1", "gpu2"), phase) for phase in (PREPARE, RUN, KEEP)]
    assert {each.generation for each in stage.orders.values()} == {1}


def test_what_a_process_is_given(make: Make) -> None:
    """Its own GPUs by the variable that names them, and the API's address where the first one
    runs.
    """
    first = wanted.process("gpu1", "vllm", "serve", env={"A": "b"}, gpus=(2, 3))
    stage = make(
        wanted.mp(
            "gpu1",
            "gpu2",
            processes=(first, wanted.process("gpu2")),
            visible="CUDA_VISIBLE_DEVICES",
            memory_share=0.9,
        )
    )
    stage.until("starting")
    one, two = stage.orders["gpu1"], stage.orders["gpu2"]

    assert (one.argv, one.env, one.gpus) == (
        ("vllm", "serve"),
        {"A": "b", "CUDA_VISIBLE_DEVICES": "2,3"},
        (2, 3),
    )
    assert (two.env, two.gpus) == ({}, None)
    assert (one.api, two.api, one.share) == (("127.0.0.1", 8000), None, 0.9)


def test_memory_that_somebody_holds_is_waited_for(make: Make) -> None:
    """With the words of the node, for somebody has to end that process."""
    stage = make()
    stage.lead.nodes[
        "gpu2"
    ].waits = "GPU 0 has 70.0 of 80.0 GiB in use, by python3 (pid 7, 70.0 GiB)"
    stage.run(100)
    assert stage.seen.state == "waiting"
    assert (
        stage.seen.doing == "gpu2: GPU 0 has 70.0 of 80.0 GiB in use, by python3 (pid 7, 70.0 GiB)"
    )

    stage.lead.nodes["gpu2"].waits = ""
    stage.until("ready")


def test_a_first_start_has_no_deadline(make: Make) -> None:
    """Whoever waits for it has one; weights may come from far away."""
    stage = make()
    stage.engine.takes = 7200
    stage.run(7000, step=5)
    assert (stage.seen.state, stage.seen.faults) == ("starting", [])

    stage.until("ready", within=400, step=5)


def test_a_first_start_that_fails_is_not_tried_again(make: Make) -> None:
    """A typo stays one: it failed, with the cause; asking again, with whatever words, starts
    again.
    """
    stage = make()
    stage.until("starting")
    stage.step()
    stage.kill(
        "gpu2",
        "ended with exit code 1",
        "ValueError: the model `m0del` does not exist",
        "some lines",
    )
    seen = stage.until("failed")
    stage.run(3600, step=10)

    assert (
        seen.doing
        == "it never answered: vLLM's process on gpu2 ended with exit code 1: ValueError: the model"
        " `m0del` does not exist"
    )
    assert (stage.seen.state, stage.seen.generation, stage.orders, stage.history) == (
        "failed",
        1,
        {},
        [],
    )
    assert {each.state for each in stage.lead.nodes.values()} == {"idle"}
    stage.want(dataclasses.replace(TWO, asked=2.0))
    stage.until("ready")
    assert (stage.seen.generation, stage.seen.faults) == (2, [])


# ---- faults and restarts -------------------------------------------------------------------------


def test_a_killed_rank_is_named_and_all_start_anew(ready: Make) -> None:
    """What is left of the engine ends first; then a pause, then all of it again."""
    stage = ready()
    stage.kill("gpu2", evidence="some lines")
    seen = stage.until("pausing")
    (fault,) = seen.faults
    assert {each.state for each in stage.lead.nodes.values()} == {"idle"}
    assert (fault.what, fault.node, fault.rank, fault.evidence) == (
        f"vLLM's process on gpu2 {KILLED}",
        "gpu2",
        "1",
        "some lines",
    )
    assert seen.next_start == pytest.approx(fault.at + 5.0)

    stage.until("ready")
    (fault,) = stage.seen.faults
    assert list(fault.phases) == ["stopped", "whole", "started"]
    assert fault.phases["stopped"] <= 5.0 <= fault.phases["whole"] <= fault.phases["started"]
    assert fault.ready_again_after is not None and fault.ready_again_after > fault.phases["started"]
    assert (stage.seen.generation, len(stage.seen.restarts), stage.seen.fault_count) == (2, 1, 1)


def test_no_engine_starts_before_the_last_one_has_ended(ready: Make) -> None:
    """It would find the other's memory taken."""
    stage = ready()
    stage.lead.nodes["gpu1"].slow = 40.0
    stage.kill("gpu2")
    stage.run(39)
    assert (stage.seen.state, stage.lead.nodes["gpu2"].last) == ("stopping", 1)

    stage.until("ready")
    assert stage.lead.nodes["gpu2"].last == 2


def test_a_single_process_is_vllm(ready: Make) -> None:
    """No rank and no node to name; its first error is the cause, and not its last line."""
    stage = ready(wanted.mp("gpu1"))
    stage.kill(
        "gpu1",
        "ended with exit code 1",
        "torch.OutOfMemoryError: CUDA out of memory",
        "…\nEngineDeadError",
    )
    (fault,) = stage.until("pausing").faults

    assert (fault.what, fault.cause) == (
        "vLLM ended with exit code 1",
        "torch.OutOfMemoryError: CUDA out of memory",
    )
    assert (fault.node, fault.rank, fault.evidence) == ("", "", "…\nEngineDeadError")


def test_of_several_deaths_the_nearest_to_the_cause_is_told(ready: Make) -> None:
    """The others end with it, and may be noticed first."""
    stage = ready()
    stage.kill("gpu1", "ended with exit code 1")
    stage.step()
    stage.kill("gpu2")
    (fault,) = stage.until("pausing").faults

    assert (fault.what, fault.node) == (f"vLLM's process on gpu2 {KILLED}", "gpu2")


def starts(stage: Stage, times: int) -> list[float]:
    """Let each start fail; return how long each pause was."""
    pauses = []
    for _ in range(times):
        stage.until("starting", within=700)
        stage.step()
        stage.kill("gpu2")
        stage.until("stopping", "pausing")
        pauses.append(stage.seen.faults[-1].pause)
    return pauses


def test_pauses_grow_and_go_on_for_ever(ready: Make) -> None:
    """What kills an engine may still be there; a server that has answered comes back by itself when
    it is not.
    """
    stage = ready()
    stage.kill("gpu2")
    pauses = starts(stage, 9)

    assert stage.seen.faults[0].pause == 5.0
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]
    assert stage.seen.state in ("stopping", "pausing")
    stage.until("ready", within=700)
    assert all(each.ready_again_after is not None for each in stage.seen.faults)
    assert stage.seen.faults[0].ready_again_after > stage.seen.faults[-1].ready_again_after  # type: ignore[operator]


@pytest.mark.parametrize(("lasted", "pause"), [(500.0, 10.0), (700.0, 5.0)])
def test_a_server_that_lasted_begins_anew(ready: Make, lasted: float, pause: float) -> None:
    """After ten minutes of being ready, a fault is no part of the streak before."""
    stage = ready()
    stage.kill("gpu2")
    stage.until("pausing")
    stage.until("ready")
    stage.run(lasted, step=5)
    stage.kill("gpu2")
    stage.until("pausing")

    assert stage.seen.faults[-1].pause == pause


def test_a_cap_of_restarts(ready: Make) -> None:
    """Then it gives up, with the last fault, until somebody asks anew; nothing runs."""
    stage = ready(wanted.mp("gpu1", "gpu2", policy=policy(restarts=2)))
    assert stage.seen.restarts_left == 2
    stage.kill("gpu2")
    starts(stage, 2)
    seen = stage.until("gave-up")
    stage.run(100)

    assert (seen.restarts_left, seen.generation, stage.orders) == (0, 3, {})
    assert seen.doing == f"no restart is left of 2; the last fault: vLLM's process on gpu2 {KILLED}"
    assert (stage.seen.state, {each.state for each in stage.lead.nodes.values()}) == (
        "gave-up",
        {"idle"},
    )
    stage.want(dataclasses.replace(stage.wanted, asked=2.0))
    assert stage.until("ready").restarts_left == 2


def test_restarts_are_forgotten_after_a_while(ready: Make) -> None:
    """A cap is for an hour: one death a day needs nobody."""
    stage = ready(wanted.mp("gpu1", "gpu2", policy=policy(restarts=1)))
    for _ in range(3):
        stage.kill("gpu2")
        stage.until("pausing")
        stage.until("ready")
        stage.run(3700, step=10)

    assert (stage.seen.restarts_left, stage.seen.fault_count) == (1, 3)


def test_without_supervision_nothing_is_ended_or_started_again(ready: Make) -> None:
    """An engine that hangs is left to whoever looks after it; one that ends has failed."""
    stage = ready(wanted.mp("gpu1", "gpu2", policy=policy(restarts=0)))
    stage.engine.answers = stage.engine.works = False
    stage.run(1000, step=5)
    assert (stage.seen.state, stage.seen.faults) == ("ready", [])
    assert stage.seen.still > 900

    stage.kill("gpu2")
    seen = stage.until("failed")
    stage.run(1000, step=5)
    assert (seen.doing, len(seen.faults)) == (f"vLLM's process on gpu2 {KILLED}", 1)
    assert (stage.seen.state, stage.seen.generation, stage.orders) == ("failed", 1, {})


@pytest.mark.parametrize(("takes", "limit"), [(10.0, 100), (80.0, 160)])
def test_a_restart_has_a_deadline(make: Make, takes: float, limit: int) -> None:
    """Twice what the first start took, and the time that is given for a start at least."""
    stage = make()
    stage.engine.takes = takes
    stage.until("ready", within=100)
    stage.engine.takes = 10_000
    stage.kill("gpu2")
    stage.until("pausing")
    stage.until("starting")
    stage.run(limit - 1)
    assert stage.seen.state == "starting"
    stage.until("stopping", within=3)

    assert stage.seen.faults[-1].what.startswith(f"no answer within {limit}") or limit == 160
    assert stage.seen.faults[-1].what.endswith("s of a restart")


# ---- what is wanted ------------------------------------------------------------------------------


def test_stop(ready: Make) -> None:
    """It is stopped when nothing of it runs; that is no fault."""
    stage = ready()
    stage.lead.nodes["gpu2"].slow = 8.0
    stage.want(None)
    stage.run(5)
    assert (stage.seen.state, stage.seen.doing, stage.orders) == ("stopping", "it was stopped", {})

    assert stage.until("stopped").faults == []
    assert {each.state for each in stage.lead.nodes.values()} == {"idle"}
    assert stage.history == ["abcd1234"]


@pytest.mark.parametrize("when", ["waiting", "starting", "stopping", "pausing", "failed"])
def test_stop_at_any_time(make: Make, when: str) -> None:
    """Whatever is being done just then."""
    stage = make()
    if when == "failed":
        stage.until("starting")
        stage.step()
        stage.kill("gpu2")
    elif when in ("stopping", "pausing"):
        stage.until("ready")
        stage.lead.nodes["gpu1"].slow = 5.0
        stage.kill("gpu2")
    elif when == "waiting":
        stage.lead.nodes["gpu2"].waits = "x"
    stage.until(when)
    stage.want(None)
    stage.until("stopped")
    stage.run(20)

    assert stage.seen.state == "stopped"
    assert {each.state for each in stage.lead.nodes.values()} == {"idle"}


def test_a_stop_waits_for_what_was_ordered_a_moment_ago(ready: Make) -> None:
    """A node that has not carried out its last orders may still be about to start something."""
    stage = ready()
    stage.lead.late.add("gpu2")
    stage.want(None)
    stage.run(20)
    assert stage.seen.state == "stopping"

    stage.lead.late.clear()
    stage.until("stopped")


def test_stop_without_a_node_that_cannot_be_asked(ready: Make) -> None:
    """It may come back in a moment; after that it is said, for what runs there ends only when it is
    back.
    """
    stage = ready()
    stage.lead.away["gpu2"] = ""
    stage.want(None)
    stage.run(25)
    assert stage.seen.state == "stopping"

    assert (
        stage.until("stopped").doing
        == "gpu2 could not be asked: what runs there ends when it is back"
    )
    assert stage.lead.nodes["gpu2"].state == "running"
    stage.lead.away.clear()
    stage.run(2)
    assert stage.lead.nodes["gpu2"].state == "idle"


def test_another_server_takes_its_place(ready: Make) -> None:
    """The old engine has ended before the new one starts; numbers of engines go on, and its faults
    are its own.
    """
    stage = ready()
    stage.kill("gpu2")
    stage.until("pausing")
    stage.until("ready")
    stage.lead.nodes["gpu2"].slow = 20.0
    stage.want(wanted.mp("gpu1", "gpu2", id="other", model="n", asked=2.0))
    stage.run(15)
    assert (stage.seen.state, stage.seen.doing, stage.seen.id) == (
        "stopping",
        "another server takes its place",
        "abcd1234",
    )
    assert stage.lead.nodes["gpu1"].last == 2

    seen = stage.until("ready")
    assert (seen.id, seen.model, seen.generation, seen.faults) == ("other", "n", 3, [])
    assert stage.history == ["other", "abcd1234"]


def test_the_same_wish_again_changes_nothing(ready: Make) -> None:
    """A launcher that tries again writes the same file."""
    stage = ready()
    stage.want(TWO)
    os.utime(stage.folder / "chat" / "desired.json", (1, 1))
    stage.run(20)

    assert (stage.seen.state, stage.seen.generation, stage.seen.faults) == ("ready", 1, [])


def test_a_wish_that_changes_twice(ready: Make) -> None:
    """The last word counts, also while the engine before ends."""
    stage = ready()
    stage.lead.nodes["gpu2"].slow = 20.0
    stage.want(wanted.mp("gpu1", "gpu2", id="other", asked=2.0))
    stage.run(5)
    stage.want(wanted.mp("gpu1", "gpu2", id="third", asked=3.0))
    stage.until("ready")

    assert (stage.seen.id, stage.history, stage.seen.generation) == (
        "third",
        ["third", "abcd1234"],
        2,
    )


def test_a_wish_of_another_version_is_not_acted_on(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said, and nothing starts."""
    stage = make()
    state.write(str(stage.folder / "chat" / "desired.json"), {"version": 1})
    stage.run(5)

    assert (stage.keeper.seen, stage.orders) == (None, {})
    assert "version 1 of a server is not known here" in capsys.readouterr().out


def test_a_server_that_was_stopped_while_no_agent_was_here(ready: Make) -> None:
    """Its record says so, instead of being ready for ever."""
    stage = ready()
    stage.want(None)
    stage.boot()
    stage.run(2)

    assert stage.seen.state == "stopped"


# ---- a head that starts again --------------------------------------------------------------------


def reboot(stage: Stage) -> None:
    """Let the head's container end, with what runs in it, and start again."""
    stage.lead.nodes["gpu1"] = Node(boot="b2")
    stage.lead.said.clear()
    stage.boot().turn()


def test_a_head_that_was_restarted(ready: Make) -> None:
    """The engine ended with it: a fault, but none of the engine's doing where it had worked for
    long, so it starts at once.
    """
    stage = ready()
    stage.run(60)
    reboot(stage)
    stage.until("starting", within=5)
    seen = stage.until("ready")
    (fault,) = seen.faults

    assert (fault.what, fault.node, fault.pause, fault.lost) == (
        "the head's container was restarted",
        "gpu1",
        0.0,
        None,
    )
    assert (seen.generation, stage.lead.nodes["gpu2"].last) == (2, 2)


def test_a_head_that_is_restarted_again_and_again(ready: Make) -> None:
    """An engine may end the head's container each time that it works: pauses grow, and a cap of
    restarts holds.
    """
    stage = ready(wanted.mp("gpu1", "gpu2", policy=policy(restarts=3)))
    pauses = []
    for _ in range(4):
        reboot(stage)
        stage.until("starting", "gave-up", within=60)
        pauses.append(stage.seen.faults[-1].pause)
        if stage.seen.state == "starting":
            stage.until("ready")

    assert (pauses, stage.seen.state) == ([5.0, 10.0, 20.0, 40.0], "gave-up")


def test_a_head_that_is_restarted_between_deaths(ready: Make) -> None:
    """It is no way round the pause of a server whose engine dies again and again."""
    stage = ready()
    stage.kill("gpu2")
    starts(stage, 2)
    stage.until("ready")
    reboot(stage)
    stage.until("pausing")

    assert stage.seen.faults[-1].what == "the head's container was restarted"
    assert stage.seen.faults[-1].pause >= 20.0


def test_a_head_that_was_replaced(ready: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody gave it another image: no fault and no restart; what comes then counts again."""
    stage = ready(wanted.mp("gpu1", "gpu2", policy=policy(restarts=0)))
    monkeypatch.setattr(state, "container", lambda: "second")
    reboot(stage)
    seen = stage.until("ready")
    assert (seen.generation, seen.faults, seen.restarts, seen.container) == (2, [], [], "second")

    reboot(stage)
    assert stage.until("failed").doing == "the head's container was restarted"


@pytest.mark.parametrize("known", ["before", "now"])
def test_a_head_of_which_nobody_knows_whether_it_was_replaced(
    ready: Make, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """Counts as one that was restarted: else one that crashes for ever would be served on for
    ever.
    """
    monkeypatch.setattr(state, "container", lambda: "x" if known == "before" else "")
    stage = ready()
    monkeypatch.setattr(state, "container", lambda: "" if known == "before" else "x")
    reboot(stage)
    stage.until("ready")

    assert len(stage.seen.faults) == 1


def test_a_head_that_restarts_during_the_first_start(make: Make) -> None:
    """It begins again: nothing had answered yet, and nothing is a fault."""
    stage = make()
    stage.until("starting")
    reboot(stage)
    seen = stage.until("ready")

    assert (seen.generation, seen.faults) == (2, [])


@pytest.mark.parametrize("when", ["pausing", "stopping", "waiting"])
def test_a_head_that_restarts_while_the_server_is_down(ready: Make, when: str) -> None:
    """It goes on where it was; the fault is counted once."""
    stage = ready()
    stage.lead.nodes["gpu1"].slow = 3.0
    stage.kill("gpu2")
    stage.until(when)
    reboot(stage)
    stage.until("ready")

    assert (len(stage.seen.faults), stage.seen.generation) == (1, 2)
    assert stage.seen.faults[0].ready_again_after is not None


@pytest.mark.parametrize("over", ["failed", "gave-up"])
def test_what_is_over_stays_over(make: Make, over: str) -> None:
    """A restart of the head would turn what needs somebody into a loop."""
    stage = make(wanted.mp("gpu1", "gpu2", policy=policy(restarts=1)))
    if over == "gave-up":
        stage.until("ready")
        stage.kill("gpu2")
        starts(stage, 1)
    else:
        stage.until("starting")
        stage.step()
        stage.kill("gpu2")
    doing = stage.until(over).doing
    reboot(stage)
    stage.run(100)

    assert (stage.seen.state, stage.seen.doing, stage.orders) == (over, doing, {})


def test_an_engine_that_outlives_the_heads_agent(ready: Make) -> None:
    """It has no process on the head: it served on, and is kept as it is."""
    stage = ready(AWAY)
    reboot(stage)
    stage.lead.away["gpu3"] = ""
    stage.run(20)
    assert (stage.seen.state, stage.phases) == ("waiting", dict.fromkeys(("gpu2", "gpu3"), KEEP))
    assert stage.seen.doing == "looking for the engine that ran before: gpu3 cannot be asked yet"

    stage.lead.away.clear()
    stage.until("ready", within=2)
    stage.run(20)
    assert (stage.seen.state, stage.seen.generation, stage.seen.faults) == ("ready", 1, [])
    assert [stage.lead.nodes[node].last for node in ("gpu2", "gpu3")] == [1, 1]


def test_an_agent_that_has_not_reported_yet_has_not_said_that_nothing_runs(ready: Make) -> None:
    """It is connected, and its first report is on its way: what cannot be asked is unknown."""
    stage = ready(AWAY)
    reboot(stage)
    stage.lead.late.add("gpu3")
    stage.lead.stale.add("gpu3")
    stage.run(20)
    assert (stage.seen.state, stage.phases) == ("waiting", dict.fromkeys(("gpu2", "gpu3"), KEEP))

    stage.lead.late.clear()
    stage.lead.stale.clear()
    stage.until("ready", within=2)
    assert (stage.seen.generation, stage.seen.faults) == (1, [])


def test_an_engine_that_did_not_outlive_it(ready: Make) -> None:
    """A part of it has ended meanwhile: all of it starts anew."""
    stage = ready(AWAY)
    stage.lead.nodes["gpu3"] = Node(boot="b2")
    reboot(stage)
    stage.until("ready", within=30)

    assert (stage.seen.generation, len(stage.seen.faults)) == (2, 1)
    assert [stage.lead.nodes[node].last for node in ("gpu2", "gpu3")] == [2, 2]


# ---- health --------------------------------------------------------------------------------------


def test_a_node_that_cannot_be_asked_ends_nothing_while_work_is_done(ready: Make) -> None:
    """The control network had a hiccup; that the node is away is said."""
    stage = ready()
    stage.lead.away["gpu2"] = "its connection was closed"
    stage.run(1000, step=5)
    assert (stage.seen.state, stage.seen.faults) == ("ready", [])
    assert "gpu2 cannot be asked" in stage.seen.doing

    stage.lead.away.clear()
    stage.run(5)
    assert (stage.seen.state, stage.seen.doing, stage.seen.generation) == ("ready", "", 1)


def test_a_node_that_is_gone_with_its_rank(ready: Make) -> None:
    """No answer and no counter for three canaries, though the other ranks are busy waiting for
    it.
    """
    stage = ready()
    stage.lead.away["gpu2"] = "it has been silent for 60 s"
    stage.engine.answers = False
    stage.run(14)
    assert stage.seen.state == "ready"
    stage.until("stopping", within=4)
    (fault,) = stage.seen.faults

    assert (fault.what, fault.node, fault.rank) == ("gpu2 is gone", "gpu2", "1")
    assert fault.evidence == "its agent: it has been silent for 60 s"
    stage.run(60)
    assert (stage.seen.state, stage.seen.doing) == ("waiting", "waiting for the agent of gpu2")
    stage.lead.nodes["gpu2"] = Node(boot="b2")
    stage.lead.away.clear()
    stage.until("ready")


def test_a_node_that_may_come_back_in_a_moment(ready: Make) -> None:
    """Its connection was closed just now: that alone says nothing, whatever else stands still."""
    stage = ready()
    stage.lead.away["gpu2"] = ""
    stage.engine.answers = False
    stage.run(60)

    assert (stage.seen.state, stage.seen.faults) == ("ready", [])


def test_a_container_that_was_started_anew(ready: Make) -> None:
    """Its rank is gone with it, however quickly its agent is back; it is not started alone."""
    stage = ready()
    stage.lead.nodes["gpu2"] = Node(boot="b2")
    stage.step()
    assert stage.lead.nodes["gpu2"].state == "idle"
    stage.until("pausing")
    assert (stage.seen.faults[0].what, stage.seen.faults[0].node) == (
        "the container of gpu2 was started anew",
        "gpu2",
    )

    stage.until("ready")
    assert [stage.lead.nodes[node].last for node in ("gpu1", "gpu2")] == [2, 2]


def test_a_server_that_stands_still_is_doubted_first(ready: Make) -> None:
    """The record says so long before it is ended, and takes it back when anything moves."""
    stage = ready()
    stage.engine.answers = stage.engine.works = False
    stage.run(290)
    assert (stage.seen.state, stage.seen.faults) == ("ready", [])
    assert stage.seen.doing.startswith("nothing has moved for 2")
    assert (stage.seen.still > 280, stage.seen.asking > 280) == (True, True)

    stage.engine.works = True
    stage.step()
    stage.engine.works = False
    stage.run(200)
    assert (stage.seen.state, stage.seen.faults) == ("ready", [])
    stage.engine.answers = stage.engine.works = True
    stage.run(6)
    assert (stage.seen.state, stage.seen.doing, stage.seen.still) == ("ready", "", 0.0)


def test_a_server_that_stands_still_for_long_is_dead(ready: Make) -> None:
    """Nothing at all moved for as long as the policy says."""
    stage = ready()
    stage.engine.answers = stage.engine.works = False
    stage.run(298)
    assert stage.seen.state == "ready"
    seen = stage.until("stopping", within=5)

    assert seen.faults[0].what.startswith("nothing has moved for 300 s: no answer, no counter")
    stage.engine = Engine()
    stage.until("ready")


@pytest.mark.parametrize("sign", ["answers", "works", "gpu"])
def test_anything_that_moves_is_life(ready: Make, sign: str) -> None:
    """Canaries under load stand in the queue for minutes; a long step moves no counter, but a GPU
    or a CPU is busy.
    """
    stage = ready()
    stage.engine.answers, stage.engine.works = sign == "answers", sign == "works"
    if sign == "gpu":
        stage.lead.nodes["gpu2"].more = {"busy": 90.0}
    stage.run(1000, step=2)

    assert (stage.seen.state, stage.seen.faults, stage.seen.still) == ("ready", [], 0.0)


def test_gpus_are_asked_only_of_a_server_that_seems_to_stand_still(ready: Make) -> None:
    """It costs a program each time."""
    stage = ready()
    assert not any(each.busy for each in stage.orders.values())
    stage.engine.answers = stage.engine.works = False
    stage.run(15)
    assert all(each.busy for each in stage.orders.values())


def test_what_nobody_can_look_at_does_not_stand_still(ready: Make) -> None:
    """No processes are known: late canaries alone kill nothing."""
    stage = ready()
    monitored = stage.keeper._engine()
    monitored.movement = Movement(stage.clock.now, monitored.parts)
    for node in stage.lead.nodes.values():
        node.more = {"work": {}}
    stage.engine.answers = stage.engine.works = False
    stage.run(1000, step=2)

    assert (stage.seen.state, stage.seen.faults) == ("ready", [])


@pytest.mark.parametrize("node", ["gpu1", "gpu2"])
def test_an_agent_that_is_silent_makes_nothing_stand_still(
    make: Make, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said last is no news: it is stopped, or the network swallows its words."""
    stage = make(
        wanted.mp("gpu2", "gpu3", addresses={"gpu2": "10.0.0.2"}) if node == "gpu1" else AWAY
    )
    monkeypatch.setattr(monitor, "Probe", lambda *_: Eye({}))
    stage.until("ready")
    stage.run(10)
    stage.lead.stale |= {"gpu2", "gpu3"}
    stage.run(1000, step=2)

    assert (stage.seen.state, stage.seen.faults) == ("ready", [])


class Eye:
    """Stands in for the probe that the head itself sends out."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said, self.stopped = said, False

    def report(self) -> dict[str, Any]:
        """Return what it saw."""
        return self.said

    def stop(self) -> None:
        """Look no more."""
        self.stopped = True


@pytest.mark.parametrize(
    ("bound", "host"), [("0.0.0.0", "10.0.0.2"), ("::", "10.0.0.2"), ("192.0.2.7", "192.0.2.7")]
)
def test_an_api_whose_agent_is_silent_is_asked_from_here(
    ready: Make, monkeypatch: pytest.MonkeyPatch, bound: str, host: str
) -> None:
    """It serves on, and the record goes on saying so; when the agent is back, it is believed
    again.
    """
    asked: list[Any] = []
    eye = Eye({})
    monkeypatch.setattr(monitor, "Probe", lambda *words: asked.append(words) or eye)
    stage = ready(wanted.mp("gpu2", addresses={"gpu2": "10.0.0.2"}, host=bound))
    stage.lead.stale.add("gpu2")
    for _ in range(100):
        eye.said = stage.probe()
        stage.step(5)
    assert asked == [(host, 8000, 1, 5.0)]
    assert (stage.seen.state, stage.seen.doing) == ("ready", "the agent of gpu2 cannot be asked")
    assert stage.seen.answered is not None and stage.clock.time() - stage.seen.answered < 6

    stage.lead.stale.clear()
    stage.run(5)
    assert (stage.seen.doing, eye.stopped) == ("", True)


@pytest.mark.parametrize("rests", ["it sleeps", "it is paused", "it is being rescaled"])
def test_a_server_that_rests_is_left_alone(ready: Make, rests: str) -> None:
    """Somebody wants it so; when it wakes, it has all the time that a server has."""
    stage = ready()
    stage.engine = Engine(answers=False, works=False, rests=rests)
    stage.run(1000, step=2)
    assert (stage.seen.state, stage.seen.faults, stage.seen.doing) == (
        "ready",
        [],
        f"{rests}: left alone",
    )

    stage.engine.rests = ""
    stage.run(290)
    assert (stage.seen.state, stage.seen.faults) == ("ready", [])


def replicas() -> Desired:
    """Two replicas, one on each node."""
    processes = tuple(wanted.process(f"gpu{at + 1}", replicas=(at, 1)) for at in range(2))
    return wanted.mp("gpu1", "gpu2", processes=processes, replicas=2)


def test_a_replica_that_stands_still_is_dead(ready: Make) -> None:
    """Though the other one answers meanwhile: half of all requests would never come back."""
    stage = ready(replicas())
    still = {"work": {"": 7, "1": 7}, "lines": {"": 7, "1": 7}}
    stage.lead.nodes["gpu2"].more = still
    stage.run(295)
    assert stage.seen.doing.startswith("nothing of replica 1 has moved for ")
    seen = stage.until("stopping", within=10)

    assert seen.faults[0].what.startswith("nothing of replica 1 has moved for 300 s")


def test_a_replica_that_nobody_can_tell_from_its_node(ready: Make) -> None:
    """Its processes have no names: all of the node's are its own."""
    stage = ready(replicas())
    stage.lead.nodes["gpu2"].more = {"work": {"": 7}, "lines": {"": 7}}
    stage.until("stopping", within=310, step=1)

    assert "of replica 1" in stage.seen.faults[0].what


def test_an_answer_of_500_is_a_warning(ready: Make) -> None:
    """Other requests succeed: what is wrong may be with ours. It is taken back when one
    succeeds.
    """
    stage = ready()
    stage.engine.odd = [500, "grammar error"]
    stage.run(1000, step=2)
    assert (stage.seen.state, stage.seen.faults) == ("ready", [])
    assert stage.seen.warning == "our own completion was answered with 500: grammar error"

    stage.engine.odd = None
    stage.run(2)
    assert stage.seen.warning == ""


@pytest.mark.parametrize("how", [{"health": 503}, {"odd": [500, "EngineDeadError: x"]}])
def test_an_engine_that_says_that_it_is_dead(ready: Make, how: dict[str, Any]) -> None:
    """Its API may live on for long; what it printed is the evidence."""
    stage = ready()
    stage.lead.nodes["gpu1"].more = {"evidence": "lines", "cause": "RuntimeError: x"}
    stage.engine = Engine(answers=False, **how)
    (fault,) = stage.until("stopping", within=3).faults

    assert (fault.what, fault.evidence, fault.cause) == (
        "the engine says that it is dead",
        "lines",
        "RuntimeError: x",
    )


def test_a_server_that_starts_may_say_503(make: Make) -> None:
    """It is not ready yet."""
    stage = make()
    stage.engine = Engine(takes=50, health=503)
    stage.run(40)
    assert (stage.seen.state, stage.seen.faults) == ("starting", [])


def test_a_busy_server_says_so(ready: Make) -> None:
    """What runs and waits, tokens per second, when the last answer came, and for how long the
    present one is waited for.
    """
    stage = ready()
    stage.engine.open, stage.engine.answers = 8, False
    stage.run(20)
    seen = stage.seen
    assert seen.load is not None

    assert (seen.load.running, seen.load.waiting) == (8, 1)
    assert (19 <= seen.asking <= 20.5, seen.answered is not None) == (True, True)


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ({"open": 3}, 3),
        ({"open": 0}, 0),
        ({"open": 1, "failed": 9.0}, 9),
        ({"counts": False}, None),
    ],
)
def test_lost_requests(ready: Make, how: dict[str, Any], lost: int | None) -> None:
    """What was open when it died, or was answered with 5xx since; unknown, not 0, where vLLM counts
    nothing.
    """
    stage = ready()
    failed = how.pop("failed", 0.0)
    stage.engine = Engine(**how)
    stage.keeper._engine()._well = stage.keeper._engine()._counted = None
    stage.run(10)
    if failed:
        stage.engine.failed, stage.engine.answers = failed, False
        stage.step()
    stage.kill("gpu2")

    assert stage.until("pausing").faults[0].lost == lost


def test_requests_that_were_lost_while_nobody_looked_are_unknown(ready: Make) -> None:
    """Figures of a minute ago say nothing."""
    stage = ready()
    stage.engine.open = 3
    stage.run(10)
    stage.engine.counts = False
    stage.run(60)
    stage.kill("gpu2")

    assert stage.until("pausing").faults[0].lost is None


def test_faults_that_are_kept_are_bounded(ready: Make) -> None:
    """A crash loop of days must not grow the file; how many there were is still known."""
    stage = ready(wanted.mp("gpu1", "gpu2", policy=policy(longest_pause=1.0)))
    stage.kill("gpu2", evidence="x" * 10_000)
    starts(stage, 30)

    assert (len(stage.seen.faults), stage.seen.fault_count) == (20, 31)
    assert all(len(each.evidence) <= 4000 for each in stage.seen.faults)


# ---- what is written down ------------------------------------------------------------------------


def test_the_record_is_never_old(ready: Make) -> None:
    """Whoever reads it knows that somebody looks, whatever the state."""
    stage = ready()
    for _ in range(30):
        stage.step(1.0)
        assert stage.clock.time() - stage.seen.written <= 6


def test_a_disk_that_is_full_ends_no_server(ready: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept without a record, also through a fault."""
    stage = ready()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "write", full)
    stage.kill("gpu2")
    stage.run(30)
    assert stage.keeper.seen is not None

    assert (stage.keeper.seen.state, stage.keeper.seen.generation, stage.seen.generation) == (
        "ready",
        2,
        1,
    )


@mutate.examples(40)
@given(chance=mutate.chances)
def test_whatever_agents_report(ready: Make, chance: mutate.Chance) -> None:
    """Nothing that another agent says ends the one that keeps all servers."""
    stage = ready(wanted.mp("gpu1", "gpu2", id=str(chance.number), asked=float(chance.number)))
    for node in ("gpu1", "gpu2"):
        good = {**stage.lead.said[node], "ranks": {"7": 1}, "busy": 0.0, "ended": "x"}
        stage.lead.said[node] = mutate.value(good, chance)
    for _ in range(8):
        stage.clock.now += 1
        stage.keeper.turn()
        for order in stage.keeper.orders().values():
            assert order.as_json()


def test_when_it_wants_to_be_asked_often(make: Make) -> None:
    """While something is about to be started or ended; not for as long as a node is waited for."""
    stage = make()
    stage.step()
    assert stage.keeper.changing
    assert stage.clock.time() - stage.seen.since < 1
    stage.until("ready")
    assert not stage.keeper.changing
    stage.want(None)
    stage.lead.nodes["gpu2"].slow = 5.0
    stage.step()
    assert stage.keeper.changing
    stage.until("stopped")
    stage.want(dataclasses.replace(TWO, asked=2.0))
    stage.lead.away["gpu2"] = ""
    stage.run(40)
    assert not stage.keeper.changing


# ---- Ray -----------------------------------------------------------------------------------------


class View:
    """Stands in for `RayView`."""

    lacks: Any = ""
    looked: list[int]
    found: Any = ()
    blamed: Culprit | None = None

    def __init__(self, *_: object) -> None:
        View.looked = []

    def lacking(self, looks: int) -> str:
        """Say what lacks."""
        View.looked.append(looks)
        if isinstance(View.lacks, Exception):
            raise View.lacks
        return str(View.lacks)

    def ranks(self, driver: int) -> list[Rank]:
        """Return the ranks."""
        assert driver == 100
        return list(View.found)

    def culprit(self, ranks: list[Rank], _: str) -> Culprit | None:
        """Return who died first."""
        assert ranks
        return View.blamed


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> type[View]:
    """What Ray says."""
    monkeypatch.setattr(keeper, "RayView", View)
    monkeypatch.setattr(View, "lacks", "")
    monkeypatch.setattr(View, "blamed", None)
    monkeypatch.setattr(
        View, "found", [Rank("a0", "PP0", "gpu1", 41), Rank("a1", "PP1", "gpu2", 42)]
    )
    return View


RAY = wanted.ray("gpu1", "gpu2")


def test_what_ray_lacks_is_waited_for(make: Make, view: type[View]) -> None:
    """And said; also that its dashboard does not answer."""
    stage = make(RAY)
    view.lacks = "waiting for gpu2 to be in Ray: 1 of 2 GPUs are"
    stage.run(10)
    assert (stage.seen.state, stage.seen.doing) == (
        "waiting",
        "waiting for gpu2 to be in Ray: 1 of 2 GPUs are",
    )
    view.lacks = OSError("refused")
    stage.run(10)
    assert stage.seen.doing == "waiting for Ray's dashboard to answer"
    view.lacks = ""
    stage.until("ready")
    assert set(view.looked) == {1}


def test_ray_is_asked_anew_for_another_server(make: Make, view: type[View]) -> None:
    """What it had for the one before says nothing of this one."""
    stage = make(RAY)
    stage.lead.nodes["gpu2"].waits = "GPU 0 has 1 GiB free"
    stage.run(10)
    assert view.looked
    stage.want(wanted.ray("gpu1", "gpu2", id="other", asked=2.0))
    view.lacks = "waiting for gpu2 to be in Ray: 1 of 2 GPUs are"
    stage.lead.nodes["gpu2"].waits = ""
    stage.run(10)

    assert (stage.seen.id, stage.seen.state, stage.seen.doing) == ("other", "waiting", view.lacks)


def test_after_a_death_it_is_looked_twice(ready: Make, view: type[View]) -> None:
    """Ray may take for alive what has just died."""
    stage = ready(RAY)
    view.looked.clear()
    stage.kill("gpu1")
    stage.until("pausing")
    stage.until("ready")

    assert set(view.looked) == {2}


def test_the_ranks_of_ray_are_watched(ready: Make, view: type[View]) -> None:
    """Each node is told the processes of its own; only the first one starts anything."""
    stage = ready(RAY)

    assert stage.seen.ranks == {"gpu1": ["PP0"], "gpu2": ["PP1"]}
    assert {node: each.pids for node, each in stage.orders.items()} == {
        "gpu1": (41,),
        "gpu2": (42,),
    }
    assert (stage.orders["gpu2"].argv, stage.phases) == ((), {"gpu1": KEEP, "gpu2": KEEP})


def test_ray_is_asked_until_it_has_all_ranks(make: Make, view: type[View]) -> None:
    """Engines are in it before their ranks, and one replica's before the other's; until then what
    it said last counts.
    """
    stage = make(RAY)
    (first, second), view.found = view.found, [Rank("e0", "an engine", "gpu1", 40)]
    stage.until("ready")
    view.found = [*view.found, first]
    stage.run(12)
    assert stage.seen.ranks == {"gpu1": ["PP0"]}

    view.found = [*view.found, second]
    pids = set[tuple[int, ...]]()
    for _ in range(12):
        stage.step(1)
        pids.add(stage.orders["gpu1"].pids)
    assert stage.seen.ranks == {"gpu1": ["PP0"], "gpu2": ["PP1"]}
    assert pids == {(40, 41)}


def test_ranks_that_ray_does_not_tell_at_once_are_asked_for_again(
    make: Make, view: type[View]
) -> None:
    """Its dashboard is late."""
    found, view.found = view.found, []
    stage = make(RAY)
    stage.until("ready")
    stage.run(5)
    assert stage.seen.ranks == {}
    view.found = found
    stage.run(15)
    assert stage.seen.ranks == {"gpu1": ["PP0"], "gpu2": ["PP1"]}


def test_ranks_that_work_are_life(ready: Make, view: type[View]) -> None:
    """The engine's own process only waits for them."""
    stage = ready(RAY)
    stage.engine.answers = stage.engine.works = False
    for at in range(500):
        stage.lead.nodes["gpu2"].ranks = {"42": at}
        stage.step(2)
    assert (stage.seen.state, stage.seen.faults) == ("ready", [])

    stage.until("stopping", within=310, step=2)
    assert stage.seen.faults[0].what.startswith("nothing has moved for ")


def test_the_rank_that_died_first_is_named(ready: Make, view: type[View]) -> None:
    """Where Ray knows it, with its words; else what vLLM printed is all that is known."""
    stage = ready(RAY)
    view.blamed = Culprit("gpu2", "PP1", "Worker died: connection error code 2")
    stage.kill("gpu1", "ended with exit code 1", "", "some lines")
    (fault,) = stage.until("pausing").faults

    assert (fault.what, fault.node, fault.rank) == ("vLLM ended with exit code 1", "gpu2", "PP1")
    assert fault.cause == "a rank died: Worker died: connection error code 2"
    assert fault.evidence == "Worker died: connection error code 2\nsome lines"
    view.blamed = None
    stage.until("ready")
    stage.run(5)
    stage.kill("gpu1", "ended with exit code 1", "ValueError: x")
    fault = stage.until("pausing").faults[-1]
    assert (fault.node, fault.rank, fault.cause) == ("", "", "ValueError: x")


def test_a_node_with_ranks_of_ray_that_was_started_anew(ready: Make, view: type[View]) -> None:
    """Its ranks are gone with it, though the engine has not noticed."""
    stage = ready(RAY)
    stage.run(5)
    stage.lead.nodes["gpu2"] = Node(boot="b2")
    (fault,) = stage.until("stopping", within=5).faults

    assert (fault.what, fault.node, fault.rank) == (
        "the container of gpu2 was started anew",
        "gpu2",
        "PP1",
    )


def test_a_node_with_ranks_of_ray_that_is_gone(ready: Make, view: type[View]) -> None:
    """When the engine does no work without it."""
    stage = ready(RAY)
    stage.run(5)
    stage.lead.away["gpu2"] = "it has been silent for 60 s"
    stage.run(100)
    assert stage.seen.state == "ready"
    stage.engine.answers = False
    (fault,) = stage.until("stopping", within=20).faults

    assert (fault.what, fault.node, fault.rank) == ("gpu2 is gone", "gpu2", "PP1")


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Let Ray set GPUs aside as the last element of the list that is returned says, if it is a
    string: what it prints.
    """
    asked: list[Any] = ['{"gpus": {"10.0.0.2": [4, 5]}}']

    def say(*words: str) -> tuple[int, str]:
        said = asked[0]
        asked.append(words)
        return (0 if "gpus" in said else 1), f"noise of Ray\n{said}\n"

    monkeypatch.setattr(reservation, "_reserve", say)
    return asked


def reserving(**more: bool) -> Desired:
    """An mp server beside Ray, on a part of a node's GPUs."""
    return wanted.mp(
        "gpu1",
        "gpu2",
        places={"gpu1": 8, "gpu2": 2},
        addresses={"gpu1": "10.0.0.1", "gpu2": "10.0.0.2"},
        ray=Ray(dashboard=1, node_manager=2, gpus=10, reserve=True, **more),
        visible="CUDA_VISIBLE_DEVICES",
    )


def test_gpus_are_set_aside_in_ray(make: Make, reserve: list[Any]) -> None:
    """Which they are is what the processes may see; they are given back when it is stopped."""
    stage = make(reserving(partial=True))
    stage.until("ready")
    assert reserve[1:] == [("take", "chat", "10.0.0.1=8", "10.0.0.2=2")]
    assert (stage.orders["gpu2"].env, stage.orders["gpu2"].gpus) == (
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        (4, 5),
    )
    assert stage.orders["gpu1"].gpus is None

    stage.want(None)
    stage.until("stopped")
    assert reserve[-1] == ("free", "chat")


def test_gpus_that_ray_does_not_have_are_waited_for(make: Make, reserve: list[Any]) -> None:
    """Of a part of a node Ray must say which; of whole nodes there is no choice, and nobody waits
    for Ray.
    """
    reserve[0] = '{"error": "others hold them"}'
    stage = make(reserving(partial=True))
    stage.run(20)
    assert (stage.seen.state, stage.seen.doing) == (
        "waiting",
        "waiting for Ray to set its GPUs aside: others hold them",
    )
    reserve[0] = '{"gpus": {}}'
    stage.until("ready")


def test_whole_nodes_do_not_wait_for_ray(make: Make, reserve: list[Any]) -> None:
    """It is asked again now and then while the server runs: a Ray that starts anew has
    forgotten.
    """
    reserve[0] = "Traceback"
    stage = make(reserving())
    stage.until("ready")
    stage.run(100)
    asked = len(reserve)
    stage.run(100)

    assert 2 <= len(reserve) - asked <= 5
