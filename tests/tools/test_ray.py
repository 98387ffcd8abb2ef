"""Command lines of Ray, and parsers for its recorded output."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.domain import Inventory
from launcher.core.errors import UnreadableAnswer
from launcher.inventory.load import loads
from launcher.tools import ray

FIXTURES = Path(__file__).parents[1] / "fixtures" / "ray"


def recorded(name: str) -> Any:
    text = (FIXTURES / name).read_text()
    return json.loads(text) if name.endswith(".json") else text


def inventory(extra_yaml: str = "") -> Inventory:
    nodes = "nodes: [{host: a, ip: 10.0.0.1, gpus: 8}, {host: b, ip: 10.0.0.2, gpus: 4}]"
    return loads(
        f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\n{extra_yaml}\n{nodes}\n",
        Path("inventory.yaml"),
    )


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    """Return a command's flags with values."""
    pairs = pairwise(argv)
    return {
        flag: value for flag, value in pairs if flag.startswith("--") and not value.startswith("--")
    }


def test_a_worker_joins_the_head_under_its_own_address_with_its_own_gpus() -> None:
    """The head's address and port, the worker's own IP and count."""
    declared = inventory("ports: {gcs: 7000}")
    argv = ray.start_worker(declared.node("b"), declared)

    assert argv[:3] == ("ray", "start", "--block")
    assert "--head" not in argv
    assert {
        "--address": "10.0.0.1:7000",
        "--node-ip-address": "10.0.0.2",
        "--num-gpus": "4",
    }.items() <= flags(argv).items()


def test_the_dashboard_is_for_the_head_alone() -> None:
    """It listens on loopback, because its clients can run code."""
    declared = inventory()

    assert flags(ray.start_head(declared.head, declared))["--dashboard-host"] == "127.0.0.1"


@pytest.mark.parametrize("head", [True, False])
def test_all_ports_are_fixed_for_firewalls(head: bool) -> None:
    """Flags do not share ports, and all are the inventory's."""
    declared = inventory("ports: {node_manager: 7001, object_manager: 7002, metrics_export: 7003}")
    argv = (
        ray.start_head(declared.head, declared)
        if head
        else ray.start_worker(declared.workers[0], declared)
    )
    ports = {flag: value for flag, value in flags(argv).items() if flag.endswith("port")}

    assert ports["--node-manager-port"] == "7001"
    assert ports["--object-manager-port"] == "7002"
    assert ports["--metrics-export-port"] == "7003"
    assert len(set(ports.values())) == len(ports) == (11 if head else 8)


def test_the_object_store_has_rays_default_size() -> None:
    """In bytes."""
    plain, sized = inventory(), inventory("ray: {object_store: 200MB}")

    assert "--object-store-memory" not in ray.start_head(plain.head, plain)
    assert flags(ray.start_head(sized.head, sized))["--object-store-memory"] == "200000000"


def test_recorded_node_table() -> None:
    """Address, state and GPUs of nodes."""
    head, worker = ray.parse_nodes(recorded("head-nodes.json")["nodes"])

    assert (head.ip, head.alive, head.gpus) == ("10.77.0.11", True, 1.0)
    assert (worker.ip, worker.alive, worker.gpus) == ("10.77.0.12", True, 1.0)
    raw = recorded("api_v0_nodes.json")
    assert {node.ip for node in ray.parse_nodes(raw["data"]["result"]["result"])} == {"192.0.2.2"}


def test_a_dead_node_stays_in_the_table_with_its_reason() -> None:
    """Until a node with the same address is alive."""
    rows = recorded("ray_list_nodes_one_dead.json")
    for row in rows:
        row["resources_total"] = {"GPU": 1.0}
    _, dead = ray.parse_nodes(rows)

    assert (dead.ip, dead.alive) == ("10.77.0.12", False)
    assert "missing too many heartbeats" in dead.message

    again = [*rows, {**rows[1], "node_id": "new", "state": "ALIVE", "state_message": None}]

    assert [(node.ip, node.id) for node in ray.parse_nodes(again)] == [
        ("10.77.0.11", rows[0]["node_id"]),
        ("10.77.0.12", "new"),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"data": None},
        "x",
        [{}],
        [None],
        [{"node_id": 1}],
        [{"node_id": "a", "node_ip": "b", "state": "ALIVE", "resources_total": {"GPU": "many"}}],
        [{"node_id": "a", "node_ip": "b", "state": "ALIVE", "resources_total": [1]}],
    ],
)
def test_a_node_table_of_another_shape_is_unreadable(answer: Any) -> None:
    """Without guesses."""
    with pytest.raises(UnreadableAnswer):
        ray.parse_nodes(answer)


