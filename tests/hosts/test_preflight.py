"""Queries of a preflight beyond the survey: nodes, containers, ports, and excluded nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from launcher.core.domain import Inventory
from launcher.hosts import preflight
from launcher.tools import model
from launcher.tools.host import HostFacts
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.host.survey import Nic, Survey
from launcher.tools.site import Site
from tests.conftest import Load
from tests.fakes import FakeTransport
from tests.plan_case import bring_up
from tests.simulated import World

NODES = (
    "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8}, {host: gpu02, ip: 10.0.0.12, gpus: 8, head:"
    " true}, {host: gpu03, ip: 10.0.0.13, gpus: 8}]"
)
ETH0 = Nic(name="eth0", up=True, mtu=9000)


def collect_facts(inventory: Inventory, *, up: bool = False, **survey: Any) -> dict[str, HostFacts]:
    """Survey nodes with the image."""
    world = World(inventory)
    if up:
        bring_up(inventory, world, {})
    facts = probe_nodes(inventory, FakeTransport(world.answer), [inventory.image])
    surveyed = Survey(**{"python": "3.12.3", "nics": (ETH0,), **survey})
    return {name: replace(node_facts, survey=surveyed) for name, node_facts in facts.items()}


def without_image(facts: HostFacts) -> HostFacts:
    """Return the facts of a node without the image."""
    return replace(facts, images={})


def probing(inventory: Inventory, facts: dict[str, HostFacts]) -> dict[str, dict[str, Any]]:
    """Return the nodes' probe requests."""
    queries = preflight.query_port_probes(Site(inventory, facts), high=43210, nonce="f00d")
    return {command.node: json.loads(command.argv[-1]) for command in queries.commands}


def test_a_temporary_container_changes_nothing_on_the_node(load: Load) -> None:
    """It has the real one's rights and devices, without mounts: Docker would create their
    directories.
    """
    inventory = load("network: {fabric: infiniband}")
    queries = preflight.query_containers(Site(inventory, collect_facts(inventory)))

    assert queries.missing == {}
    for command in queries.commands:
        assert command.argv[3:6] == ("once", f"vlaunch-c-{command.node}-probe", "--interactive")
        assert {"/dev/infiniband", "IPC_LOCK"} <= set(command.argv)
        assert not {"--volume", "--mount", "--detach", "--restart"} & set(command.argv)
        assert "/opt/vlaunch/entry.sh" not in command.argv  # it is on a mount


def test_a_running_container_is_queried_itself(load: Load) -> None:
    """Not a temporary one."""
    inventory = load()
    queries = preflight.query_containers(Site(inventory, collect_facts(inventory, up=True)))

    assert [command.argv[:3] for command in queries.commands] == [
        ("docker", "exec", "vlaunch-c-gpu01"),
        ("docker", "exec", "vlaunch-c-gpu02"),
    ]


def test_a_node_without_the_image_is_skipped(load: Load) -> None:
    """It is named with a fix; unreachable nodes are not repeated."""
    inventory = load(nodes=NODES)
    facts = collect_facts(inventory)
    facts = {"gpu01": facts["gpu01"], "gpu02": without_image(facts["gpu02"])}
    queries = preflight.query_containers(Site(inventory, facts))

    assert [command.node for command in queries.commands] == ["gpu01"]
    assert queries.missing == {
        "gpu02": "vllm/vllm-openai:v0.32.0 is not on this node yet: run `vlaunch up`"
    }


def test_ports_between_nodes(load: Load) -> None:
    """Those that other nodes must reach, without repetition, including the copy port; the head also
    has those of Ray's head, of `mp` and of the probe.
    """
    inventory = load(nodes=NODES)
    head, worker = (
        preflight.fixed_ports(inventory.ports, inventory.head),
        preflight.fixed_ports(inventory.ports, inventory.workers[0]),
    )

    assert set(worker) == {6380, 6381, 10002, 29570}
    assert set(head) == {*worker, 6379, 10001, 29501, 29550, 29560, 29500}


