"""Hybrid and external load balancing over two nodes: each endpoint answers its own clients, and one
that dies or hangs is named.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.faults.traffic import send_request
from launcher.lab import models
from launcher.lab.layout import HF_HOME
from tests.integration.batches import find_processes, kill_process, wait_until
from tests.integration.conftest import API_KEY, LabCluster
from tests.integration.servers import (
    RECOVERY_FACTOR,
    await_state,
    query_status,
    read_record,
    serve,
    url,
)

pytestmark = [pytest.mark.lab, pytest.mark.long]
MODEL = f"{HF_HOME}/{models.MOE}"
APART = ("--model", MODEL, "--backend", "mp", "--data-parallel-size", "2")
SPREAD = ("--", "--enable-expert-parallel")
NODES = ("node1", "node2")


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """Two nodes, no server. A model of one stage needs no compiler."""

    def eager(document: dict[str, Any]) -> None:
        del document["engine_args"]["compilation_config"]
        document["engine_args"]["enforce_eager"] = True

    lab_cluster.recreate(eager)
    yield lab_cluster
    lab_cluster.vlaunch("down", "--yes")


def answering_nodes(cluster: LabCluster) -> list[str]:
    """Return the nodes with an endpoint that answers."""
    return [node for node in NODES if send_request(url(cluster, node), API_KEY, MODEL, 60).ok]


def test_endpoints_answer_and_a_bad_endpoint_is_named(cluster: LabCluster) -> None:
    """The server is ready when both answer; the endpoint that hangs, and then dies, is named, and
    recovers.
    """
    result = serve(cluster, *APART, *SPREAD, "--data-parallel-hybrid-lb")
    assert [line for line in result.out.splitlines() if line.startswith("endpoint")] == [
        f"endpoint     {url(cluster, node)}" for node in NODES
    ]
    assert "all 2 answered: DP0 in" in result.out
    assert answering_nodes(cluster) == list(NODES)
    green, server = query_status(cluster)
    assert (green.code, server["state"]) == (0, "answering"), green.output
    assert [row["node"] for row in server["endpoints"]] == list(NODES)

    (pid,) = [
        pid for pid, line in find_processes(cluster, "vllm serve", "node2") if "start-rank" in line
    ]
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

    before = read_record(cluster)["fault_count"]
    kill_process(cluster, "EngineCore_DP1", "node2")
    wait_until(lambda: read_record(cluster)["fault_count"] > before, "a fault is written down", 60)
    assert read_record(cluster)["faults"][-1]["node"] == "node2", read_record(cluster)["faults"]
    red = cluster.vlaunch("status")
    assert (red.code, "node2)" in red.out) == (1, True), red.output
    again = await_state(cluster, "answering", within=RECOVERY_FACTOR * max(result.seconds, 100.0))
    assert again["observed"]["generation"] == server["observed"]["generation"] + 1
    assert answering_nodes(cluster) == list(NODES)


def test_replicas_have_endpoints_of_their_own(cluster: LabCluster) -> None:
    """It replaces the previous server; after `stop` neither node listens."""
    result = serve(cluster, *APART, "--replace", *SPREAD, "--data-parallel-external-lb")

    assert result.out.count("endpoint ") == 2
    assert answering_nodes(cluster) == list(NODES)
    stopped = cluster.vlaunch("stop")
    assert stopped.code == 0, stopped.output
    assert answering_nodes(cluster) == []


def test_replicas_of_a_dense_model_are_refused(cluster: LabCluster) -> None:
    """Replicas of a dense model are independent: one server per node does the same."""
    result = cluster.vlaunch("serve", *APART[2:], "--", "--data-parallel-hybrid-lb")

    assert result.code == 2
    assert "vLLM serves no separate API for a single replica of a dense model" in result.err
    assert "--name one --nodes node1" in result.err
