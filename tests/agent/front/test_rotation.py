"""Servers in the fronts: their states, and the drain before a stop."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent.front import rotation
from launcher.agent.front.haproxy import DRAIN, MAINT, READY, Rotation
from launcher.agent.front.rotation import front_states, lasting_pauses
from launcher.agent.observed import Drain, Observed
from launcher.agent.processes.node import KEEP, RUN
from tests.agent.specs import AWAY, mp
from tests.agent.stage import Make, Stage

OTHER = mp("gpu2", "gpu3", id="other", asked=2.0)


def status(state: str = "ready", **fields: Any) -> Observed:
    """Return the status of a server."""
    return Observed(name="", id="", asked=0.0, state=state, **fields)


SLOW = status(verdict="busy")
SUSPECT = status(verdict="suspect")
FROZEN = status(verdict="answering", stopped=["process 7 on gpu2 is stopped (SIGSTOP)"])


@pytest.mark.parametrize("state", ["waiting", "starting", "stopping", "pausing", "failed"])
def test_a_server_gets_requests_once_it_is_ready(state: str) -> None:
    """Until the first answer, and after a death, it gets none."""
    assert front_states({"chat": status(state), "embed": status()}) == {
        "chat": MAINT,
        "embed": READY,
    }


def test_a_server_that_may_have_outlived_the_agent_stays_as_it_is() -> None:
    """Nothing is known about it."""
    assert front_states({"chat": status("waiting", resumes="ready")}) == {}


@pytest.mark.parametrize("bad", [SUSPECT, FROZEN])
def test_a_hanging_replica_drains_while_another_is_ready(bad: Observed) -> None:
    """The last ones stay, hanging or not: they may recover."""
    assert front_states({"chat": bad, "chat.2": status()}) == {"chat": DRAIN, "chat.2": READY}
    assert front_states({"chat": bad, "chat.2": SLOW}) == {"chat": DRAIN, "chat.2": READY}
    for other in (status("starting"), status(draining=Drain(since=0, limit=1, fronts=[]))):
        assert front_states({"chat": bad, "chat.2": other})["chat"] == READY
    assert front_states({"chat": bad, "chat.2": bad}) == {"chat": READY, "chat.2": READY}
    assert front_states({"chat": bad, "embed": status()}) == {"chat": READY, "embed": READY}


@pytest.mark.parametrize("verdict", ["busy", "quiet", "resting", "unknown"])
def test_an_overloaded_replica_stays(verdict: str) -> None:
    """Only a hang takes it out of rotation."""
    assert front_states({"chat": status(verdict=verdict), "chat.2": status()}) == {
        "chat": READY,
        "chat.2": READY,
    }


def test_a_pause_ends_in_time_or_with_the_server() -> None:
    """An `up` that was interrupted takes no server out of rotation for ever."""
    pauses = {"chat": 100.0, "embed": 100.0}
    states = {"chat": READY, "embed": MAINT}
    assert lasting_pauses(pauses, states, now=99) == {"chat": 100.0}
    assert lasting_pauses(pauses, states, now=100) == {}


# ---- the drain before a stop ---------------------------------------------------------------------


def serve(stage: Stage, state: str, requests: int, node: str = "gpu4") -> None:
    """Let a front report the server."""
    stage.lead.rotations[node] = {"chat": Rotation(state=state, requests=requests)}


@pytest.fixture
def busy(ready: Make) -> Stage:
    """A server of two nodes, away from the head, with two requests behind a front."""
    stage = ready(AWAY)
    serve(stage, READY, 2)
    return stage


def states(stage: Stage) -> set[str]:
    """Return the states of the engine's processes."""
    return {stage.lead.nodes[node].state for node in ("gpu2", "gpu3")}


def test_a_stop_waits_for_requests(busy: Stage) -> None:
    """It ends the processes at once after the last one, in a front that sends no new ones."""
    busy.store_spec(None)
    busy.run(3)
    record = busy.status
    assert (record.state, record.verdict, states(busy)) == ("ready", "stopping", {"running"})
    assert record.doing == record.reason == "draining: 2 requests in progress"
    assert front_states({"chat": record}) == {"chat": DRAIN}

    serve(busy, READY, 0)  # one may still arrive
    busy.run(3)
    serve(busy, DRAIN, 1)
    busy.run(3)
    assert (states(busy), busy.status.reason) == ({"running"}, "draining: 1 request in progress")

    serve(busy, DRAIN, 0)
    busy.run(1)
    assert front_states({"chat": busy.status}) == {"chat": MAINT}
    busy.until("stopped", within=3)
    assert states(busy) == {"idle"}
    assert busy.status.draining is None


