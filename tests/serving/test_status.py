"""Cluster status, from observed facts only."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.observed import EndpointHealth
from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
from launcher.serving import status
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.shipped import node_files
from launcher.tools.site import Site
from launcher.tools.site import network_verdict as verdict
from launcher.tools.site.ray_judges import try_payload
from launcher.tools.site.snapshot import ClusterSnapshot
from tests import plan_case as case
from tests import supervision
from tests.cluster_status import SECRETS, jobs, query_status, serve
from tests.conftest import Load
from tests.fakes import FakeTransport
from tests.simulated import World

FIXTURES = Path(__file__).parents[1] / "fixtures" / "ray"


def test_a_running_cluster_is_healthy(world: World) -> None:
    """Every node in Ray with its GPUs; no server yet."""
    report = query_status(world)

    assert report.whole
    assert [
        (node.node, node.role, node.container, node.ray, node.agent, node.gpus, node.drift)
        for node in report.nodes
    ] == [
        ("gpu01", "head", "running", "alive", "connected", "8/8", ()),
        ("gpu02", "worker", "running", "alive", "connected", "8/8", ()),
    ]
    assert (report.servers, report.endpoint) == ((), "http://10.0.0.11:8000/v1")
    assert report.as_json()["server"] == {"state": "none"}


def test_expiring_certificates_are_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster is healthy all the same."""
    assert query_status(world).certificates == ""
    monkeypatch.setattr("launcher.tools.shipped.certificates._WARN_BEFORE", timedelta(days=5 * 365))
    report = query_status(world)

    assert report.certificates.endswith("; run `vlaunch up` to renew them")
    assert (report.as_json()["certificates"], report.whole) == (report.certificates, True)


def test_a_node_with_a_closed_port_is_dead(world: World) -> None:
    """Ray's table still lists it for some seconds; the head probes its raylet's port."""
    commands = status.query_head(
        Site(
            world.inventory,
            probe_nodes(world.inventory, FakeTransport(world.answer), [world.inventory.image]),
        ),
    )
    address = f"10.0.0.12:{world.inventory.ports.node_manager}"
    world.responses["jobs"]["unreachable"] = [address]
    report = query_status(world)

    assert address in commands[0].argv[-1]
    assert [node.ray for node in report.nodes] == ["alive", "dead"]
    assert not report.whole


def test_the_endpoint_is_where_the_server_listens(world: World) -> None:
    """Its node's address and its own port, not the inventory's."""
    inventory = dataclasses.replace(
        world.inventory, serve=dataclasses.replace(world.inventory.serve, bind="127.0.0.1")
    )
    spec = supervision.make_spec(node="gpu02", backend="mp", port=9000)

    assert serve(world, supervision.make_record(), spec=spec).endpoint == "http://10.0.0.12:9000/v1"
    assert (
        serve(
            world, supervision.make_record(), spec=dataclasses.replace(spec, host="fd00::1")
        ).endpoint
        == "http://[fd00::1]:9000/v1"
    )
    jobs(world)
    assert query_status(world, inventory=inventory).endpoint == "http://127.0.0.1:8000/v1"


def test_an_empty_cluster_is_absent(load: Load) -> None:
    """No server is queried."""
    world = World(load())
    report = query_status(world)

    assert not report.whole
    assert [(node.container, node.ray, node.gpus) for node in report.nodes] == [
        ("absent", "absent", "-/8")
    ] * 2
    assert report.servers == ()
    assert (
        status.query_head(
            Site(world.inventory, probe_nodes(world.inventory, FakeTransport(world.answer), []))
        )
        == []
    )


def test_a_worker_that_is_not_in_ray_is_detected(world: World) -> None:
    """Although its container runs."""
    world.machines["gpu02"].joins = False
    jobs(world)
    report = query_status(world)

    assert (report.nodes[1].container, report.nodes[1].ray, report.nodes[1].gpus, report.whole) == (
        "running",
        "absent",
        "-/8",
        False,
    )


def test_an_exited_container_is_detected(world: World) -> None:
    """With Docker's reason."""
    world.stop("gpu02")
    report = query_status(world)

    assert (report.nodes[1].container, report.whole) == ("exited", False)