def test_all_nodes_probe_one_another_at_once(load: Load) -> None:
    """One high port and one nonce for all; all listen on their own fixed ports and address, with
    their card's MTU.
    """
    inventory = load(nodes=NODES)
    requests = probing(inventory, collect_facts(inventory))

    assert {
        name: [peer["name"] for peer in request["peers"]] for name, request in requests.items()
    } == {
        "gpu01": ["gpu02", "gpu03"],
        "gpu02": ["gpu01", "gpu03"],
        "gpu03": ["gpu01", "gpu02"],
    }
    assert {
        (request["port"], request["nonce"], request["mtu"]) for request in requests.values()
    } == {(43210, "f00d", 9000)}
    assert requests["gpu01"]["ip"] == "10.0.0.11"
    assert requests["gpu01"]["listen"] == sorted(
        preflight.fixed_ports(inventory.ports, inventory.node("gpu01"))
    )
    assert requests["gpu01"]["peers"][0]["ports"] == list(
        preflight.fixed_ports(inventory.ports, inventory.head)
    )
    for command in preflight.query_port_probes(
        Site(inventory, collect_facts(inventory)), high=43210, nonce="f00d"
    ).commands:
        assert (command.simultaneous, command.hold_stdin, command.stdin is not None) == (
            True,
            True,
            True,
        )


@pytest.mark.parametrize(
    ("python", "up", "begins"),
    [
        ("3.11", True, ("python3", "-c")),
        ("", True, ("docker", "exec", "--interactive", "vlaunch-c-gpu01", "python3")),
        (
            "",
            False,
            (
                *("sh", "-c", ANY, "once", "vlaunch-c-gpu01-probe"),
                *("--pull", "never", "--interactive", "--network", "host"),
            ),
        ),
    ],
)
def test_a_node_without_python_uses_the_images(
    load: Load, python: str, up: bool, begins: tuple[str, ...]
) -> None:
    """On the host's network, in its container, else in a temporary one."""
    inventory = load()
    queries = preflight.query_port_probes(
        Site(inventory, collect_facts(inventory, up=up, python=python)), high=43210, nonce="f00d"
    )

    assert queries.commands[0].argv[: len(begins)] == begins


def test_excluded_nodes_have_a_reason(load: Load) -> None:
    """Without its address no socket can be bound; without Python and image the program cannot run.
    The others continue.
    """
    inventory = load(nodes=NODES.replace("]", ", {host: gpu04, ip: 10.0.0.14, gpus: 8}]"))
    facts = collect_facts(inventory)
    facts["gpu03"] = replace(facts["gpu03"], addresses=())
    facts["gpu04"] = replace(without_image(facts["gpu04"]), survey=Survey(python=""))
    queries = preflight.query_port_probes(Site(inventory, facts), high=43210, nonce="f00d")

    assert [command.node for command in queries.commands] == ["gpu01", "gpu02"]
    assert queries.missing == {
        "gpu03": "no interface has 10.0.0.13",
        "gpu04": (
            "neither Python nor vllm/vllm-openai:v0.32.0 is on this node yet: run `vlaunch up`"
        ),
    }


def test_a_single_node_has_no_peers_to_probe(load: Load) -> None:
    """No commands, and the other node's reason stays."""
    inventory = load()
    facts = collect_facts(inventory)
    facts["gpu02"] = replace(facts["gpu02"], addresses=())
    queries = preflight.query_port_probes(Site(inventory, facts), high=43210, nonce="f00d")

    assert (queries.commands, list(queries.missing)) == ((), ["gpu02"])


def test_the_high_port_is_free_everywhere(load: Load) -> None:
    """The first free candidate on all nodes, else the first."""
    facts = collect_facts(load())
    facts["gpu01"] = replace(facts["gpu01"], listening=frozenset({("0.0.0.0", 40001)}))
    facts["gpu02"] = replace(facts["gpu02"], listening=frozenset({("10.0.0.12", 40002)}))

    assert preflight.pick_high_port(facts, [40001, 40002, 40003]) == 40003
    assert preflight.pick_high_port(facts, [40001, 40002]) == 40001
    assert (
        preflight.pick_high_port({"gpu01": replace(facts["gpu01"], listening=None)}, [40001])
        == 40001
    )


def test_files_are_listed_in_the_models_location(load: Load) -> None:
    """In the Ray container, with its mounts, or on the node; the name is an argument."""
    inventory = load()
    down, up = collect_facts(inventory), collect_facts(inventory, up=True)
    name = "org/$(id)"

    assert [
        command.argv[:2] for command in model.query_scans(Site(inventory, down), name, hosts=True)
    ] == [("sh", "-c")] * 2
    assert [
        command.argv[:3] for command in model.query_scans(Site(inventory, up), name, hosts=True)
    ] == [
        ("docker", "exec", "vlaunch-c-gpu01"),
        ("docker", "exec", "vlaunch-c-gpu02"),
    ]
    assert model.query_scans(Site(inventory, down), name, hosts=True)[0].argv[-2:] == (
        name,
        "/data/huggingface",
    )
    assert model.query_scans(Site(inventory), name, hosts=True) == []
