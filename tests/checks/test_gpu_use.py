"""Who holds GPUs, and whether enough are free, on what Ray answered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.checks import batch, gpu_use
from launcher.checks.gpu_use import Holder
from launcher.model import Inventory, Node
from tests.ray_rows import group, rank, ray_nodes, table

NODES = (
    Node(name="n1", host="n1", ip="10.77.0.11", gpus=1, head=True),
    Node(name="n2", host="n2", ip="10.77.0.12", gpus=1),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="i", nodes=NODES)


@pytest.mark.parametrize(
    ("said", "busy"),
    [
        ({}, 0),
        ({"groups": table()}, 0),
        ({"groups": table(group(), group(state="REMOVED"), group(state="PENDING"))}, 2),
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
    assert busy == gpu_use.busy_gpus(said)


def test_busy_gpus_of_a_recorded_cluster() -> None:
    """One group of two bundles lives; two others have been removed."""
    rows = json.loads(
        (
            Path(__file__).parent.parent / "fixtures" / "vllm" / "placement_groups_pp2.json"
        ).read_text()
    )

    assert gpu_use.busy_gpus({"groups": table(*rows)}) == 2


def test_free_gpus() -> None:
    """Too few free GPUs are refused with both numbers."""
    (enough,) = gpu_use.free_gpus(INVENTORY, 2, "TP 1 × PP 2", {}, [])
    (short,) = gpu_use.free_gpus(INVENTORY, 2, "TP 1 × PP 2", {"groups": table(group(gpus=1))}, [])

    assert enough.status == "pass"
    assert (short.status, short.text) == (
        "fail",
        "1 of 2 GPUs are free in Ray, TP 1 × PP 2 needs 2",
    )


def test_a_server_waits_for_a_job_that_has_just_begun() -> None:
    """It holds nothing yet."""
    of_four = replace(INVENTORY, nodes=(replace(NODES[0], gpus=4),))
    said = {
        "jobs": [
            {
                "submission_id": "b-1",
                "status": "RUNNING",
                "metadata": {"vlaunch.batch": "b", "vlaunch.gpus": "3"},
            }
        ]
    }
    (found,) = gpu_use.free_gpus(of_four, 4, "TP 4 × PP 1", said, batch.holders(said))

    assert (found.status, found.text.partition(",")[0]) == ("fail", "1 of 4 GPUs are free in Ray")
    assert "`vlaunch stop b`" in found.fix


CHAT = Holder(what="server `chat`", gpus=1, end="vlaunch stop chat")


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
def test_the_gpus_of_a_node(holders: list[Holder], in_ray: float, text: str) -> None:
    """Whoever holds them is named, with what ends it or shows it."""
    found = gpu_use.node_gpus(replace(NODES[0], gpus=4), 3, holders, in_ray)

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

    assert gpu_use.busy_by_node(said) == {"10.77.0.11": 1, "10.77.0.12": 2}
    assert gpu_use.busy_by_node({}) == {}
