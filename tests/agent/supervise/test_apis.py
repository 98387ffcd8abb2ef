"""Reports of several APIs, one per node."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent.desired import Desired
from launcher.agent.observed import EndpointHealth
from launcher.agent.supervise import apis
from tests.agent import specs
from tests.agent.stage import Make
from tests.agent.supervise.test_monitor import Eye

APART = specs.hybrid("gpu1", "gpu2")


@pytest.fixture
def eyes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Probes by the head itself, without a report."""
    requests: list[tuple[Any, ...]] = []
    monkeypatch.setattr(apis, "ApiProbe", lambda *args: requests.append(args) or Eye({}))
    return requests


def test_a_server_is_ready_when_all_endpoints_have_answered(make: Make) -> None:
    """One answer is not enough."""
    stage = make(APART)
    stage.mute.add("gpu2")
    stage.run(60)
    assert (stage.status.state, stage.status.faults) == ("starting", [])
    stage.mute.clear()

    assert stage.until("ready", within=3).answered is not None


def test_the_largest_counters_survive_the_record(ready: Make) -> None:
    """The record has sums over the nodes."""
    stage, most = ready(APART), 2**50 - 1
    counters = {"progress": [], "running": most, "waiting": most, "tokens": 1.0, "failed": 0.0}
    for number, node in enumerate(stage.lead.nodes.values()):
        node.extra = {"probe": {**stage.probe(str(number)), "counters": counters}}
    stage.run(10)
    load = stage.status.load
    assert load is not None
    assert (load.running, load.waiting) == (2 * most, 2 * most)


@pytest.mark.parametrize("node", ["gpu1", "gpu2"])
def test_an_exited_process_restarts_all(ready: Make, node: str) -> None:
    """vLLM accepts replicas only while it starts, so the others cannot continue with a new one."""
    stage = ready(APART)
    stage.kill(node)
    (fault,) = stage.until("pausing").faults
    assert (fault.node, f"vLLM's process on {node} was killed" in fault.what) == (node, True)

    stage.until("ready")
    assert [stage.lead.nodes[item].last for item in ("gpu1", "gpu2")] == [2, 2]


def test_a_dead_api_is_named(ready: Make) -> None:
    """With the output of its own node's engine."""
    stage = ready(APART)
    stage.lead.nodes["gpu2"].extra = {"probe": {"health": 503}, "evidence": "lines"}
    (fault,) = stage.until("stopping", within=3).faults

    assert (fault.what, fault.node) == ("the engine of gpu2 reports that it is dead", "gpu2")
    assert fault.evidence == "lines"


@pytest.mark.parametrize(("address", "named"), [("10.0.0.2", "gpu2"), ("10.0.0.20", "gpu1")])
def test_a_consequential_death_names_its_cause(ready: Make, address: str, named: str) -> None:
    """Its API may report the death before the other one does."""
    stage = ready(APART)
    cause = f"RuntimeError: [pair.cc:553] Connection closed by peer [{address}]:61130."
    stage.lead.nodes["gpu1"].extra = {"probe": {"health": 503}, "cause": cause}
    (fault,) = stage.until("stopping", within=3).faults

    assert (fault.node, fault.cause) == (named, cause)
    assert fault.what.startswith("the engine of gpu1 reports that it is dead")
    assert fault.what.endswith(": it lost contact with gpu2") is (named == "gpu2")


def test_a_consequential_exit_names_its_cause(ready: Make) -> None:
    """vLLM exits on the first request to a dead engine; a killed engine is no consequence."""
    closed = "RuntimeError: Connection closed by peer [10.0.0.2]:8358."
    stage = ready(APART)
    stage.kill("gpu1", "ended with exit code 0", cause=closed)
    (fault,) = stage.until("stopping", within=3).faults
    assert (fault.node, fault.rank) == ("gpu2", "1")
    assert fault.what == "vLLM's process on gpu1 ended with exit code 0: it lost contact with gpu2"

    stage.until("ready")
    stage.kill("gpu1", cause=closed)
    assert stage.until("stopping", within=3).faults[-1].node == "gpu1"


def test_counters_are_summed(ready: Make) -> None:
    """The oldest canary of all is reported."""
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


def test_a_failure_names_its_node(ready: Make) -> None:
    """One endpoint fails, while the other answers."""
    stage = ready(APART)
    stage.lead.nodes["gpu2"].extra = {"probe": {"failing": {"": [1.0, 500, "grammar error"]}}}
    stage.run(2)
    reason = "canary failed: HTTP 500: grammar error"

    assert (stage.status.verdict, stage.status.reason) == ("busy", f"gpu2: {reason}")
    assert stage.status.endpoints == {
        "gpu1": EndpointHealth(verdict="answering", seconds=0.1),
        "gpu2": EndpointHealth(verdict="busy", reason=reason),
    }


def test_a_lost_node_of_independent_replicas(ready: Make, eyes: list[tuple[Any, ...]]) -> None:
    """Replicas of a dense model do not need it, and a restart would wait for it: they continue, and
    the head probes its API.
    """
    stage = ready(APART)
    stage.lead.away["gpu2"] = "no report for 60 s"
    stage.run(1000, step=2)

    assert (stage.status.state, stage.status.faults) == ("ready", [])
    assert stage.status.warning == "no answer from the agent of gpu2"
    assert eyes == [("10.0.0.2", 8000, range(1, 2), 5.0)]


@pytest.mark.parametrize(
    "spec", [specs.hybrid("gpu1", "gpu2", host="127.0.0.1"), specs.mp("gpu2")], ids=["two", "one"]
)
def test_an_api_on_loopback_is_probed_only_locally(
    spec: Desired, ready: Make, eyes: list[tuple[Any, ...]]
) -> None:
    """The head's own API would answer instead."""
    stage = ready(spec)
    stage.lead.stale.add("gpu2")
    stage.run(20)

    assert (eyes, stage.status.state, stage.status.verdict) == ([], "ready", "unknown")
    assert stage.status.reason.endswith("the agent on gpu2 cannot reach the API")


def test_a_lost_node_of_coupled_replicas(ready: Make, eyes: list[tuple[Any, ...]]) -> None:
    """Replicas of a mixture of experts compute every token together."""
    stage = ready(APART)
    stage.lead.away["gpu2"] = "no report for 60 s"
    stage.engine.answers = False
    (fault,) = stage.until("stopping", within=30).faults

    assert (fault.what, fault.node) == ("gpu2 is gone", "gpu2")


def test_an_endpoint_without_steps_is_quiet(ready: Make) -> None:
    """Although the other one answers: its clients wait forever."""
    stage = ready(APART)
    stage.engine.mute = ("1",)
    stage.run(29)
    assert (stage.status.verdict, stage.status.endpoints["gpu1"].verdict) == ("busy", "answering")
    stage.run(3)

    assert stage.status.verdict == "quiet"
    assert stage.status.reason.startswith("no step of replica 1 has ended for 3")
