"""The state machine of a server, with nodes, an engine and a clock that obey the test."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from typing import Any

import pytest
from hypothesis import given

from launcher.agent import records, state
from launcher.agent.node import KEEP, PREPARE, RUN, ServerReport
from launcher.agent.ray_view import Culprit
from tests.agent import specs
from tests.agent.specs import AWAY, RAY, TWO
from tests.agent.stage import KILLED, Make, Node, Stage, View
from tests.hostile import mutate


def policy(**fields: Any) -> Any:
    return dataclasses.replace(specs.POLICY, **fields)


# ---- the first start -----------------------------------------------------------------------------


def test_a_server_starts_and_answers(make: Make) -> None:
    """From what is wanted to the first answer; what has answered is remembered."""
    stage = make()
    status = stage.until("ready")

    assert [state for state, _ in stage.transitions] == sorted(
        {item for item, _ in stage.transitions}, key=("waiting starting ready").find
    )
    assert (status.generation, status.faults, status.restarts_left, status.doing) == (
        1,
        [],
        None,
        "",
    )
    assert status.first_start is not None and 3 <= status.first_start <= 4
    assert stage.history == ["abcd1234"]


def test_what_its_cache_holds_is_remembered(make: Make) -> None:
    """As soon as vLLM says it, and again when a restart makes it another one."""
    stage = make()
    stage.until("ready")
    assert _capacity(stage) == {}

    stage.engine.capacity = {"kv_cache_size_tokens": "65536"}
    stage.run(2)
    assert _capacity(stage) == {"kv_cache_size_tokens": "65536"}

    stage.kill("gpu2")
    stage.engine.capacity = {"kv_cache_size_tokens": "32768"}
    stage.until("starting")
    stage.until("ready")
    stage.run(2)
    assert _capacity(stage) == {"kv_cache_size_tokens": "32768"}
    assert stage.history == ["abcd1234"]


def _capacity(stage: Stage) -> object:
    return json.loads((stage.folder / "chat" / "history.json").read_text())[0]["held"]


@pytest.mark.parametrize(
    ("item", "extra", "ranks"),
    [
        (1, {}, [["PP0"], ["PP1"]]),
        (1, {"tp": 2}, [["TP0"], ["TP1"]]),
        (2, {"tp": 2}, [["TP0 PP0", "TP1 PP0"], ["TP0 PP1", "TP1 PP1"]]),
        (4, {"tp": 4, "replicas": 2}, [["DP0"], ["DP1"]]),
    ],
)
def test_what_each_node_holds(
    ready: Make, item: int, extra: dict[str, int], ranks: list[list[str]]
) -> None:
    """The ranks in their order, by the names that vLLM gives them; of replicas, the whole of
    each.
    """
    processes = tuple(
        specs.process(f"gpu{at + 1}", replicas=(at if "replicas" in extra else 0, 1))
        for at in range(2)
    )
    stage = ready(
        specs.mp("gpu1", "gpu2", processes=processes, places={"gpu1": item, "gpu2": item}, **extra)
    )

    assert stage.status.ranks == {"gpu1": ranks[0], "gpu2": ranks[1]}


def test_what_is_ordered(make: Make) -> None:
    """First to look whether it could start, then to start, then only to go on.

    An agent whose container starts anew must not start its part alone.
    """
    stage = make()
    phases = []
    while stage.keeper.status is None or stage.keeper.status.state != "ready":
        stage.step()
        if stage.phases and (not phases or phases[-1] != stage.phases):
            phases.append(stage.phases)

    assert phases == [dict.fromkeys(("gpu1", "gpu2"), phase) for phase in (PREPARE, RUN, KEEP)]
    assert {order.generation for order in stage.orders.values()} == {1}


def test_a_first_start_has_no_deadline(make: Make) -> None:
    """Whoever waits for it has one; weights may come from far away."""
    stage = make()
    stage.engine.takes = 7200
    stage.run(7000, step=5)
    assert (stage.status.state, stage.status.faults) == ("starting", [])

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
    status = stage.until("failed")
    stage.run(3600, step=10)

    assert (
        status.doing
        == "it never answered: vLLM's process on gpu2 ended with exit code 1: ValueError: the model"
        " `m0del` does not exist"
    )
    assert (stage.status.state, stage.status.generation, stage.orders, stage.history) == (
        "failed",
        1,
        {},
        [],
    )
    assert {node.state for node in stage.lead.nodes.values()} == {"idle"}
    stage.want(dataclasses.replace(TWO, asked=2.0))
    stage.until("ready")
    assert (stage.status.generation, stage.status.faults) == (2, [])


def test_a_head_that_has_lost_its_record_counts_on(ready: Make) -> None:
    """Nodes start nothing that they have started before: what they have had is ended, and the next
    generation is another one than any of theirs.
    """
    stage = ready()
    stage.kill("gpu2")
    stage.until("pausing")
    assert stage.until("ready").generation == 2

    (stage.folder / "chat" / "observed.json").unlink()
    stage.lead.nodes["gpu1"] = Node()
    stage.boot()
    status = stage.until("ready")
    assert (status.generation, stage.lead.nodes["gpu2"].last) == (3, 3)


# ---- faults and restarts -------------------------------------------------------------------------


def test_a_killed_rank_is_named_and_all_start_anew(ready: Make) -> None:
    """The rest of the engine stops first; then a pause, then a restart of all of it."""
    stage = ready()
    stage.kill("gpu2", evidence="some lines")
    status = stage.until("pausing")
    (fault,) = status.faults
    assert {node.state for node in stage.lead.nodes.values()} == {"idle"}
    assert (fault.what, fault.node, fault.rank, fault.evidence) == (
        f"vLLM's process on gpu2 {KILLED}",
        "gpu2",
        "1",
        "some lines",
    )
    assert status.next_start == pytest.approx(fault.at + 5.0)

    stage.until("ready")
    (fault,) = stage.status.faults
    assert list(fault.phases) == ["stopped", "whole", "started"]
    assert fault.phases["stopped"] <= 5.0 <= fault.phases["whole"] <= fault.phases["started"]
    assert fault.ready_again_after is not None and fault.ready_again_after > fault.phases["started"]
    assert (stage.status.generation, len(stage.status.restarts), stage.status.fault_count) == (
        2,
        1,
        1,
    )


def test_no_engine_starts_before_the_last_one_has_ended(ready: Make) -> None:
    """It would find the other's memory taken."""
    stage = ready()
    stage.lead.nodes["gpu1"].slow = 40.0
    stage.kill("gpu2")
    stage.run(39)
    assert (stage.status.state, stage.lead.nodes["gpu2"].last) == ("stopping", 1)

    stage.until("ready")
    assert stage.lead.nodes["gpu2"].last == 2