def test_a_replacement_waits_for_requests(busy: Stage) -> None:
    """The new server starts after it."""
    busy.store_spec(OTHER)
    serve(busy, DRAIN, 1)
    busy.run(20)
    assert (busy.status.id, states(busy)) == (AWAY.id, {"running"})
    serve(busy, DRAIN, 0)
    busy.until("starting", within=5)
    assert busy.status.id == "other"


def test_a_drain_has_a_limit(busy: Stage) -> None:
    """After the policy's time, requests are cut."""
    busy.store_spec(None)
    busy.run(59)
    assert states(busy) == {"running"}
    busy.run(3)
    assert states(busy) == {"idle"}


@pytest.mark.parametrize("step", [-30_000.0, 30_000.0])
def test_a_drain_does_not_follow_the_clock(busy: Stage, step: float) -> None:
    """NTP may set it: requests are neither cut nor waited for longer."""
    busy.store_spec(None)
    busy.run(30)
    busy.clock.step = step
    busy.run(29)
    assert states(busy) == {"running"}
    busy.run(3)
    assert states(busy) == {"idle"}


def test_a_drain_from_before_a_reboot_has_a_limit(busy: Stage) -> None:
    """The time since the boot, by which it is measured, begins again."""
    drain = Drain(since=busy.clock.monotonic() + 1e6, limit=60.0, fronts=["gpu4"])
    updated = rotation.update_drain(drain, "chat", busy.lead, busy.clock.monotonic())
    assert updated is not None
    assert rotation.update_drain(updated, "chat", busy.lead, busy.clock.monotonic() + 60) is None


@pytest.mark.parametrize("why", ["no front", "not in it", "never answered", "no time"])
def test_a_stop_without_a_drain(make: Make, why: str) -> None:
    """Nothing is waited for."""
    policy = {"policy": mp("a").policy.__class__(drain=0.0)} if why == "no time" else {}
    stage = make(mp("gpu2", "gpu3", **policy))
    stage.engine.answers = why != "never answered"
    stage.run(10)
    if why != "no front":
        serve(stage, READY, 3)
    if why == "not in it":
        stage.lead.rotations["gpu4"] = {"embed": Rotation(state=READY, requests=3)}
    stage.store_spec(None)
    stage.run(1.5)
    assert states(stage) == {"idle"}


def test_a_front_that_is_gone_is_not_waited_for(busy: Stage) -> None:
    """One that has just lost its connection is."""
    busy.lead.nodes["gpu4"] = busy.lead.nodes["gpu1"]
    busy.store_spec(None)
    busy.run(2)
    busy.lead.away["gpu4"] = ""
    busy.run(5)
    assert states(busy) == {"running"}
    busy.lead.away["gpu4"] = "its connection closed"
    busy.run(1.5)
    assert states(busy) == {"idle"}


@pytest.mark.parametrize("spec", [None, OTHER])
def test_a_restart_of_the_heads_agent_keeps_a_drain(busy: Stage, spec: Any) -> None:
    """Its engine is left alone until the fronts are connected, and have no request on it."""
    busy.store_spec(spec)
    serve(busy, DRAIN, 1)
    busy.run(2)
    rotations, busy.lead.rotations = busy.lead.rotations, {}  # not connected yet
    busy.boot()
    busy.keeper.tick()
    busy.keeper.tick()
    assert (busy.keeper.leaves_alone, busy.orders) == (True, {})
    assert busy.keeper.status is not None
    assert front_states({"chat": busy.keeper.status}) == {"chat": DRAIN}

    busy.lead.rotations = rotations
    busy.keeper.tick()
    assert busy.keeper.leaves_alone
    serve(busy, DRAIN, 0)
    busy.keeper.tick()
    assert not busy.keeper.leaves_alone
    busy.until("stopped" if spec is None else "starting", within=10)
    assert busy.status.draining is None


def test_a_spec_that_is_back_ends_the_drain(busy: Stage) -> None:
    """Without a restart."""
    busy.store_spec(None)
    busy.run(2)
    busy.store_spec(AWAY)
    busy.run(2)
    assert (busy.status.draining, busy.status.doing, states(busy)) == (None, "", {"running"})
    assert set(busy.phases.values()) <= {RUN, KEEP}


def test_a_stopped_rank_is_a_warning(busy: Stage) -> None:
    """Until it continues."""
    text = "process 41 (VLLM::Worker_TP1)"
    busy.lead.nodes["gpu3"].extra = {"stopped": [text]}
    busy.run(1)
    assert busy.status.warning == f"{text} on gpu3 is stopped (SIGSTOP)"
    assert busy.status.hangs
    busy.lead.nodes["gpu3"].extra = {}
    busy.run(1)
    assert (busy.status.warning, busy.status.hangs) == ("", False)
