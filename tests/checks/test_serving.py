"""Judges of a server to be, and of one that was stopped, on what Ray and the nodes answered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from launcher.checks import serving
from launcher.checks.shape import Finding, worst
from launcher.model import Inventory, Node
from launcher.site import Site
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelSeen
from tests.containers import container
from tests.ray_rows import group, ray_nodes, table

NODES = (
    Node(name="n1", host="n1", ip="10.77.0.11", gpus=1, head=True),
    Node(name="n2", host="n2", ip="10.77.0.12", gpus=1),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="i", nodes=NODES)
NAMES = {"n1": "vlaunch-c-n1", "n2": "vlaunch-c-n2"}


def site(**status: str) -> Site:
    found = {
        name: HostFacts(
            containers=(container(NAMES[name], status=status[name]),) if name in status else (),
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
NOT_CACHED = ModelSeen(where="not cached")
LACKS = ModelSeen(where="lacks", lacking="b.safetensors")


@pytest.mark.parametrize(
    ("seen", "offline", "expected"),
    [
        ({"n1": THERE, "n2": THERE}, False, ["pass", "pass"]),
        ({"n1": THERE, "n2": ModelSeen(where="missing")}, False, ["pass", "fail"]),
        ({"n1": THERE, "n2": ModelSeen(where="there", digest="b")}, False, ["fail", "fail"]),
        # a GGUF file has no config.json
        ({"n1": THERE, "n2": ModelSeen(where="there")}, False, ["pass", "pass"]),
        ({"n1": NOT_CACHED, "n2": NOT_CACHED}, False, ["pass", "pass"]),
        ({"n1": THERE, "n2": NOT_CACHED}, False, ["pass", "warn"]),
        ({"n1": THERE, "n2": NOT_CACHED}, True, ["pass", "fail"]),
        ({"n1": THERE, "n2": ModelSeen(where="begun")}, False, ["pass", "fail"]),
        ({"n1": THERE, "n2": LACKS}, False, ["pass", "warn"]),
        ({"n1": LACKS, "n2": LACKS}, False, ["warn", "warn"]),
        ({"n1": THERE, "n2": LACKS}, True, ["pass", "fail"]),
        ({"n1": THERE}, False, ["pass", "skip"]),
        ({"n1": THERE, "n2": ModelSeen(where="unknown")}, False, ["pass", "skip"]),
    ],
)
def test_model(seen: dict[str, ModelSeen], offline: bool, expected: list[str]) -> None:
    """Half of a copy, different on two, or not to be downloaded: refused.

    Not known: said to be.
    """
    assert expected == [
        each.status for each in serving.model(NODES, "org/m", seen, dict.fromkeys(NAMES, offline))
    ]


@pytest.mark.parametrize(
    ("model", "there", "fix"),
    [
        ("org/m", True, "copy it from n1: `vlaunch model push org/m`, or add `--fetch`"),
        ("org/m", False, "download it once for all nodes: `vlaunch model pull org/m`, or add"),
        ("/hf/m", True, "copy it from n1: `vlaunch model push /hf/m`"),
        ("/hf/m", False, "`vlaunch model push ./FOLDER --as /hf/m`"),
    ],
)
def test_the_command_that_finishes_a_model(model: str, there: bool, fix: str) -> None:
    """A copy of a node that has it, else a download, else from here."""
    begun = ModelSeen(where="begun")
    seen = {"n1": THERE if there else begun, "n2": begun}
    found = serving.model(NODES, model, seen, dict.fromkeys(NAMES, False))

    assert found[1].status == "fail"
    assert fix in found[1].fix


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
    ("heard", "text"),
    [
        (59.0, ""),
        (61.0, "its agent was last heard 61s ago"),
        (None, "its agent was never heard"),
        (math.inf, "its agent was never heard"),
    ],
)
def test_agents(heard: float | None, text: str) -> None:
    """Nothing can be started where none is connected."""
    there = {"n1": HostFacts(containers=(container(NAMES["n1"]),))}
    at = {} if heard is None else {"n1": heard}
    (found,) = serving.agents(Site(INVENTORY, there), NODES[:1], at)

    assert (found.status, found.text.partition(", so")[0]) == ("fail" if text else "pass", text)
    assert bool(found.fix) is bool(text)


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
