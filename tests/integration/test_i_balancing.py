"""Hybrid and external load balancing over two nodes: each endpoint answers its own clients, and one
that dies or stands still is named.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.faults.traffic import ask
from launcher.lab import models
from launcher.lab.layout import HF_HOME
from tests.integration.batches import kill_one, running, until
from tests.integration.conftest import API_KEY, Practice
from tests.integration.servers import AGAIN, await_state, record, serve, status, url

pytestmark = [pytest.mark.lab, pytest.mark.long]
MODEL = f"{HF_HOME}/{models.MOE}"
APART = ("--model", MODEL, "--backend", "mp", "--data-parallel-size", "2")
SPREAD = ("--", "--enable-expert-parallel")
NODES = ("node1", "node2")


@pytest.fixture(scope="module")
def cluster(practice: Practice) -> Iterator[Practice]:
    """Two nodes, no server. A model of one stage needs no compiled one."""

    def eager(document: dict[str, Any]) -> None:
        del document["engine_args"]["compilation_config"]
        document["engine_args"]["enforce_eager"] = True

    practice.bring_up_anew(eager)
    yield practice
    practice.vlaunch("down", "--yes")


def answering(cluster: Practice) -> list[str]:
    """Return the nodes whose endpoint answers a client."""
    return [node for node in NODES if ask(url(cluster, node), API_KEY, MODEL, 60).ok]


def test_each_endpoint_answers_and_a_bad_one_is_named(cluster: Practice) -> None:
    """Ready means that both have; the one that stands still, and then dies, is told apart from the
    other, and all is mended.
    """
    ran = serve(cluster, *APART, *SPREAD, "--data-parallel-hybrid-lb")
    assert [line for line in ran.out.splitlines() if line.startswith("endpoint")] == [
        f"endpoint     {url(cluster, node)}" for node in NODES
    ]
    assert "all 2 answered: DP0 in" in ran.out
    assert answering(cluster) == list(NODES)
    green, server = status(cluster)
    assert (green.code, server["state"]) == (0, "answering"), green.said
    assert [each["node"] for each in server["endpoints"]] == list(NODES)

    (pid,) = [pid for pid, line in running(cluster, "vllm serve", "node2") if "start-rank" in line]
    os.kill(pid, signal.SIGSTOP)
    try:
        quiet = await_state(cluster, "quiet", within=90)
        states = {endpoint["node"]: endpoint["state"] for endpoint in quiet["endpoints"]}
        assert states == {
            "node1": "answering",
            "node2": "quiet",
        }
        assert "no step" in quiet["detail"]
        assert cluster.vlaunch("chat", "hi", "--max-tokens", "2").code == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    await_state(cluster, "answering", within=60)

    before = record(cluster)["fault_count"]
    kill_one(cluster, "EngineCore_DP1", "node2")
    until(lambda: record(cluster)["fault_count"] > before, "a fault is written down", 60)
    assert record(cluster)["faults"][-1]["node"] == "node2", record(cluster)["faults"]
    red = cluster.vlaunch("status")
    assert (red.code, "node2)" in red.out) == (1, True), red.said
    again = await_state(cluster, "answering", within=AGAIN * max(ran.seconds, 100.0))
    assert again["observed"]["generation"] == server["observed"]["generation"] + 1
    assert answering(cluster) == list(NODES)


def test_each_replica_has_an_endpoint(cluster: Practice) -> None:
    """In the place of the server before; after `stop` nobody listens on either node."""
    ran = serve(cluster, *APART, "--replace", *SPREAD, "--data-parallel-external-lb")

    assert ran.out.count("endpoint ") == 2
    assert answering(cluster) == list(NODES)
    stopped = cluster.vlaunch("stop")
    assert stopped.code == 0, stopped.said
    assert answering(cluster) == []


def test_what_vllm_cannot_do_is_refused(cluster: Practice) -> None:
    """A dense model's replicas need nothing of each other: a server per node does what is meant."""
    ran = cluster.vlaunch("serve", *APART[2:], "--", "--data-parallel-hybrid-lb")

    assert ran.code == 2
    assert "vLLM serves no separate API for a single replica of a dense model" in ran.err
    assert "--name one --nodes node1" in ran.err
