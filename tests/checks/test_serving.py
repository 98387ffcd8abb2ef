"""Judges of a server to be, and of one that was stopped, on what Ray and the nodes answered."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.checks import serving
from launcher.checks.shape import Finding, worst
from launcher.model import Inventory, Node
from launcher.site import Site
from launcher.tools import docker
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelSeen

NODES = (
    Node(name="n1", host="n1", ip="10.77.0.11", gpus=1, head=True),
    Node(name="n2", host="n2", ip="10.77.0.12", gpus=1),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="i", nodes=NODES)
NAMES = {"n1": "vlaunch-c-n1", "n2": "vlaunch-c-n2"}


def table(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"result": {"result": list(rows)}}}


def ray_nodes(*ips: str, dead: str = "") -> dict[str, Any]:
    return table(
        *(
            {
                "node_id": f"id-{ip}",
                "node_ip": ip,
                "state": "DEAD" if ip == dead else "ALIVE",
                "resources_total": {"GPU": 1.0},
            }
            for ip in ips
        )
    )


def group(state: str = "CREATED", gpus: int = 2) -> dict[str, Any]:
    return {"state": state, "bundles": [{"unit_resources": {"GPU": 1.0}} for _ in range(gpus)]}


def rank(ip: str, name: str = "vllm_Worker_17_PP0", **more: object) -> dict[str, Any]:
    return {"name": name, "state": "ALIVE", "node_id": f"id-{ip}", **more}


def container(name: str, status: str = "running") -> docker.Container:
    return docker.Container(
        name=name,
        id="1",
        role="head",
        node="",
        image="i",
        status=status,
        spec="",
        exit_code=0,
        restarts=0,
        env={},
        labels={},
    )


def site(**status: str) -> Site:
    found = {
        name: HostFacts(
            containers=(container(NAMES[name], status[name]),) if name in status else (),
            listening=frozenset(),
        )
        for name in NAMES
    }
    return Site(INVENTORY, found)


def texts(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(each.node, each.status, each.text) for each in findings]


def test_a_whole_cluster() -> None:
    """Every container runs and every address is in Ray."""
    said = {"nodes": ray_nodes("10.77.0.11", "10.77.0.12")}

    assert worst(serving.cluster(site(n1="running", n2="running"), said)) == "pass"


def test_a_ray_that_is_only_slow_is_not_brought_up_again() -> None:
    """Engines may have every core of a small head."""
    (slow,) = serving.cluster(site(n1="running", n2="running"), {"error": "n1: timed out"})
    (gone,) = serving.cluster(site(n1="running", n2="running"), {"error": "connection refused"})

    assert "run the same command again" in slow.fix
    assert "vlaunch up" in gone.fix


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        ({"n1": "running"}, {}, ("n2", "fail", "has no container of this cluster")),
        ({"n1": "running", "n2": "exited"}, {}, ("n2", "fail", "its container is exited")),
        (
            {"n1": "running", "n2": "running"},
            {"error": "refused"},
            ("n1", "fail", "Ray does not answer: refused"),
        ),
        (
            {"n1": "running", "n2": "running"},
            {"nodes": ray_nodes("10.77.0.11", "10.77.0.12", dead="10.77.0.12")},
            ("n2", "fail", "is not in Ray"),
        ),
    ],
)
def test_a_cluster_that_is_not_whole(
    status: dict[str, str], said: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    """The node and what is wrong with it are named, and `vlaunch up` is the way out."""
    bad = [each for each in serving.cluster(site(**status), said) if each.status != "pass"]

    assert texts(bad) == [expected]
    assert "vlaunch up" in bad[0].fix


THERE = ModelSeen(where="there", digest="a")


@pytest.mark.parametrize(
    ("seen", "offline", "expected"),
    [
        ({"n1": THERE, "n2": THERE}, False, ["pass", "pass"]),
        ({"n1": THERE, "n2": ModelSeen(where="missing")}, False, ["pass", "fail"]),
        ({"n1": THERE, "n2": ModelSeen(where="there", digest="b")}, False, ["fail", "fail"]),
        # a GGUF file has no config.json
        ({"n1": THERE, "n2": ModelSeen(where="there")}, False, ["pass", "pass"]),
        ({"n1": THERE, "n2": ModelSeen(where="not cached")}, False, ["pass", "pass"]),
        ({"n1": THERE, "n2": ModelSeen(where="not cached")}, True, ["pass", "fail"]),
        ({"n1": THERE}, False, ["pass", "skip"]),
        ({"n1": THERE, "n2": ModelSeen(where="unknown")}, False, ["pass", "skip"]),
    ],
)
def test_model(seen: dict[str, ModelSeen], offline: bool, expected: list[str]) -> None:
    """Missing on one node, different on two, or not to be downloaded: refused.

    Not known: said to be.
    """
    assert expected == [
        each.status for each in serving.model(NODES, "/m", seen, dict.fromkeys(NAMES, offline))
    ]


@pytest.mark.parametrize(
    ("said", "busy"),
    [
        ({}, 0),
        ({"groups": table()}, 0),
        ({"groups": table(group(), group("REMOVED"), group("PENDING"))}, 2),
        ({"actors": table(rank("10.77.0.11", required_resources={"GPU": 1.0}))}, 1),
        (
            {
                "actors": table(
                    rank("10.77.0.11", required_resources={"GPU": 1.0}, placement_group_id="g")
                )
            },
            0,
        ),
        ({"actors": table(rank("10.77.0.11", required_resources=None))}, 0),
    ],
)
def test_busy_gpus(said: dict[str, Any], busy: float) -> None:
    """What living placement groups reserve counts once, and actors outside of any count too."""
    assert busy == serving.busy_gpus(said)


def test_busy_gpus_of_a_recorded_cluster() -> None:
    """One group of two bundles lives; two others have been removed."""
    rows = json.loads(
        (
            Path(__file__).parent.parent / "fixtures" / "vllm" / "placement_groups_pp2.json"
        ).read_text()
    )

    assert serving.busy_gpus({"groups": table(*rows)}) == 2


def test_free_gpus() -> None:
    """Too few free GPUs are refused with both numbers."""
    (enough,) = serving.free_gpus(INVENTORY, 2, "TP 1 × PP 2", {}, [])
    (short,) = serving.free_gpus(INVENTORY, 2, "TP 1 × PP 2", {"groups": table(group(gpus=1))}, [])

    assert enough.status == "pass"
    assert (short.status, short.text) == (
        "fail",
        "1 of 2 GPUs are free in Ray, TP 1 × PP 2 needs 2",
    )


@pytest.mark.parametrize(
    ("listening", "status"),
    [
        (frozenset({("0.0.0.0", 8000)}), "fail"),
        (frozenset({("0.0.0.0", 80)}), "pass"),
        (None, "skip"),
    ],
)
def test_port(listening: frozenset[tuple[str, int]] | None, status: str) -> None:
    """A listener on any address has the port; without `ss` it is not known."""
    found = serving.port(NODES[0], 8000, "vLLM API", HostFacts(listening=listening))

    assert status == found.status


@pytest.mark.parametrize(
    ("heard", "argv", "text"),
    [
        (59.0, ("entry.sh", "agent"), ""),
        (61.0, ("entry.sh", "agent"), "its agent was last heard 61s ago"),
        (None, ("entry.sh", "agent"), "its agent was never heard"),
        (math.inf, ("entry.sh", "agent"), "its agent was never heard"),
        (1.0, ("entry.sh", "ray"), "its container was started by an older vlaunch"),
    ],
)
def test_agents(heard: float | None, argv: tuple[str, ...], text: str) -> None:
    """Nothing can be started where none is connected; a container of another vlaunch has none."""
    there = {"n1": HostFacts(containers=(replace(container(NAMES["n1"]), argv=argv),))}
    at = {} if heard is None else {"n1": heard}
    (found,) = serving.agents(Site(INVENTORY, there), NODES[:1], at)

    assert (found.status, found.text.partition(", so")[0]) == ("fail" if text else "pass", text)
    assert bool(found.fix) is bool(text)


CHAT = serving.Holder(what="server `chat`", gpus=1, end="vlaunch stop chat")


@pytest.mark.parametrize(
    ("holders", "in_ray", "text"),
    [
        ([], 0, ""),
        ([CHAT], 1, ""),  # what it holds and what Ray has given away are the same
        (
            [CHAT],
            2,
            "2 of 4 GPUs are free, the server needs 3: server `chat` holds 1, work in Ray holds 1",
        ),
        (
            [CHAT, CHAT],
            0,
            (
                "2 of 4 GPUs are free, the server needs 3: server `chat` holds 1, server `chat`"
                " holds 1"
            ),
        ),
        ([], 3, "1 of 4 GPUs are free, the server needs 3: work in Ray holds 3"),
    ],
)
def test_the_gpus_of_a_node(holders: list[serving.Holder], in_ray: float, text: str) -> None:
    """Whoever holds them is named, with what ends it or shows it."""
    found = serving.node_gpus(replace(NODES[0], gpus=4), 3, holders, in_ray)

    assert (found.status, found.text) == ("fail" if text else "pass", text)
    assert ("vlaunch stop chat" in found.fix or "ray list" in found.fix) is bool(text)


def test_where_ray_has_given_gpus_away() -> None:
    """By the address of the node, from placement groups and from actors outside of any."""
    bundle = {"unit_resources": {"GPU": 1.0}, "node_id": "id-10.77.0.12"}
    said = {
        "nodes": ray_nodes("10.77.0.11", "10.77.0.12"),
        "groups": table(
            {"state": "CREATED", "bundles": [bundle, bundle]},
            {"state": "REMOVED", "bundles": [bundle]},
        ),
        "actors": table(rank("10.77.0.11", required_resources={"GPU": 1.0})),
    }

    assert serving.busy_by_node(said) == {"10.77.0.11": 1, "10.77.0.12": 2}
    assert serving.busy_by_node({}) == {}


@pytest.mark.parametrize(
    ("alive", "ports", "said", "others", "text"),
    [
        ([], [], None, 0, ""),
        ([], [], {"jobs": []}, 0, ""),
        (["server `a` is stopping"], [], None, 0, "server `a` is stopping"),
        ([], ["port 8000 on n1"], None, 0, "port 8000 on n1 is still open"),
        ([], [], {"jobs": [], "groups": table(group())}, 0, "2 GPUs are still reserved in Ray"),
        ([], [], {"jobs": [], "groups": table(group())}, 2, ""),
        (
            [],
            [],
            {"jobs": [{"submission_id": "b-1", "status": "RUNNING"}], "groups": table(group())},
            0,
            "",
        ),
        ([], [], {"error": "refused"}, 0, "Ray cannot be asked: refused"),
    ],
)
def test_stopped(alive: list[str], ports: list[str], said: Any, others: float, text: str) -> None:
    """Down means gone: what is left is waited for, but for what others hold; absence is observed,
    never assumed.
    """
    (found,) = serving.stopped(alive, ports, said, others)

    assert (found.status, found.text if text else "") == ("wait" if text else "pass", text)
