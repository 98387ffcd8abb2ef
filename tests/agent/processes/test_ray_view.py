"""Parsers of Ray's tables: recorded rows (`fixtures/ray`), with the tests' addresses."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.desired import Ray
from launcher.agent.health.probe import QUERY_ERRORS
from launcher.agent.processes import ray_driver, ray_view
from launcher.agent.processes.ray_view import Culprit, RayRank, RayView
from tests.agent.web import Server

FIXTURES = Path(__file__).parents[2] / "fixtures"
NODES = json.loads((FIXTURES / "ray" / "ray_list_nodes_one_dead.json").read_text())
ACTORS = json.loads((FIXTURES / "ray" / "ray_list_actors_pp2.json").read_text())
GROUPS = json.loads((FIXTURES / "vllm" / "placement_groups_pp2.json").read_text())
ENDED = {
    "actor_died_error_context": {"error_message": "The actor is dead because its owner has died."}
}
SHOT = {
    "actor_died_error_context": {
        "error_message": "The actor is dead because it was killed by `ray.kill`."
    }
}
KILLED = {
    "actor_died_error_context": {
        "error_message": "Worker died: connection error code 2. End of file."
    }
}
pytestmark = pytest.mark.usefixtures("folders")


def node(number: int, state: str = "ALIVE", id: str = "") -> dict[str, Any]:
    """Return a recorded row of a node, with a local address."""
    ip = f"127.0.0.{number}"
    return {
        **NODES[0],
        "node_id": id or f"id{number}",
        "node_ip": ip,
        "node_name": ip,
        "state": state,
    }


def actor(number: int, state: str = "ALIVE", **fields: Any) -> dict[str, Any]:
    """Return a recorded row of a pipeline stage's actor, on its node."""
    row: dict[str, Any] = next(item for item in ACTORS if item["name"].endswith(f"_PP{number}"))
    return {
        **row,
        "actor_id": f"a{number}",
        "state": state,
        "job_id": "05000000",
        "node_id": f"id{number + 1}",
        "placement_group_id": "g",
        **fields,
    }


def group(state: str = "CREATED") -> dict[str, Any]:
    """Return a recorded row of a placement group with two GPUs."""
    return {**GROUPS[0], "state": state, "creator_job_id": "05000000"}


@pytest.fixture
def view(server: Server) -> RayView:
    """Return the view of a server with two ranks; the nodes' port is the dashboard's."""
    server.tables |= {
        "/api/v0/nodes": [node(1), node(2)],
        "/api/v0/actors": [actor(0), actor(1)],
        "/api/v0/placement_groups": [],
    }
    return RayView(
        Ray(dashboard=server.port, node_manager=server.port, gpus=2),
        1,
        {"gpu1": "127.0.0.1", "gpu2": "127.0.0.2"},
    )