def test_a_single_process_is_vllm(ready: Make) -> None:
    """No rank and no node to name; its first error is the cause, and not its last line."""
    stage = ready(specs.mp("gpu1"))
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
        pauses.append(stage.status.faults[-1].pause)
    return pauses


def test_pauses_grow_and_go_on_for_ever(ready: Make) -> None:
    """The cause may persist; a server that has answered comes back once it does not."""
    stage = ready()
    stage.kill("gpu2")
    pauses = starts(stage, 9)

    assert stage.status.faults[0].pause == 5.0
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]
    assert stage.status.state in ("stopping", "pausing")
    stage.until("ready", within=700)
    assert all(fault.ready_again_after is not None for fault in stage.status.faults)
    assert stage.status.faults[0].ready_again_after > stage.status.faults[-1].ready_again_after  # type: ignore[operator]


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

    assert stage.status.faults[-1].pause == pause


def test_a_cap_of_restarts(ready: Make) -> None:
    """Then it gives up, with the last fault, until somebody asks anew; nothing runs."""
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(restarts=2)))
    assert stage.status.restarts_left == 2
    stage.kill("gpu2")
    starts(stage, 2)
    status = stage.until("gave-up")
    stage.run(100)

    assert (status.restarts_left, status.generation, stage.orders) == (0, 3, {})
    assert (
        status.doing == f"restart limit of 2 reached; last fault: vLLM's process on gpu2 {KILLED}"
    )
    assert (stage.status.state, {node.state for node in stage.lead.nodes.values()}) == (
        "gave-up",
        {"idle"},
    )
    stage.want(dataclasses.replace(stage.spec, asked=2.0))
    assert stage.until("ready").restarts_left == 2


def test_restarts_are_forgotten_after_a_while(ready: Make) -> None:
    """A cap is for an hour: one death a day needs nobody."""
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(restarts=1)))
    for _ in range(3):
        stage.kill("gpu2")
        stage.until("pausing")
        stage.until("ready")
        stage.run(3700, step=10)

    assert (stage.status.restarts_left, stage.status.fault_count) == (1, 3)


