"""The state machine of a server, with scripted nodes, engine and clock."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from typing import Any

import pytest
from hypothesis import given

from launcher.agent import records, state
from launcher.agent.processes.node import KEEP, PREPARE, RUN, ServerReport
from launcher.agent.processes.ray_view import Culprit
from tests.agent import specs
from tests.agent.specs import AWAY, RAY, TWO
from tests.agent.stage import KILLED, Make, Node, Stage, View
from tests.hostile import mutate


def policy(**fields: Any) -> Any:
    return dataclasses.replace(specs.POLICY, **fields)


# ---- the first start -----------------------------------------------------------------------------


def test_a_server_starts_and_answers(make: Make) -> None:
    """From the spec to the first answer, which is recorded in the history."""
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


def test_the_cache_size_is_recorded(make: Make) -> None:
    """From vLLM's log, and updated after a restart."""
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
def test_the_ranks_of_nodes(
    ready: Make, item: int, extra: dict[str, int], ranks: list[list[str]]
) -> None:
    """In order, by vLLM's names; all ranks of replicas."""
    processes = tuple(
        specs.process(f"gpu{at + 1}", replicas=(at if "replicas" in extra else 0, 1))
        for at in range(2)
    )
    stage = ready(
        specs.mp("gpu1", "gpu2", processes=processes, places={"gpu1": item, "gpu2": item}, **extra)
    )

    assert stage.status.ranks == {"gpu1": ranks[0], "gpu2": ranks[1]}


def test_orders(make: Make) -> None:
    """Check the start conditions, start, then run on. An agent with a restarted container must not
    start its part alone.
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
    """The launcher has one; weights may come from far away."""
    stage = make()
    stage.engine.takes = 7200
    stage.run(7000, step=5)
    assert (stage.status.state, stage.status.faults) == ("starting", [])

    stage.until("ready", within=400, step=5)


def test_a_failed_first_start_is_not_repeated(make: Make) -> None:
    """It fails with its cause; any new spec starts again."""
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
    stage.store_spec(dataclasses.replace(TWO, asked=2.0))
    stage.until("ready")
    assert (stage.status.generation, stage.status.faults) == (2, [])


def test_a_head_without_its_record(ready: Make) -> None:
    """Nodes never start the same generation twice: old engines are stopped, and the next generation
    is a new number.
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


def test_a_killed_rank_restarts_the_engine(ready: Make) -> None:
    """The rest of the engine stops first; then a pause, then all of it restarts."""
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


def test_an_engine_starts_after_the_last_one_has_exited(ready: Make) -> None:
    """The old engine still uses the memory."""
    stage = ready()
    stage.lead.nodes["gpu1"].slow = 40.0
    stage.kill("gpu2")
    stage.run(39)
    assert (stage.status.state, stage.lead.nodes["gpu2"].last) == ("stopping", 1)

    stage.until("ready")
    assert stage.lead.nodes["gpu2"].last == 2


def test_a_single_process(ready: Make) -> None:
    """No rank and no node to name; the first error is the cause, not the last line."""
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


def test_the_death_nearest_to_the_cause_is_reported(ready: Make) -> None:
    """Others are consequences, and may be noticed first."""
    stage = ready()
    stage.kill("gpu1", "ended with exit code 1")
    stage.step()
    stage.kill("gpu2")
    (fault,) = stage.until("pausing").faults

    assert (fault.what, fault.node) == (f"vLLM's process on gpu2 {KILLED}", "gpu2")


def starts(stage: Stage, times: int) -> list[float]:
    """Let all starts fail; return the pauses."""
    pauses = []
    for _ in range(times):
        stage.until("starting", within=700)
        stage.step()
        stage.kill("gpu2")
        stage.until("stopping", "pausing")
        pauses.append(stage.status.faults[-1].pause)
    return pauses