@pytest.mark.parametrize(
    ("name", "active", "used", "total"),
    [
        ("ray_status_2nodes.txt", 2, 0.0, 2.0),
        ("ray_status_2nodes_idle.txt", 1, 0.0, 4.0),
        ("ray_status_2nodes_verbose.txt", 2, 0.0, 2.0),
        ("ray_status_2nodes_vllm_running.txt", 2, 2.0, 2.0),
        ("ray-status-lab-2nodes.txt", 2, 0.0, 2.0),
        ("ray_status_node_dead.txt", 1, 0.0, 4.0),
        ("ray_status_node_missing.txt", 1, 0.0, 1.0),
        ("ray_status_rejoined.txt", 2, 0.0, 2.0),
        ("ray_status_pg_pending.txt", 2, 0.0, 8.0),
        ("ray_status_pending_demand.txt", 1, 0.0, 1.0),
    ],
)
def test_recorded_ray_status(name: str, active: int, used: float, total: float) -> None:
    """Active nodes, used and total GPUs."""
    status = ray.parse_status(recorded(name))

    assert status.active == active
    assert (status.gpus_used, status.gpus_total) == (used, total)


def test_idle_nodes_count_as_active() -> None:
    """Newer versions of Ray list them in a section of their own."""
    text = "Active:\n 1 node_a\nIdle:\n 2 node_b\nPending:\n (no pending nodes)\n"

    assert ray.parse_status(text).active == 3


@pytest.mark.parametrize(
    "text",
    ["", "ConnectionError: Could not find any running Ray instance.", "Active:\n what is this\n"],
)
def test_invalid_ray_status_is_unreadable(text: str) -> None:
    """A traceback must not read as an empty cluster."""
    with pytest.raises(UnreadableAnswer):
        ray.parse_status(text)


@given(st.text())
def test_any_text_as_ray_status(text: str) -> None:
    """It is parsed or unreadable."""
    with suppress(UnreadableAnswer):
        ray.parse_status("Active:\n" + text)


def test_ranks_are_those_of_living_actors_on_their_nodes() -> None:
    """Earlier runs leave dead actors of the same kind."""
    nodes = tuple(
        ray.RayNode(id=row["node_id"], ip=row["node_ip"], alive=True, gpus=1)
        for row in recorded("ray_list_nodes_one_dead.json")
    )

    assert ray.parse_ranks(recorded("ray_list_actors_pp2.json"), nodes) == {
        "10.77.0.11": ("PP0",),
        "10.77.0.12": ("PP1",),
    }


def test_ranks_have_names_in_any_dimension() -> None:
    """Dimensions of size one are not in an actor's name; actors of other programs are no ranks."""
    nodes = (ray.RayNode(id="n", ip="10.0.0.1", alive=True, gpus=2),)
    rows = [
        {"name": "vllm_Worker_17_TP1_PP0", "state": "ALIVE", "node_id": "n"},
        {"name": "vllm_Worker_17_TP0_PP0", "state": "ALIVE", "node_id": "n"},
        {"name": "vllm_Worker_18", "state": "ALIVE", "node_id": "gone"},
        {"name": "JobSupervisor", "state": "ALIVE", "node_id": "n"},
        {"name": None, "state": "ALIVE", "node_id": "n"},
    ]

    assert ray.parse_ranks(rows, nodes) == {
        "10.0.0.1": ("TP0 PP0", "TP1 PP0"),
        "?": ("the only rank",),
    }


def test_ranks_of_replicas() -> None:
    """vLLM puts a replica's number into the instance's name, before the rank's own position."""
    names = (
        "vllm_Worker_1795224958186317851_dp0",
        "vllm_Worker_1795224958186317851_dp1_TP0",
        "vllm_Worker_17_dp10_TP1_PP2",
    )
    rows = [{"name": name, "state": "ALIVE", "node_id": "a"} for name in names]
    nodes = (ray.RayNode(id="a", ip="10.0.0.1", alive=True, gpus=1.0, message=""),)

    assert ray.parse_ranks(rows, nodes) == {"10.0.0.1": ("DP0", "DP1 TP0", "DP10 TP1 PP2")}