def test_without_supervision_nothing_is_ended_or_started_again(ready: Make) -> None:
    """An engine that hangs is left to whoever looks after it; one that ends has failed."""
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(restarts=0)))
    stage.engine.answers = False
    stage.run(1000, step=5)
    assert (stage.status.state, stage.status.faults) == ("ready", [])
    assert (stage.status.verdict, stage.status.still > 900) == ("quiet", True)

    stage.kill("gpu2")
    status = stage.until("failed")
    stage.run(1000, step=5)
    assert (status.doing, len(status.faults)) == (f"vLLM's process on gpu2 {KILLED}", 1)
    assert (stage.status.state, stage.status.generation, stage.orders) == ("failed", 1, {})


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
    assert stage.status.state == "starting"
    stage.until("stopping", within=3)

    assert stage.status.faults[-1].what.startswith(f"no answer within {limit}") or limit == 160
    assert stage.status.faults[-1].what.endswith("s of a restart")


# ---- what is wanted ------------------------------------------------------------------------------


def test_stop(ready: Make) -> None:
    """It is stopped when nothing of it runs; that is no fault."""
    stage = ready()
    stage.lead.nodes["gpu2"].slow = 8.0
    stage.want(None)
    stage.run(5)
    assert (stage.status.state, stage.status.doing, stage.orders) == (
        "stopping",
        "it was stopped",
        {},
    )

    assert stage.until("stopped").faults == []
    assert {node.state for node in stage.lead.nodes.values()} == {"idle"}
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

    assert stage.status.state == "stopped"
    assert {node.state for node in stage.lead.nodes.values()} == {"idle"}


def test_a_stop_waits_for_what_was_ordered_a_moment_ago(ready: Make) -> None:
    """A node that has not carried out its last orders may still be about to start something."""
    stage = ready()
    stage.lead.late.add("gpu2")
    stage.want(None)
    stage.run(20)
    assert stage.status.state == "stopping"

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
    assert stage.status.state == "stopping"

    doing = stage.until("stopped").doing
    assert doing == "gpu2 did not answer: processes there stop on reconnection"
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
    stage.want(specs.mp("gpu1", "gpu2", id="other", model="n", asked=2.0))
    stage.run(15)
    assert (stage.status.state, stage.status.doing, stage.status.id) == (
        "stopping",
        "another server replaces it",
        "abcd1234",
    )
    assert stage.lead.nodes["gpu1"].last == 2

    status = stage.until("ready")
    assert (status.id, status.model, status.generation, status.faults) == ("other", "n", 3, [])
    assert stage.history == ["other", "abcd1234"]


def test_the_same_wish_again_changes_nothing(ready: Make) -> None:
    """A launcher that tries again writes the same file."""
    stage = ready()
    stage.want(TWO)
    os.utime(stage.folder / "chat" / "desired.json", (1, 1))
    stage.run(20)

    assert (stage.status.state, stage.status.generation, stage.status.faults) == ("ready", 1, [])


def test_a_wish_that_changes_twice(ready: Make) -> None:
    """The last word counts, also while the engine before ends."""
    stage = ready()
    stage.lead.nodes["gpu2"].slow = 20.0
    stage.want(specs.mp("gpu1", "gpu2", id="other", asked=2.0))
    stage.run(5)
    stage.want(specs.mp("gpu1", "gpu2", id="third", asked=3.0))
    stage.until("ready")

    assert (stage.status.id, stage.history, stage.status.generation) == (
        "third",
        ["third", "abcd1234"],
        2,
    )


def test_a_wish_of_another_version_is_not_acted_on(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said, and nothing starts."""
    stage = make()
    state.write_json(str(stage.folder / "chat" / "desired.json"), {"version": 1})
    stage.run(5)

    assert (stage.keeper.status, stage.orders) == (None, {})
    assert "unknown version of a server spec: 1" in capsys.readouterr().out


def test_a_server_that_was_stopped_while_no_agent_was_here(ready: Make) -> None:
    """Its record says so, instead of being ready for ever."""
    stage = ready()
    stage.want(None)
    stage.boot()
    stage.run(2)

    assert (stage.status.state, stage.status.verdict, stage.status.endpoints) == (
        "stopped",
        "stopped",
        {},
    )


# ---- a head that starts again --------------------------------------------------------------------


def reboot(stage: Stage) -> None:
    """Let the head's container end, with what runs in it, and start again."""
    stage.lead.nodes["gpu1"] = Node(boot="b2")
    stage.lead.reports.clear()
    stage.boot().tick()


def test_a_head_that_was_restarted(ready: Make) -> None:
    """The engine ended with it: a fault, but none of the engine's doing where it had worked for
    long, so it starts at once.
    """
    stage = ready()
    stage.run(60)
    reboot(stage)
    stage.until("starting", within=5)
    status = stage.until("ready")
    (fault,) = status.faults

    assert (fault.what, fault.node, fault.pause, fault.lost) == (
        "the head's container was restarted",
        "gpu1",
        0.0,
        None,
    )
    assert (status.generation, stage.lead.nodes["gpu2"].last) == (2, 2)


def test_a_head_that_is_restarted_again_and_again(ready: Make) -> None:
    """An engine may end the head's container each time that it works: pauses grow, and a cap of
    restarts holds.
    """
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(restarts=3)))
    pauses = []
    for _ in range(4):
        reboot(stage)
        stage.until("starting", "gave-up", within=60)
        pauses.append(stage.status.faults[-1].pause)
        if stage.status.state == "starting":
            stage.until("ready")

    assert (pauses, stage.status.state) == ([5.0, 10.0, 20.0, 40.0], "gave-up")