def test_a_docker_that_does_not_answer_leaves_all_unknown(world: World) -> None:
    """Nothing counts as missing, or as stopped, that nothing has looked for."""
    facts = probe_nodes(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    silent = {
        name: dataclasses.replace(fact, docker_version=None, containers=())
        for name, fact in facts.items()
    }
    report = status.build_status(ClusterSnapshot(site=Site(world.inventory, silent)), {})

    assert [(node.container, node.ray) for node in report.nodes] == [("unknown", "unknown")] * 2
    (server,) = report.servers
    assert (server.state, server.detail) == ("unknown", "Docker on the head does not answer")


def test_a_privileged_container_is_named(world: World) -> None:
    """The running container counts, not the present inventory."""
    world.container("gpu02")["HostConfig"]["Privileged"] = True
    report = query_status(world)

    assert [node.privileged for node in report.nodes] == [False, True]
    assert report.nodes[1].drift == ()


def test_the_size_of_the_compile_cache_is_reported(world: World) -> None:
    """If it was queried and exists."""
    world.machines["gpu02"].compiled = "ext4\n2048"

    assert [node.compiled for node in query_status(world).nodes] == [None, 2 << 20]


def test_an_unreachable_node_is_unknown(world: World) -> None:
    """With the reason; its container does not count as absent."""
    report = query_status(world, "gpu02")

    assert (report.nodes[1].container, report.nodes[1].trouble, report.whole) == (
        "unknown",
        "gpu02: no route",
        False,
    )
    assert report.nodes[0].ray == "alive"


def test_without_the_head_the_server_is_unknown(world: World) -> None:
    """Not `none`."""
    report = query_status(world, "gpu01")

    assert ([server.state for server in report.servers], report.nodes[1].container) == (
        ["unknown"],
        "running",
    )
    assert not report.whole


def test_an_unresponsive_docker_is_reported(world: World) -> None:
    """The node is not healthy."""
    world.machines["gpu02"].docker_error = "permission denied"
    world.machines["gpu02"].containers.clear()
    report = query_status(world)

    assert (report.nodes[1].trouble, report.whole) == ("permission denied", False)


@pytest.mark.parametrize("members", [{"gpu02": 75.0}, {"gpu02": None}])
def test_a_node_with_a_lost_agent_is_not_healthy(world: World, members: dict[str, float]) -> None:
    """No server can start on it, although its container runs."""
    world.responses["jobs"]["members"] |= members
    report = query_status(world)

    assert ([node.agent for node in report.nodes], report.whole) == (["connected", "lost"], False)


def test_without_ray_agents_make_a_cluster(load: Load) -> None:
    """Ray is not queried, and no node lacks it."""
    world = World(load("ray: none"))
    case.bring_up(world.inventory, world, SECRETS)
    world.responses["servers"] = supervision.head_report()
    report = query_status(world)
    commands, _ = status.query_head(
        Site(world.inventory, probe_nodes(world.inventory, FakeTransport(world.answer), []))
    )

    assert [(node.ray, node.gpus, node.drift) for node in report.nodes] == [("-", "8", ())] * 2
    assert report.whole
    assert ("dashboard" in commands.argv[-1], "peers" in commands.argv[-1]) == (False, False)
    world.responses["servers"]["members"]["gpu02"] = 75.0
    assert not query_status(world).whole


def test_a_server_without_a_spec_is_listed_until_it_is_gone(world: World) -> None:
    """A stopped one is not listed."""
    jobs(
        world,
        supervision.server_row(None, supervision.make_record("a", state="ready")),
        supervision.server_row(None, supervision.make_record("b", state="stopped")),
    )

    assert [
        (server.name, server.state, server.model) for server in query_status(world).servers
    ] == [("a", "stopping", "org/m")]


ANSWER = {"model": "m", "fingerprint": "vllm-0.32.0-pp2-x"}


def test_a_server_has_its_supervisors_state(world: World) -> None:
    """The supervisor's warnings are shown with it."""
    how = supervision.make_record(
        warning="2 canaries were refused",
        first_answer=ANSWER,
        held={"gpu01": {"kv_cache_size_tokens": "12345", "kv_cache_max_concurrency": "3.5"}},
        endpoints={"gpu01": EndpointHealth(verdict="answering", seconds=0.25)},
        load=supervision.make_load(),
    )
    server = serve(world, how)

    assert (server.state, server.backend, server.model, server.seconds) == (
        "answering",
        "ray",
        "m",
        0.25,
    )
    assert (server.fingerprint, server.kv_tokens, server.concurrency, server.load) == (
        "vllm-0.32.0-pp2-x",
        12345,
        3.5,
        supervision.make_load(),
    )
    assert (server.warning, server.nodes, server.age) == (
        "2 canaries were refused",
        ("gpu01", "gpu02"),
        2.0,
    )


@pytest.mark.parametrize(
    ("verdict", "whole"),
    [
        ("busy", True),
        ("quiet", True),
        ("resting", True),
        ("suspect", False),
        ("unknown", False),
        ("of another version", False),
    ],
)
def test_unhealthy_clusters(world: World, verdict: str, whole: bool) -> None:
    """Certain failures count, and unknown states."""
    jobs(
        world,
        supervision.server_row(
            supervision.make_spec(), supervision.make_record(verdict=verdict, reason="so it is")
        ),
    )
    report = query_status(world)

    assert (report.whole, report.servers[0].detail) == (whole, "so it is")


def test_a_server_without_a_record(world: World) -> None:
    """Its spec is new."""
    server = serve(world, None)

    assert (server.state, server.detail) == (
        "waiting",
        "the head's agent has not picked it up yet",
    )


def test_several_servers_are_judged_separately(world: World) -> None:
    """The first is the one for older readers of the JSON."""
    jobs(
        world,
        supervision.server_row(
            supervision.make_spec("chat"), supervision.make_record("chat", verdict="suspect")
        ),
        supervision.server_row(supervision.make_spec("embed"), supervision.make_record("embed")),
    )
    report = query_status(world)

    assert [(server.name, server.state) for server in report.servers] == [
        ("chat", "suspect"),
        ("embed", "answering"),
    ]
    data = json.loads(json.dumps(report.as_json()))
    assert data["server"] == data["servers"][0]
    assert data["servers"][1]["observed"]["state"] == "ready"


def test_the_last_fault_is_shown_with_names_of_nodes(world: World) -> None:
    """Beside a current answer."""
    how = supervision.make_record(
        fault_count=4,
        faults=[supervision.make_fault(node="10.0.0.12", evidence="10.0.0.12: killed")],
    )
    observed = serve(world, how).observed

    assert observed is not None
    assert (observed.faults[0].node, observed.faults[0].evidence, observed.fault_count) == (
        "gpu02",
        "gpu02: killed",
        4,
    )


@pytest.mark.parametrize(
    "row",
    [
        None,
        5,
        {"name": 5},
        {"name": "x", "observed": []},
        {"name": "x", "age": "old"},
    ],
)
def test_any_record(world: World, row: Any) -> None:
    """Nodes answer what they like."""
    jobs(world, row)

    assert query_status(world).servers == ()


@pytest.mark.parametrize(
    "row",
    [
        {"name": "x", "desired": 5},
        {"name": "x", "desired": {}},
        {
            **supervision.server_row(supervision.make_spec(), supervision.make_record()),
            "name": "x",
            "observed": {"version": 2, "faults": [None]},
        },
    ],
)
def test_a_server_with_unreadable_files_may_run(world: World, row: Any) -> None:
    """It is unknown, not absent: it may hold GPUs, and `stop` ends it."""
    jobs(world, row)
    report = query_status(world)

    (server,) = report.servers
    assert (server.name, server.state, server.model, report.whole) == ("x", "unknown", "", False)
    assert server.detail == (
        "its files are damaged, or of another version of vlaunch; to stop it, run `vlaunch stop x`"
    )


def test_an_agent_of_another_version_is_reported(world: World) -> None:
    """By the digest of the program that runs, not of the file on the node; one that reports none
    is not judged.
    """
    jobs(world, programs={"gpu01": node_files.agent_digest(), "gpu02": "0" * 64})
    report = query_status(world)

    assert [node.old_agent for node in report.nodes] == [False, True]
    assert report.whole
    jobs(world, programs={"gpu01": "", "gpu02": ""})
    assert not any(node.old_agent for node in query_status(world).nodes)


def test_ranks_are_shown_on_their_nodes(world: World) -> None:
    """From the names of the actors."""
    actor = {"name": "vllm_Worker_1_PP1", "state": "ALIVE", "node_id": "gpu02"}
    world.responses["jobs"]["actors"] = [actor]

    assert [node.ranks for node in query_status(world).nodes] == [(), ("PP1",)]


def test_ranks_outside_of_ray_are_shown(world: World) -> None:
    """Ranks of the `mp` backend, with their server's name if there are several."""
    ranks = {"gpu01": ["TP0 PP0"], "gpu02": ["TP0 PP1"]}
    mine = supervision.server_row(
        supervision.make_spec("a", backend="mp"), supervision.make_record("a", ranks=ranks)
    )
    jobs(world, mine)
    assert [node.ranks for node in query_status(world).nodes] == [("TP0 PP0",), ("TP0 PP1",)]

    jobs(
        world,
        mine,
        supervision.server_row(
            supervision.make_spec("b"), supervision.make_record("b", ranks=ranks)
        ),
    )
    assert [node.ranks for node in query_status(world).nodes] == [
        ("a: TP0 PP0", "b: TP0 PP0"),
        ("a: TP0 PP1", "b: TP0 PP1"),
    ]


def test_recorded_answers_of_an_idle_cluster(load: Load) -> None:
    """From a real cluster of two nodes."""
    nodes = (
        "nodes: [{host: node1, ip: 10.77.0.11, gpus: 1}, {host: node2, ip: 10.77.0.12, gpus: 1}]"
    )
    world = World(load("accelerator: cpu", nodes))
    case.bring_up(world.inventory, world, SECRETS)
    world.responses["jobs"] = {
        **json.loads((FIXTURES / "head-jobs.json").read_text()),
        **supervision.head_report(node1=0.1, node2=0.1),
    }
    report = query_status(world)

    assert [(node.ray, node.gpus) for node in report.nodes] == [("alive", "1/1"), ("alive", "1/1")]
    assert report.servers == ()


@pytest.mark.parametrize("out", ["", "Traceback", "[]", '{"error": "Connection refused"}'])
def test_without_the_heads_answer_the_server_is_unknown(out: str, world: World) -> None:
    """And so are the nodes in Ray."""
    facts = probe_nodes(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    payload = try_payload(Answer(node="gpu01", code=1, out=out))
    report = status.build_status(
        ClusterSnapshot(site=Site(world.inventory, facts), payload=payload), {}
    )

    assert [server.state for server in report.servers] == ["unknown"]
    assert [server.ray for server in report.nodes] == ["unknown", "unknown"]
    assert not report.whole


def test_a_table_of_another_shape_is_unreadable(world: World) -> None:
    """A failure, not a cluster without nodes."""
    world.responses["jobs"]["nodes"] = [{"node_id": 1}]
    with pytest.raises(UnreadableAnswer, match="Ray's node table"):
        query_status(world)


PROOF = {
    "taken": "2026-11-20",
    "passed": True,
    "asked": "auto",
    "required": "any",
    "ranks_per_node": 0,
    "collective": True,
    "summary": "1 pair over NET/IB",
}


def proof(world: World, **overrides: Any) -> None:
    """Store a network verdict for the running containers."""
    facts = probe_nodes(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    incarnation = verdict.incarnation(Site(world.inventory, facts))
    world.machines["gpu01"].files["network.json"] = json.dumps(
        {**PROOF, "incarnation": incarnation, **overrides}
    ).encode()


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_verdict_is_about_containers(world: World, backend: str) -> None:
    """A new container invalidates it; the result of a server's own logs is shown as long as that
    server exists.
    """
    proof(world, servers={"default": {"id": "id-default", "said": "NET/IB, 4 links"}})
    jobs(
        world,
        supervision.server_row(supervision.make_spec(backend=backend), supervision.make_record()),
    )
    proven = "verified 2026-11-20: 1 pair over NET/IB"

    assert query_status(world).network == f"{proven}; server `default`: NET/IB, 4 links"
    jobs(
        world,
        supervision.server_row(
            supervision.make_spec("other", backend=backend), supervision.make_record("other")
        ),
    )
    assert (
        query_status(world).network
        == f"{proven}; transport in use not confirmed; `vlaunch serve` confirms it"
    )
    jobs(
        world,
        supervision.server_row(
            supervision.make_spec("small", places={"gpu01": 2}), supervision.make_record("small")
        ),
    )
    assert query_status(world).network == proven
    world.container("gpu02")["Id"] = "another"
    assert (
        query_status(world).network == "not checked for these containers: run `vlaunch check-nccl`"
    )
    world.stop("gpu02")
    assert query_status(world).network == ""


def test_health_needs_every_part(world: World) -> None:
    """A single problem of a single node is enough."""
    report = query_status(world)
    spoiled: list[dict[str, Any]] = [
        {"container": "exited"},
        {"ray": "dead"},
        {"ray": "absent"},
        {"agent": "lost"},
        {"drift": ("x",)},
        {"trouble": "x"},
    ]

    assert not any(
        dataclasses.replace(
            report, nodes=(report.nodes[0], dataclasses.replace(report.nodes[1], **case))
        ).whole
        for case in spoiled
    )
