"""Stored verdicts of network checks, and their scope."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from launcher.app.terminal import dump_json
from launcher.core.domain import Answer
from launcher.network import network_plan, network_shape
from launcher.network.network_shape import CheckOptions, CheckResult
from launcher.planner import plan_inputs
from launcher.planner.cluster import ClusterLink
from launcher.tools.host import HostFacts
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site, network_verdict
from launcher.tools.site.network_verdict import NetworkRecord
from tests.conftest import Load
from tests.fakes import FakeTransport
from tests.plan_case import ASK, judged, up
from tests.simulated import World


def record(world: World, facts: dict[str, HostFacts], ask: CheckOptions = ASK) -> NetworkRecord:
    """Measure, store the verdict, and read it back."""
    proof = CheckResult()
    judged(world, facts, ask, proof)
    step = network_plan.record_verdict(Site(world.inventory, facts), proof, measured_at="today")
    assert world.answer(step.command) is not None
    answer = world.answer(network_verdict.query_record(Site(world.inventory, facts)))
    assert answer is not None
    return network_verdict.parse_record(answer)


def test_the_scope_of_a_record(load: Load) -> None:
    """The same containers, at the required level or above."""
    inventory = load("network: {fabric: infiniband}")
    world, facts = up(inventory)
    world.links["gpu01", "gpu02"] = "NET/IB/0"
    verdict = record(world, facts, replace(ASK, require="rdma"))

    def proves(require: Any, **changed: Any) -> bool:
        return network_verdict.is_verified(
            Site(inventory, facts), replace(verdict, **changed), require=require, collective=True
        )

    assert [proves(level) for level in ("any", "rdma", "gdrdma")] == [True, True, False]
    assert not proves("rdma", incarnation="another")
    assert not proves("rdma", passed=False)
    assert not network_verdict.is_verified(
        Site(inventory), verdict, require="any", collective=False
    )
    assert not network_verdict.is_verified(
        Site(inventory, facts), replace(verdict, collective=False), require="any", collective=True
    )
    assert network_verdict.is_verified(
        Site(inventory, facts), replace(verdict, collective=False), require="any", collective=False
    )


@pytest.mark.parametrize(("via", "tcp"), [("NET/IB/0/GDRDMA", False), ("NET/Socket/0", True)])
def test_the_planner_uses_the_measured_link(load: Load, via: str, tcp: bool) -> None:
    """The record has the link's figures; RDMA in the inventory counts for nothing over TCP."""
    inventory = load("network: {fabric: infiniband}")
    world, facts = up(inventory)
    world.links["gpu01", "gpu02"] = via
    verdict = record(world, facts, replace(ASK, require="any"))
    link = plan_inputs.merge_link(Site(inventory, facts), ClusterLink(), verdict)

    assert (link.gbps, link.rdma) == (pytest.approx(2.0), not tcp)
    assert link.latency_us == pytest.approx(20.0)
    assert (
        plan_inputs.merge_link(Site(inventory, facts), ClusterLink(gbps=5.0), verdict).gbps == 5.0
    )


@pytest.mark.parametrize(
    ("level", "required", "proves"),
    [
        ("auto", "any", True),
        ("auto", "gdrdma", True),
        ("any", "any", False),
        ("rdma", "rdma", False),
        ("gdrdma", "gdrdma", True),
    ],
)
def test_auto_is_covered_by_auto_and_by_the_highest(
    load: Load, level: str, required: str, proves: bool
) -> None:
    """Its meaning depends on the nodes, so a lower level does not cover it."""
    inventory = load()
    world, facts = up(inventory)
    verdict = replace(record(world, facts), asked=level, required=required)

    assert (
        network_verdict.is_verified(Site(inventory, facts), verdict, require=None, collective=False)
        is proves
    )


def test_a_container_that_started_again_is_another_incarnation(load: Load) -> None:
    """Docker restarts it under the same ID."""
    world, facts = up(load())
    before = network_verdict.incarnation(Site(world.inventory, facts))
    world.container("gpu02")["State"]["StartedAt"] = "2026-11-21T01:00:00Z"
    after = network_verdict.incarnation(
        Site(world.inventory, probe_nodes(world.inventory, FakeTransport(world.answer), []))
    )
    world.stop("gpu01")
    gone = network_verdict.incarnation(
        Site(world.inventory, probe_nodes(world.inventory, FakeTransport(world.answer), []))
    )

    assert before
    assert after not in ("", before)
    assert gone == ""


GOOD = {
    "incarnation": "i",
    "taken": "t",
    "passed": True,
    "asked": "auto",
    "required": "any",
    "summary": "s",
    "ranks_per_node": 0,
}
LINK = {"gbps": 1.0, "latency_us": 10.0, "tcp": False}


def test_fewer_ranks_than_gpus_prove_less_than_a_server_uses(load: Load) -> None:
    """Seven of eight network cards were never tested."""
    world, facts = up(load())
    single, full = record(world, facts, replace(ASK, ranks_per_node=1)), record(world, facts)

    assert not network_verdict.is_verified(
        Site(world.inventory, facts), single, require=None, collective=False
    )
    assert network_verdict.is_verified(
        Site(world.inventory, facts), full, require=None, collective=False
    )


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**GOOD, "link": {**LINK, "gbps": 0}}),
        json.dumps({**GOOD, "link": {**LINK, "gbps": "fast"}}),
        json.dumps({**GOOD, "link": {**LINK, "gbps": float("inf")}}),
        json.dumps({**GOOD, "nodes": [1]}),
        json.dumps({**GOOD, "servers": {"a": 1}}),
        json.dumps({**GOOD, "passed": "yes"}),
        json.dumps({**GOOD, "required": "rocket"}),
        json.dumps({**GOOD, "taken": None}),
        "",
        "{",
        "null",
        "[" * 100_000,
    ],
)
def test_an_unreadable_record_proves_nothing(text: str) -> None:
    """Nodes are not trusted."""
    assert network_verdict.parse_record(Answer(node="gpu01", code=0, out=text)) == NetworkRecord()


def test_a_record_is_read_back() -> None:
    """With the link for the planner, and the links in servers' logs."""
    links = {"chat": {"id": "a", "said": "NET/IB"}}
    text = json.dumps({**GOOD, "link": LINK, "servers": links})
    verdict = network_verdict.parse_record(Answer(node="gpu01", code=0, out=text))

    assert json.loads(json.dumps(asdict(verdict))) == {
        **GOOD,
        "nodes": [],
        "collective": False,
        "link": LINK,
        "servers": links,
    }


def test_non_json_numbers_are_skipped(load: Load) -> None:
    """In output and in the stored record."""
    world, facts = up(load())
    world.rates["gpu01", "gpu02"] = float("nan")
    proof = CheckResult()
    judged(world, facts, ASK, proof)
    judged(world, facts, ASK, proof)
    assert proof.verdict is not None

    record = network_shape.to_record(Site(world.inventory, facts), proof, measured_at="today")
    for text in (
        dump_json(network_shape.as_json(proof.verdict)),
        json.dumps(asdict(record), allow_nan=False),
    ):
        assert json.loads(text, parse_constant=pytest.fail)