def test_a_head_that_is_restarted_between_deaths(ready: Make) -> None:
    """It is no way round the pause of a server whose engine dies again and again."""
    stage = ready()
    stage.kill("gpu2")
    starts(stage, 2)
    stage.until("ready")
    reboot(stage)
    stage.until("pausing")

    assert stage.status.faults[-1].what == "the head's container was restarted"
    assert stage.status.faults[-1].pause >= 20.0


def test_a_head_that_was_replaced(ready: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody gave it another image: no fault and no restart; what comes then counts again."""
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(restarts=0)))
    monkeypatch.setattr(state, "container_id", lambda: "second")
    reboot(stage)
    status = stage.until("ready")
    assert (status.generation, status.faults, status.restarts, status.container) == (
        2,
        [],
        [],
        "second",
    )

    reboot(stage)
    assert stage.until("failed").doing == "the head's container was restarted"


@pytest.mark.parametrize("text", ["before", "now"])
def test_a_head_of_which_nobody_knows_whether_it_was_replaced(
    ready: Make, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Counts as one that was restarted: else one that crashes for ever would be served on for
    ever.
    """
    monkeypatch.setattr(state, "container_id", lambda: "x" if text == "before" else "")
    stage = ready()
    monkeypatch.setattr(state, "container_id", lambda: "" if text == "before" else "x")
    reboot(stage)
    stage.until("ready")

    assert len(stage.status.faults) == 1


def test_a_head_that_restarts_during_the_first_start(make: Make) -> None:
    """It begins again: nothing had answered yet, and nothing is a fault."""
    stage = make()
    stage.until("starting")
    reboot(stage)
    status = stage.until("ready")

    assert (status.generation, status.faults) == (2, [])


@pytest.mark.parametrize("when", ["pausing", "stopping", "waiting"])
def test_a_head_that_restarts_while_the_server_is_down(ready: Make, when: str) -> None:
    """It goes on where it was; the fault is counted once."""
    stage = ready()
    stage.lead.nodes["gpu1"].slow = 3.0
    stage.kill("gpu2")
    stage.until(when)
    reboot(stage)
    stage.until("ready")

    assert (len(stage.status.faults), stage.status.generation) == (1, 2)
    assert stage.status.faults[0].ready_again_after is not None


@pytest.mark.parametrize("over", ["failed", "gave-up"])
def test_what_is_over_stays_over(make: Make, over: str) -> None:
    """A restart of the head would turn what needs somebody into a loop."""
    stage = make(specs.mp("gpu1", "gpu2", policy=policy(restarts=1)))
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

    assert (stage.status.state, stage.status.doing, stage.orders) == (over, doing, {})


def test_an_engine_that_outlives_the_heads_agent(ready: Make) -> None:
    """It has no process on the head: it served on, and is kept as it is."""
    stage = ready(AWAY)
    reboot(stage)
    stage.lead.away["gpu3"] = ""
    stage.run(20)
    assert (stage.status.state, stage.phases) == ("waiting", dict.fromkeys(("gpu2", "gpu3"), KEEP))
    assert stage.status.doing == "looking for the previous engine: no answer from gpu3 yet"

    stage.lead.away.clear()
    stage.until("ready", within=2)
    stage.run(20)
    assert (stage.status.state, stage.status.generation, stage.status.faults) == ("ready", 1, [])
    assert [stage.lead.nodes[node].last for node in ("gpu2", "gpu3")] == [1, 1]


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_an_engine_outlives_two_restarts_of_the_heads_agent(make: Make, state: str) -> None:
    """The second agent starts while the first one still looks for the engine."""
    stage = make(AWAY)
    stage.until(state)
    stage.run(1)
    stage.lead.away["gpu3"] = ""
    for _ in range(2):
        reboot(stage)
        stage.run(20)
        assert (stage.status.state, stage.phases) == ("waiting", {"gpu2": KEEP, "gpu3": KEEP})

    stage.lead.away.clear()
    stage.until("ready", within=10)
    assert (stage.status.resumes, stage.status.generation, stage.status.faults) == ("", 1, [])
    assert {stage.lead.nodes[node].state for node in ("gpu2", "gpu3")} == {"running"}


def test_an_agent_that_has_not_reported_yet_has_not_said_that_nothing_runs(ready: Make) -> None:
    """It is connected, and its first report is on its way: what cannot be asked is unknown."""
    stage = ready(AWAY)
    reboot(stage)
    stage.lead.late.add("gpu3")
    stage.lead.stale.add("gpu3")
    stage.run(20)
    assert (stage.status.state, stage.phases) == ("waiting", dict.fromkeys(("gpu2", "gpu3"), KEEP))

    stage.lead.late.clear()
    stage.lead.stale.clear()
    stage.until("ready", within=2)
    assert (stage.status.generation, stage.status.faults) == (1, [])


def test_an_engine_that_has_not_answered_outlives_it(ready: Make) -> None:
    """A restart that goes on is not ready before its own first answer, whatever was before."""
    stage = ready(AWAY)
    stage.engine.takes = 30
    stage.kill("gpu3")
    stage.until("starting", within=30)
    stage.run(5)
    reboot(stage)
    stage.until("starting", within=5)
    stage.run(10)
    assert (stage.status.state, stage.status.verdict) == ("starting", "recovering")

    stage.until("ready", within=40)
    assert (stage.status.generation, len(stage.status.faults)) == (2, 1)
    assert stage.status.faults[0].ready_again_after is not None


def test_an_engine_that_did_not_outlive_it(ready: Make) -> None:
    """A part of it has ended meanwhile: all of it starts anew."""
    stage = ready(AWAY)
    stage.lead.nodes["gpu3"] = Node(boot="b2")
    reboot(stage)
    stage.until("ready", within=30)

    assert (stage.status.generation, len(stage.status.faults)) == (2, 1)
    assert [stage.lead.nodes[node].last for node in ("gpu2", "gpu3")] == [2, 2]


# ---- what is written down ------------------------------------------------------------------------


def test_faults_that_are_kept_are_bounded(ready: Make) -> None:
    """A crash loop of days must not grow the file; how many there were is still known."""
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(longest_pause=1.0)))
    stage.kill("gpu2", evidence="x" * 10_000)
    starts(stage, 30)

    assert (len(stage.status.faults), stage.status.fault_count) == (20, 31)
    assert all(len(fault.evidence) <= 4000 for fault in stage.status.faults)