def test_pauses_grow_without_a_last_attempt(ready: Make) -> None:
    """The cause may persist; the server returns once it does not."""
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
def test_a_long_run_resets_the_pauses(ready: Make, lasted: float, pause: float) -> None:
    """After ten ready minutes, a fault starts a new streak."""
    stage = ready()
    stage.kill("gpu2")
    stage.until("pausing")
    stage.until("ready")
    stage.run(lasted, step=5)
    stage.kill("gpu2")
    stage.until("pausing")

    assert stage.status.faults[-1].pause == pause


def test_a_limit_of_restarts(ready: Make) -> None:
    """The server gives up with the last fault, until a new spec; no process runs."""
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
    stage.store_spec(dataclasses.replace(stage.spec, asked=2.0))
    assert stage.until("ready").restarts_left == 2


def test_restarts_are_forgotten_after_a_while(ready: Make) -> None:
    """The limit is per hour: one death a day needs no operator."""
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(restarts=1)))
    for _ in range(3):
        stage.kill("gpu2")
        stage.until("pausing")
        stage.until("ready")
        stage.run(3700, step=10)

    assert (stage.status.restarts_left, stage.status.fault_count) == (1, 3)


def test_an_unsupervised_server(ready: Make) -> None:
    """A hanging engine is left running; an exited one has failed."""
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
    """Twice the duration of the first start, and at least the start's timeout."""
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


# ---- specs ---------------------------------------------------------------------------------------


def test_stop(ready: Make) -> None:
    """The state is "stopped" once no process runs, without a fault."""
    stage = ready()
    stage.lead.nodes["gpu2"].slow = 8.0
    stage.store_spec(None)
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
    """In every state."""
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
    stage.store_spec(None)
    stage.until("stopped")
    stage.run(20)

    assert stage.status.state == "stopped"
    assert {node.state for node in stage.lead.nodes.values()} == {"idle"}


def test_a_stop_waits_for_recent_orders(ready: Make) -> None:
    """A node that has not carried out its last orders may still start a process."""
    stage = ready()
    stage.lead.late.add("gpu2")
    stage.store_spec(None)
    stage.run(20)
    assert stage.status.state == "stopping"

    stage.lead.late.clear()
    stage.until("stopped")


def test_a_stop_with_an_unreachable_node(ready: Make) -> None:
    """It may soon return; later it is reported, because its processes stop only when it is back."""
    stage = ready()
    stage.lead.away["gpu2"] = ""
    stage.store_spec(None)
    stage.run(25)
    assert stage.status.state == "stopping"

    doing = stage.until("stopped").doing
    assert doing == "gpu2 did not answer: processes there stop on reconnection"
    assert stage.lead.nodes["gpu2"].state == "running"
    stage.lead.away.clear()
    stage.run(2)
    assert stage.lead.nodes["gpu2"].state == "idle"


def test_a_replaced_server(ready: Make) -> None:
    """The old engine exits before the new one starts; generations continue, faults do not."""
    stage = ready()
    stage.kill("gpu2")
    stage.until("pausing")
    stage.until("ready")
    stage.lead.nodes["gpu2"].slow = 20.0
    stage.store_spec(specs.mp("gpu1", "gpu2", id="other", model="n", asked=2.0))
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


def test_an_unchanged_spec_changes_nothing(ready: Make) -> None:
    """A repeated launcher command writes the same file."""
    stage = ready()
    stage.store_spec(TWO)
    os.utime(stage.folder / "chat" / "desired.json", (1, 1))
    stage.run(20)

    assert (stage.status.state, stage.status.generation, stage.status.faults) == ("ready", 1, [])


def test_a_spec_that_changes_twice(ready: Make) -> None:
    """The last one counts, also while the old engine stops."""
    stage = ready()
    stage.lead.nodes["gpu2"].slow = 20.0
    stage.store_spec(specs.mp("gpu1", "gpu2", id="other", asked=2.0))
    stage.run(5)
    stage.store_spec(specs.mp("gpu1", "gpu2", id="third", asked=3.0))
    stage.until("ready")

    assert (stage.status.id, stage.history, stage.status.generation) == (
        "third",
        ["third", "abcd1234"],
        2,
    )