@pytest.fixture(autouse=True)
def open_ports(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Close the ports of some addresses."""
    closed: dict[str, bool] = {}
    monkeypatch.setattr(ray_view, "is_reachable", lambda ip, _: not closed.get(ip))
    return closed


@pytest.fixture(autouse=True)
def driver_runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs of the program that is a driver of Ray; its replies may be put at the front."""
    runs: list[Any] = []

    def reply(*args: str) -> tuple[int, str]:
        runs.append(args)
        return runs.pop(0) if isinstance(runs[0][0], int) else (0, "{}")

    monkeypatch.setattr(ray_driver, "run", reply)
    return runs


def rank(number: int) -> RayRank:
    return RayRank(f"a{number}", f"PP{number}", f"gpu{number + 1}", 7)


def test_the_recorded_tables_have_all_fields() -> None:
    """All fields that are read exist under their names."""
    assert {"node_id", "node_ip", "state", "resources_total"} <= set(NODES[0])
    assert {
        "actor_id",
        "name",
        "class_name",
        "state",
        "job_id",
        "node_id",
        "pid",
        "placement_group_id",
        "death_cause",
    } <= set(ACTORS[0])
    assert {"state", "bundles"} <= set(GROUPS[0])
    assert {ray_view._rank_name(item) for item in ACTORS} <= {"PP0", "PP1", "an engine", ""}
    assert "PP1" in {ray_view._rank_name(item) for item in ACTORS}


def test_a_complete_cluster(view: RayView) -> None:
    """All nodes are alive, and their GPUs free."""
    assert view.missing_reason(1) == ""


def test_a_missing_node_is_named(server: Server, view: RayView) -> None:
    """For any number of dead rows in Ray's table."""
    server.tables["/api/v0/nodes"] = [node(1), node(2, "DEAD"), node(2, "DEAD", id="old")]

    assert view.missing_reason(1) == "waiting for gpu2 to join Ray: it has 1 of 2 GPUs"
    server.tables["/api/v0/nodes"] += [node(2, id="new")]
    assert view.missing_reason(1) == ""


def test_nodes_with_names_as_addresses(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for pods: the name is resolved every time; without an address the node is missing."""
    expected, others = {"pod-0": "127.0.0.1"}, socket.getaddrinfo

    def resolve(host: str, *args: Any) -> list[Any]:
        if host == "pod-1" and host not in expected:
            raise OSError(host)
        return others(expected.get(host, host), *args)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    server.tables |= {
        "/api/v0/nodes": [node(1), node(2)],
        "/api/v0/actors": [actor(0), actor(1)],
        "/api/v0/placement_groups": [],
    }
    ray = Ray(dashboard=server.port, node_manager=server.port, gpus=2)
    view = RayView(ray, 1, {"gpu1": "pod-0", "gpu2": "pod-1"})
    assert view.missing_reason(1) == "waiting for gpu2 to join Ray: it has 1 of 2 GPUs"

    expected["pod-1"] = "127.0.0.2"
    assert view.missing_reason(1) == ""
    assert {item.node for item in view.query_ranks(7)} == {"gpu1", "gpu2"}
    del expected["pod-1"]
    culprit = view.find_culprit([rank(1)], "")
    assert culprit is not None
    assert (culprit.node, culprit.evidence) == ("gpu2", "its node has left Ray")


def test_a_spare_node_may_be_missing(server: Server) -> None:
    """An engine that fits on the others starts without it."""
    addresses = {"gpu1": "127.0.0.1", "gpu2": "127.0.0.2"}
    view = RayView(Ray(dashboard=server.port, node_manager=1, gpus=1), 1, addresses)
    server.tables |= {
        "/api/v0/nodes": [node(1)],
        "/api/v0/actors": [],
        "/api/v0/placement_groups": [],
    }

    assert view.missing_reason(1) == ""


def test_a_start_waits_for_used_gpus(server: Server, view: RayView) -> None:
    """vLLM would wait silently for its placement group; actors without a group use some too."""
    server.tables["/api/v0/placement_groups"] = [group(), group("REMOVED"), group("PENDING")]
    assert view.missing_reason(1) == "waiting for 2 free GPUs in Ray; 0 are free"

    server.tables["/api/v0/placement_groups"] = [group("REMOVED")]
    server.tables["/api/v0/actors"] = [
        actor(0, placement_group_id=None, required_resources={"GPU": 1.0})
    ]
    assert view.missing_reason(1) == "waiting for 2 free GPUs in Ray; 1 are free"


def test_a_closed_port_means_a_missing_node(
    server: Server, view: RayView, open_ports: dict[str, bool]
) -> None:
    """Ray notices a dead container late, and may list it when its port is open again, for another
    node.
    """
    open_ports["127.0.0.2"] = True
    assert view.missing_reason(1) == "waiting for Ray to detect dead nodes"

    open_ports.clear()
    assert view.missing_reason(1) == "waiting for Ray to detect dead nodes"
    server.tables["/api/v0/nodes"] = [node(1), node(2, "DEAD"), node(2, id="new")]
    assert view.missing_reason(1) == ""


def test_a_node_after_a_short_outage(view: RayView) -> None:
    """Its port was briefly unreachable, and Ray did not notice."""
    view._closed["id2"] = time.monotonic() - ray_view._DEAD - 1

    assert view.missing_reason(1) == ""


def test_changing_nodes_are_incomplete(server: Server, view: RayView) -> None:
    """Ray listed a dead node as alive, and has noticed: after a death, two queries must agree."""
    messages = []
    for nodes in ([node(1), node(2)], [node(1), node(2, id="new")], [node(1), node(2, id="new")]):
        server.tables["/api/v0/nodes"] = nodes
        messages.append(view.missing_reason(2))

    assert messages == ["checking that the nodes stay in Ray"] * 2 + [""]


def test_the_gcs_reaches_returned_nodes_before_a_start(
    server: Server, view: RayView, driver_runs: list[Any]
) -> None:
    """Ray's first placement group on such a node may stay pending; only a new node is checked."""
    assert (view.missing_reason(1), driver_runs) == ("", [])

    server.tables["/api/v0/nodes"] = [node(1), node(2, "DEAD"), node(2, id="new")]
    driver_runs.append((1, 'noise\n{"error": "Get timed out:\\n  some object(s) not ready."}\n'))
    assert view.missing_reason(1) == (
        "waiting for Ray's GCS to reach gpu2: Get timed out: some object(s) not ready."
    )
    assert view.missing_reason(1) == view.missing_reason(1) == ""
    assert driver_runs == [("reach", "127.0.0.2")] * 2

    server.tables["/api/v0/nodes"] += [node(2, "DEAD", id="new"), node(2, id="newer")]
    server.tables["/api/v0/nodes"].remove(node(2, id="new"))
    assert view.missing_reason(1) == ""
    assert driver_runs == [("reach", "127.0.0.2")] * 3


def test_an_unresponsive_dashboard(server: Server, view: RayView) -> None:
    """Whoever asks decides what that means."""
    server.tables.clear()
    with pytest.raises(QUERY_ERRORS):
        view.missing_reason(1)
    with pytest.raises(QUERY_ERRORS):
        view.query_ranks(1)


def test_timeouts_of_the_dashboard(view: RayView, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy head answers late, perhaps never: the state of the cluster justifies a longer wait
    than the first death.
    """
    received: list[float] = []
    ask = ray_view.api.query_ray

    def noted(*args: Any, timeout: float, **fields: Any) -> object:
        received.append(timeout)
        return ask(*args, timeout=timeout, **fields)

    monkeypatch.setattr(ray_view.api, "query_ray", noted)
    view.missing_reason(1)
    assert (len(received), min(received) >= 15) == (3, True)
    received.clear()
    view.find_culprit([rank(0)], "")
    assert received and max(received) <= 3


def driver(job: str, pid: int) -> dict[str, Any]:
    """Return Ray's entry for a running job."""
    return {"submission_id": None, "job_id": job, "driver_info": {"id": job, "pid": str(pid)}}


def test_ranks_are_those_of_the_servers_own_driver(server: Server, view: RayView) -> None:
    """A batch job has such actors too: the server's driver process is in the engine's session."""
    server.tables["/api/v0/actors"] += [
        actor(1, actor_id="b", job_id="06000000"),
        actor(0, "DEAD", actor_id="old"),
    ]
    server.answers["/api/jobs/"] = [driver("05000000", os.getpid()), driver("06000000", 2**22 + 1)]
    result = view.query_ranks(os.getsid(0))

    assert [(item.actor, item.name, item.node) for item in result] == [
        ("a0", "PP0", "gpu1"),
        ("a1", "PP1", "gpu2"),
    ]
    assert result[0].pid == actor(0)["pid"]


def test_ranks_without_a_known_driver(server: Server, view: RayView) -> None:
    """All ranks of a single driver, and none of several."""
    assert [item.actor for item in view.query_ranks(1)] == ["a0", "a1"]
    server.tables["/api/v0/actors"] += [actor(1, actor_id="b", job_id="06000000")]
    assert view.query_ranks(1) == []


def test_names_of_ranks() -> None:
    """As vLLM names its actors; an engine of data parallelism has no such name."""
    names = {
        "vllm_Worker_17_PP1": "PP1",
        "vllm_Worker_17_TP1_PP0": "TP1 PP0",
        "vllm_Worker_17_dp1_TP0": "DP1 TP0",
        "vllm_Worker_17": "the only rank",
        "MapWorker": "",
        "": "",
    }

    assert {name: ray_view._rank_name({"name": name}) for name in names} == names
    assert ray_view._rank_name({"name": "", "class_name": "DPMoEEngineCoreActor"}) == "an engine"


def test_the_dead_rank_is_named(server: Server, view: RayView) -> None:
    """With its node and Ray's message; the exit of other ranks is a consequence."""
    server.tables["/api/v0/actors"] = [
        actor(0, "DEAD", death_cause=ENDED),
        actor(1, "DEAD", death_cause=KILLED),
    ]

    assert view.find_culprit([rank(0), rank(1)], "") == Culprit(
        "gpu2", "PP1", KILLED["actor_died_error_context"]["error_message"]
    )


def test_a_rank_on_a_lost_node(server: Server, view: RayView) -> None:
    """Ray has noticed, or only its port is closed: the ranks that the engine itself stopped are not
    to blame.
    """
    server.tables["/api/v0/actors"] = [actor(0, "DEAD", death_cause=SHOT), actor(1)]
    server.tables["/api/v0/nodes"] = [node(1), node(2, "DEAD")]

    assert view.find_culprit([rank(0), rank(1)], "") == Culprit(
        "gpu2", "PP1", "its node has left Ray"
    )


def test_a_rank_on_a_node_with_a_closed_port(
    server: Server, view: RayView, open_ports: dict[str, bool]
) -> None:
    """The engine is quicker than Ray."""
    server.tables["/api/v0/actors"] = [actor(0, "DEAD", death_cause=SHOT), actor(1)]
    open_ports["127.0.0.2"] = True
    result = view.find_culprit([rank(0), rank(1)], "")
    assert result is not None

    assert (result.node, result.rank) == ("gpu2", "PP1")
    assert result.evidence.startswith("nothing listens on 127.0.0.2:")


def test_a_rank_named_by_the_log_alone(server: Server, view: RayView) -> None:
    """Its container is back before Ray has noticed; vLLM has, and has stopped the other rank."""
    server.tables["/api/v0/actors"] = [actor(0, "DEAD", death_cause=SHOT), actor(1)]
    log = (FIXTURES / "vllm" / "fail_rank_killed.log").read_text()
    (messages,) = [line for line in log.splitlines() if "died unexpectedly" in line]

    assert "rank=[1]" in messages
    assert view.find_culprit([rank(0), rank(1)], messages) == Culprit("gpu2", "PP1", "")


def test_no_rank_is_blamed_if_all_nodes_are_alive(server: Server, view: RayView) -> None:
    """The log is the evidence."""
    server.tables["/api/v0/actors"] = [
        actor(number, "DEAD", death_cause=ENDED) for number in (0, 1)
    ]

    assert view.find_culprit([rank(0), rank(1)], "RuntimeError: out of luck") is None


def test_many_dead_ranks_need_one_query(server: Server, view: RayView) -> None:
    """A slow dashboard would take minutes."""
    dead = [
        actor(1, "DEAD", actor_id=f"a{at}", death_cause=KILLED if at == 40 else ENDED)
        for at in range(64)
    ]
    server.tables["/api/v0/actors"] = dead
    server.requests.clear()
    result = view.find_culprit([RayRank(f"a{at}", f"PP{at}", "gpu2", 7) for at in range(64)], "")
    assert result is not None

    assert (result.rank, len(server.requests)) == ("PP40", 3)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (None, ""),
        ("text", "text"),
        ({"x": {"error_message": " a\n b "}}, "a b"),
        ({"x": {"reason": "r"}}, "r"),
        ({"x": {"formatted_exception_string": "f"}}, "f"),
        ({"x": 1}, '{"x": 1}'),
    ],
)
def test_messages_of_deaths(cause: Any, text: str) -> None:
    """In all of Ray's formats."""
    assert ray_view._death_text(cause) == text