def test_the_record_is_never_old(ready: Make) -> None:
    """Whoever reads it knows that somebody looks, whatever the state."""
    stage = ready()
    for _ in range(30):
        stage.step(1.0)
        assert stage.clock.time() - stage.status.written <= 6


def test_a_disk_that_is_full_ends_no_server(ready: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept without a record, also through a fault."""
    stage = ready()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "write_json", full)
    stage.kill("gpu2")
    stage.run(30)
    assert stage.keeper.status is not None

    assert (stage.keeper.status.state, stage.keeper.status.generation, stage.status.generation) == (
        "ready",
        2,
        1,
    )


@mutate.examples(40)
@given(chance=mutate.chances)
def test_whatever_agents_report(ready: Make, chance: mutate.Chance) -> None:
    """Nothing that another agent says ends the one that keeps all servers."""
    stage = ready(specs.mp("gpu1", "gpu2", id=str(chance.number), asked=float(chance.number)))
    for node in ("gpu1", "gpu2"):
        good = {**dataclasses.asdict(stage.lead.reports[node]), "ranks": [7], "ended": "x"}
        with contextlib.suppress(ValueError):
            report = records.parse_record(ServerReport, mutate.value(good, chance), "report")
            stage.lead.reports[node] = report
    for _ in range(8):
        stage.clock.now += 1
        stage.keeper.tick()
        for order in stage.keeper.orders().values():
            assert order.generation > 0


def test_when_it_wants_to_be_asked_often(make: Make) -> None:
    """While something is about to be started or ended; not for as long as a node is waited for."""
    stage = make()
    stage.step()
    assert stage.keeper.changing
    assert stage.clock.time() - stage.status.since < 1
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


def test_the_rank_that_died_first_is_named(ready: Make, view: type[View]) -> None:
    """From Ray, if it knows; else from vLLM's output."""
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