def test_a_spec_of_another_version(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported, and no engine starts."""
    stage = make()
    state.write_json(str(stage.folder / "chat" / "desired.json"), {"version": 1})
    stage.run(5)

    assert (stage.keeper.status, stage.orders) == (None, {})
    assert "unknown version of a server spec: 1" in capsys.readouterr().out


@pytest.mark.parametrize("content", ['{"version": 3}', "{"])
def test_engines_of_an_unreadable_spec_are_left_alone(ready: Make, content: str) -> None:
    """Also by an agent that has just started, until the spec is readable again, or removed."""
    stage = ready()
    file = stage.folder / "chat" / "desired.json"
    file.write_text(content)
    stage.run(5)
    assert (stage.status.state, stage.keeper.unreadable) == ("ready", False)  # goes on as it was

    stage.boot()
    stage.keeper.tick()
    stage.keeper.tick()
    assert (stage.keeper.unreadable, stage.status.state) == (True, "ready")

    stage.store_spec(None)
    stage.keeper.tick()
    assert (stage.keeper.unreadable, stage.keeper.status) == (False, None)


def test_a_spec_removed_without_an_agent(ready: Make) -> None:
    """Its record says so, instead of being ready for ever."""
    stage = ready()
    stage.store_spec(None)
    stage.boot()
    stage.run(2)

    assert (stage.status.state, stage.status.verdict, stage.status.endpoints) == (
        "stopped",
        "stopped",
        {},
    )


@pytest.mark.parametrize("step", [-30_000.0, 30_000.0])
def test_a_pause_does_not_follow_the_clock(ready: Make, step: float) -> None:
    """NTP may correct a clock that was wrong since the boot."""
    stage = ready()
    stage.kill("gpu2")
    starts(stage, 2)
    stage.until("pausing")
    stage.clock.step = step
    stage.run(18)
    assert stage.status.state == "pausing"
    stage.until("ready", within=20)


def test_a_limit_of_restarts_does_not_follow_the_clock(ready: Make) -> None:
    """Those in the future count for the window from now, not until the clock has passed them."""
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(restarts=1)))
    stage.kill("gpu2")
    stage.until("pausing")
    stage.until("ready")
    stage.clock.step = -30_000.0
    stage.run(60, step=10)
    assert stage.status.restarts_left == 0
    stage.run(3700, step=10)
    assert stage.status.restarts_left == 1


def test_a_pause_from_before_a_restart_has_a_limit(ready: Make) -> None:
    """The clock may have been set back with the host's reboot."""
    stage = ready()
    stage.kill("gpu2")
    stage.until("pausing")
    stage.clock.step = -30_000.0
    reboot(stage)
    stage.until("ready", within=stage.spec.policy.longest_pause + 30)


# ---- restarts of the head ------------------------------------------------------------------------


def reboot(stage: Stage) -> None:
    """Kill the head's container and its processes, and start it again."""
    stage.lead.nodes["gpu1"] = Node(boot="b2")
    stage.lead.reports.clear()
    stage.boot().tick()


def test_a_restarted_head(ready: Make) -> None:
    """The engine exited with it: a fault, but not the engine's if it had run for long, so it starts
    at once.
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


def test_a_crash_loop_of_the_head(ready: Make) -> None:
    """An engine may crash the head's container every time: pauses grow, and the limit of restarts
    applies.
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


def test_a_head_restarted_between_deaths(ready: Make) -> None:
    """It does not shorten the pauses of a crashing engine."""
    stage = ready()
    stage.kill("gpu2")
    starts(stage, 2)
    stage.until("ready")
    reboot(stage)
    stage.until("pausing")

    assert stage.status.faults[-1].what == "the head's container was restarted"
    assert stage.status.faults[-1].pause >= 20.0


def test_a_replaced_head(ready: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator changed its image: no fault and no restart; later ones count again."""
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
def test_a_possibly_replaced_head(ready: Make, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It counts as restarted; otherwise a crash loop would never end."""
    monkeypatch.setattr(state, "container_id", lambda: "x" if text == "before" else "")
    stage = ready()
    monkeypatch.setattr(state, "container_id", lambda: "" if text == "before" else "x")
    reboot(stage)
    stage.until("ready")

    assert len(stage.status.faults) == 1


def test_a_head_restarted_during_the_first_start(make: Make) -> None:
    """The start is repeated: no answer before, and no fault."""
    stage = make()
    stage.until("starting")
    reboot(stage)
    status = stage.until("ready")

    assert (status.generation, status.faults) == (2, [])


@pytest.mark.parametrize("when", ["pausing", "stopping", "waiting"])
def test_a_head_restarted_while_the_server_is_down(ready: Make, when: str) -> None:
    """The supervisor continues; the fault is counted once."""
    stage = ready()
    stage.lead.nodes["gpu1"].slow = 3.0
    stage.kill("gpu2")
    stage.until(when)
    reboot(stage)
    stage.until("ready")

    assert (len(stage.status.faults), stage.status.generation) == (1, 2)
    assert stage.status.faults[0].ready_again_after is not None


@pytest.mark.parametrize("over", ["failed", "gave-up"])
def test_final_states_survive_a_restart(make: Make, over: str) -> None:
    """A restart of the head must not start a loop."""
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
    """It has no process on the head: it served on, and stays."""
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
    """The second agent starts while the first one still searches for the engine."""
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


def test_a_missing_first_report_proves_nothing(ready: Make) -> None:
    """The agent is connected, but its state is still unknown."""
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


def test_a_starting_engine_outlives_the_heads_agent(ready: Make) -> None:
    """A resumed restart is not ready before its own first answer."""
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


def test_an_engine_lost_without_the_heads_agent(ready: Make) -> None:
    """A part of it has exited meanwhile: all of it restarts."""
    stage = ready(AWAY)
    stage.lead.nodes["gpu3"] = Node(boot="b2")
    reboot(stage)
    stage.until("ready", within=30)

    assert (stage.status.generation, len(stage.status.faults)) == (2, 1)
    assert [stage.lead.nodes[node].last for node in ("gpu2", "gpu3")] == [2, 2]


# ---- records -------------------------------------------------------------------------------------


def test_recorded_faults_are_limited(ready: Make) -> None:
    """A crash loop of days must not fill the file; the total count stays."""
    stage = ready(specs.mp("gpu1", "gpu2", policy=policy(longest_pause=1.0)))
    stage.kill("gpu2", evidence="x" * 10_000)
    starts(stage, 30)

    assert (len(stage.status.faults), stage.status.fault_count) == (20, 31)
    assert all(len(fault.evidence) <= 4000 for fault in stage.status.faults)


def test_the_record_is_always_fresh(ready: Make) -> None:
    """In every state, so that readers know that the supervisor runs."""
    stage = ready()
    for _ in range(30):
        stage.step(1.0)
        assert stage.clock.time() - stage.status.written <= 6


def test_a_full_disk_stops_no_server(ready: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is supervised without a record, even through a fault."""
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
def test_any_report(ready: Make, chance: mutate.Chance) -> None:
    """No agent's report stops the supervisor."""
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


def test_frequent_turns(make: Make) -> None:
    """During starts and stops; not while waiting for a node."""
    stage = make()
    stage.step()
    assert stage.keeper.changing
    assert stage.clock.time() - stage.status.since < 1
    stage.until("ready")
    assert not stage.keeper.changing
    stage.store_spec(None)
    stage.lead.nodes["gpu2"].slow = 5.0
    stage.step()
    assert stage.keeper.changing
    stage.until("stopped")
    stage.store_spec(dataclasses.replace(TWO, asked=2.0))
    stage.lead.away["gpu2"] = ""
    stage.run(40)
    assert not stage.keeper.changing


# ---- Ray -----------------------------------------------------------------------------------------


def test_the_rank_that_died_first_is_named(ready: Make, view: type[View]) -> None:
    """From Ray if possible, else from vLLM's output."""
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
