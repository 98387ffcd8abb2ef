"""Reports of APIs, one on each node: answers of all of them, and of one alone."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent import apis
from launcher.agent.observed import EndpointHealth
from tests.agent import specs
from tests.agent.stage import Make
from tests.agent.test_monitor import Eye

APART = specs.hybrid("gpu1", "gpu2")


@pytest.fixture
def eyes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Queries of the head itself, without a report."""
    requests: list[tuple[Any, ...]] = []
    monkeypatch.setattr(apis, "ApiProbe", lambda *args: requests.append(args) or Eye({}))
    return requests


def test_a_server_is_ready_when_each_endpoint_has_answered(make: Make) -> None:
    """One that answers alone is no server yet."""
    stage = make(APART)
    stage.mute.add("gpu2")
    stage.run(60)
    assert (stage.status.state, stage.status.faults) == ("starting", [])
    stage.mute.clear()

    assert stage.until("ready", within=3).answered is not None


def test_the_largest_counters_can_be_read_again(ready: Make) -> None:
    """The record of a server has sums of what its nodes report."""
    stage, most = ready(APART), 2**50 - 1
    counters = {"progress": [], "running": most, "waiting": most, "tokens": 1.0, "failed": 0.0}
    for number, node in enumerate(stage.lead.nodes.values()):
        node.extra = {"probe": {**stage.probe(str(number)), "counters": counters}}
    stage.run(10)
    load = stage.status.load
    assert load is not None
    assert (load.running, load.waiting) == (2 * most, 2 * most)


@pytest.mark.parametrize("node", ["gpu1", "gpu2"])
def test_a_process_that_ends_is_named_and_all_start_again(ready: Make, node: str) -> None:
    """vLLM takes a replica in while it starts, and never later: the others cannot go on with a new
    one.
    """
    stage = ready(APART)
    stage.kill(node)
    (fault,) = stage.until("pausing").faults
    assert (fault.node, f"vLLM's process on {node} was killed" in fault.what) == (node, True)

    stage.until("ready")
    assert [stage.lead.nodes[item].last for item in ("gpu1", "gpu2")] == [2, 2]


def test_an_api_that_says_that_it_is_dead_is_named(ready: Make) -> None:
    """With what its own node's engine printed."""
    stage = ready(APART)
    stage.lead.nodes["gpu2"].extra = {"probe": {"health": 503}, "evidence": "lines"}
    (fault,) = stage.until("stopping", within=3).faults

    assert (fault.what, fault.node) == ("the engine of gpu2 reports that it is dead", "gpu2")
    assert fault.evidence == "lines"


@pytest.mark.parametrize(("address", "named"), [("10.0.0.2", "gpu2"), ("10.0.0.20", "gpu1")])
def test_an_engine_that_died_of_another_names_it(ready: Make, address: str, named: str) -> None:
    """Its own API may say so before the other one does."""
    stage = ready(APART)
    cause = f"RuntimeError: [pair.cc:553] Connection closed by peer [{address}]:61130."
    stage.lead.nodes["gpu1"].extra = {"probe": {"health": 503}, "cause": cause}
    (fault,) = stage.until("stopping", within=3).faults

    assert (fault.node, fault.cause) == (named, cause)
    assert fault.what.startswith("the engine of gpu1 reports that it is dead")
    assert fault.what.endswith(": it lost contact with gpu2") is (named == "gpu2")


def test_a_process_that_ended_with_another_names_it(ready: Make) -> None:
    """vLLM's own ends when somebody asks an engine that is dead; one that was killed is not taken
    for a consequence.
    """
    closed = "RuntimeError: Connection closed by peer [10.0.0.2]:8358."
    stage = ready(APART)
    stage.kill("gpu1", "ended with exit code 0", cause=closed)
    (fault,) = stage.until("stopping", within=3).faults
    assert (fault.node, fault.rank) == ("gpu2", "1")
    assert fault.what == "vLLM's process on gpu1 ended with exit code 0: it lost contact with gpu2"

    stage.until("ready")
    stage.kill("gpu1", cause=closed)
    assert stage.until("stopping", within=3).faults[-1].node == "gpu1"


def test_what_they_count_is_added_up(ready: Make) -> None:
    """And the oldest canary of all is told."""
    stage = ready(APART)
    stage.engine.open = 3
    stage.run(10)
    assert stage.status.load is not None
    assert (stage.status.load.running, stage.status.load.waiting) == (6, 0)
    stage.engine.answers = False
    stage.run(20)
    assert stage.keeper.status is not None
    assert 19 <= stage.keeper.status.asking <= 21
    stage.kill("gpu2")

    assert stage.until("pausing").faults[0].lost == 6


def test_what_fails_is_told_with_the_node(ready: Make) -> None:
    """Of one endpoint, while the other answers."""
    stage = ready(APART)
    stage.lead.nodes["gpu2"].extra = {"probe": {"failing": {"": [1.0, 500, "grammar error"]}}}
    stage.run(2)
    reason = "canary failed: HTTP 500: grammar error"

    assert (stage.status.verdict, stage.status.reason) == ("busy", f"gpu2: {reason}")
    assert stage.status.endpoints == {
        "gpu1": EndpointHealth(verdict="answering", seconds=0.1),
        "gpu2": EndpointHealth(verdict="busy", reason=reason),
    }


def test_a_node_that_is_gone_while_the_others_serve(
    ready: Make, eyes: list[tuple[Any, ...]]
) -> None:
    """Replicas of a dense model need nothing of it, and a restart would wait for it: they are left
    alone, and it is asked from the head.
    """
    stage = ready(APART)
    stage.lead.away["gpu2"] = "no report for 60 s"
    stage.run(1000, step=2)

    assert (stage.status.state, stage.status.faults) == ("ready", [])
    assert stage.status.warning == "no answer from the agent of gpu2"
    assert eyes == [("10.0.0.2", 8000, range(1, 2), 5.0)]


def test_an_api_on_loopback_is_not_asked_from_another_node(
    ready: Make, eyes: list[tuple[Any, ...]]
) -> None:
    """The head's own would answer in its place."""
    stage = ready(specs.hybrid("gpu1", "gpu2", host="127.0.0.1"))
    stage.lead.stale.add("gpu2")
    stage.run(20)

    assert (eyes, stage.status.state, stage.status.verdict) == ([], "ready", "unknown")
    assert stage.status.reason == "gpu2: the agent on gpu2 cannot reach the API"


def test_a_node_that_is_gone_and_that_the_others_wait_for(
    ready: Make, eyes: list[tuple[Any, ...]]
) -> None:
    """Those of a mixture of experts compute every token together."""
    stage = ready(APART)
    stage.lead.away["gpu2"] = "no report for 60 s"
    stage.engine.answers = False
    (fault,) = stage.until("stopping", within=30).faults

    assert (fault.what, fault.node) == ("gpu2 is gone", "gpu2")


def test_an_endpoint_that_ends_no_step_is_quiet(ready: Make) -> None:
    """Though the other one answers: clients of this one wait for ever."""
    stage = ready(APART)
    stage.engine.mute = ("1",)
    stage.run(29)
    assert (stage.status.verdict, stage.status.endpoints["gpu1"].verdict) == ("busy", "answering")
    stage.run(3)

    assert stage.status.verdict == "quiet"
    assert stage.status.reason.startswith("no step of replica 1 has ended for 3")
