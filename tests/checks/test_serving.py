"""Judges of a server to be, and of one that was stopped, on what Ray and the nodes answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.checks import serving
from launcher.checks.shape import Finding, worst
from launcher.model import Inventory, Node
from launcher.tools import docker
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelSeen

NODES = (
    Node(name="n1", host="n1", ip="10.77.0.11", gpus=1, head=True),
    Node(name="n2", host="n2", ip="10.77.0.12", gpus=1),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="i", nodes=NODES)
NAMES = {"n1": "c-n1", "n2": "c-n2"}


def table(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"result": {"result": list(rows)}}}


def ray_nodes(*ips: str, dead: str = "") -> dict[str, Any]:
    return table(
        *(
            {"node_id": f"id-{ip}", "node_ip": ip, "state": "DEAD" if ip == dead else "ALIVE", "resources_total": {"GPU": 1.0}}
            for ip in ips
        )
    )


def group(state: str = "CREATED", gpus: int = 2) -> dict[str, Any]:
    return {"state": state, "bundles": [{"unit_resources": {"GPU": 1.0}} for _ in range(gpus)]}


def rank(ip: str, name: str = "vllm_Worker_17_PP0", **more: object) -> dict[str, Any]:
    return {"name": name, "state": "ALIVE", "node_id": f"id-{ip}", **more}


def container(name: str, status: str = "running") -> docker.Container:
    return docker.Container(
        name=name, id="1", role="head", node="", image="i", status=status, spec="", exit_code=0, restarts=0,
        env={}, labels={},
    )  # fmt: skip


def facts(**status: str) -> dict[str, HostFacts]:
    return {
        name: HostFacts(containers=(container(NAMES[name], status[name]),) if name in status else (), listening=frozenset())
        for name in NAMES
    }


def texts(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(each.node, each.status, each.text) for each in findings]


def test_a_whole_cluster() -> None:
    """Every container runs and every address is in Ray."""
    said = {"nodes": ray_nodes("10.77.0.11", "10.77.0.12")}

    assert worst(serving.cluster(INVENTORY, facts(n1="running", n2="running"), said, NAMES)) == "pass"


def test_a_ray_that_is_only_slow_is_not_brought_up_again() -> None:
    """Engines may have every core of a small head."""
    (slow,) = serving.cluster(INVENTORY, facts(n1="running", n2="running"), {"error": "n1: timed out"}, NAMES)
    (gone,) = serving.cluster(INVENTORY, facts(n1="running", n2="running"), {"error": "connection refused"}, NAMES)

    assert "run the same command again" in slow.fix
    assert "vlaunch up" in gone.fix


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        ({"n1": "running"}, {}, ("n2", "fail", "has no Ray container")),
        ({"n1": "running", "n2": "exited"}, {}, ("n2", "fail", "its Ray container is exited")),
        ({"n1": "running", "n2": "running"}, {"error": "refused"}, ("n1", "fail", "Ray does not answer: refused")),
        (
            {"n1": "running", "n2": "running"},
            {"nodes": ray_nodes("10.77.0.11", "10.77.0.12", dead="10.77.0.12")},
            ("n2", "fail", "is not in Ray"),
        ),
    ],
)
def test_a_cluster_that_is_not_whole(status: dict[str, str], said: dict[str, Any], expected: tuple[str, str, str]) -> None:
    """The node and what is wrong with it are named, and `vlaunch up` is the way out."""
    bad = [each for each in serving.cluster(INVENTORY, facts(**status), said, NAMES) if each.status != "pass"]

    assert texts(bad) == [expected]
    assert "vlaunch up" in bad[0].fix


THERE = ModelSeen(where="there", digest="a")


@pytest.mark.parametrize(
    ("seen", "offline", "expected"),
    [
        ({"n1": THERE, "n2": THERE}, False, ["pass", "pass"]),
        ({"n1": THERE, "n2": ModelSeen(where="missing")}, False, ["pass", "fail"]),
        ({"n1": THERE, "n2": ModelSeen(where="there", digest="b")}, False, ["fail", "fail"]),
        ({"n1": THERE, "n2": ModelSeen(where="there")}, False, ["pass", "pass"]),  # a GGUF file has no config.json
        ({"n1": THERE, "n2": ModelSeen(where="not cached")}, False, ["pass", "pass"]),
        ({"n1": THERE, "n2": ModelSeen(where="not cached")}, True, ["pass", "fail"]),
        ({"n1": THERE}, False, ["pass", "skip"]),
        ({"n1": THERE, "n2": ModelSeen(where="unknown")}, False, ["pass", "skip"]),
    ],
)
def test_model(seen: dict[str, ModelSeen], offline: bool, expected: list[str]) -> None:
    """Missing on one node, different on two, or not to be downloaded: refused. Not known: said to be."""
    assert expected == [each.status for each in serving.model(NODES, "/m", seen, dict.fromkeys(NAMES, offline))]


@pytest.mark.parametrize(
    ("said", "busy"),
    [
        ({}, 0),
        ({"groups": table()}, 0),
        ({"groups": table(group(), group("REMOVED"), group("PENDING"))}, 2),
        ({"actors": table(rank("10.77.0.11", required_resources={"GPU": 1.0}))}, 1),
        ({"actors": table(rank("10.77.0.11", required_resources={"GPU": 1.0}, placement_group_id="g"))}, 0),
        ({"actors": table(rank("10.77.0.11", required_resources=None))}, 0),
    ],
)
def test_busy_gpus(said: dict[str, Any], busy: float) -> None:
    """What living placement groups reserve counts once, and actors outside of any count too."""
    assert busy == serving.busy_gpus(said)


def test_busy_gpus_of_a_recorded_cluster() -> None:
    """One group of two bundles lives; two others have been removed."""
    rows = json.loads((Path(__file__).parent.parent / "fixtures" / "vllm" / "placement_groups_pp2.json").read_text())

    assert serving.busy_gpus({"groups": table(*rows)}) == 2


def test_free_gpus() -> None:
    """Too few free GPUs are refused with both numbers."""
    (enough,) = serving.free_gpus(INVENTORY, 2, "TP 1 × PP 2", {})
    (short,) = serving.free_gpus(INVENTORY, 2, "TP 1 × PP 2", {"groups": table(group(gpus=1))})

    assert enough.status == "pass"
    assert (short.status, short.text) == ("fail", "1 of 2 GPUs are free in Ray, TP 1 × PP 2 needs 2")


@pytest.mark.parametrize(
    ("listening", "status"),
    [(frozenset({("0.0.0.0", 8000)}), "fail"), (frozenset({("0.0.0.0", 80)}), "pass"), (None, "skip")],
)
def test_port(listening: frozenset[tuple[str, int]] | None, status: str) -> None:
    """A listener on any address has the port; without `ss` it is not known."""
    found = serving.port(NODES[0], 8000, "vLLM API", HostFacts(listening=listening))

    assert status == found.status


GONE = {"jobs": [{"submission_id": "serve-1", "status": "STOPPED"}], "nodes": ray_nodes("10.77.0.11"), "actors": table()}


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({}, "pass", "is gone"),
        ({"jobs": []}, "pass", "is gone"),
        ({"jobs": [{"submission_id": "serve-1", "status": "RUNNING"}]}, "wait", "job serve-1 is RUNNING"),
        ({"actors": table(rank("10.77.0.11"))}, "wait", "10.77.0.11 still holds PP0"),
        ({"groups": table(group())}, "wait", "2 GPUs are still reserved"),
        ({"listening": True}, "wait", "port is still open"),
    ],
)
def test_stopped(change: dict[str, Any], status: str, text: str) -> None:
    """Down means gone: job, ranks, reservations and port, each is waited for."""
    (found,) = serving.stopped(INVENTORY, ["serve-1"], {**GONE, **change})

    assert found.status == status
    assert text in found.text


def test_other_work_is_not_waited_for() -> None:
    """A batch job that runs beside keeps its ranks and GPUs."""
    jobs = [*GONE["jobs"], {"submission_id": "batch-1", "status": "RUNNING"}]
    (found,) = serving.stopped(INVENTORY, ["serve-1"], {**GONE, "jobs": jobs, "groups": table(group())})

    assert found.status == "pass"


def test_a_head_that_cannot_be_asked_is_no_proof() -> None:
    """Absence is observed, never assumed."""
    (found,) = serving.stopped(INVENTORY, ["serve-1"], {"error": "connection refused"})

    assert found.status == "fail"
