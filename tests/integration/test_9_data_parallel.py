"""Two replicas behind one endpoint on real parts, on either backend: each answers, and vLLM
balances requests between them.
"""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.conftest import API_KEY, LabCluster

pytestmark = pytest.mark.lab

REPLICAS = ("serve", "--data-parallel-size", "2", "--timeout", "500")
COUNT = re.compile(r'^vllm:request_success_total\{.*\bengine="(\d+)".*\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def clean(lab_cluster: LabCluster) -> None:
    """Start without a cluster."""
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0


def send_request(lab_cluster: LabCluster, path: str, body: dict[str, Any] | None = None) -> str:
    """Send the endpoint a request as a client does."""
    url = f"http://{lab_cluster.lab.hosts[0].ip}:8000{path}"
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def count_finished(lab_cluster: LabCluster) -> dict[str, float]:
    """Return the number of finished requests of each replica, by vLLM's counters."""
    counts: dict[str, float] = {}
    for replica, count in COUNT.findall(send_request(lab_cluster, "/metrics")):
        counts[replica] = counts.get(replica, 0.0) + float(count)
    return counts


def send_flood(lab_cluster: LabCluster) -> None:
    """Send requests at once, without naming a replica."""
    body = {
        "model": "/data/huggingface/tiny-llama",
        "prompt": "def",
        "max_tokens": 64,
        "ignore_eos": True,
    }
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda _: json.loads(send_request(lab_cluster, "/v1/completions", body)), range(8)
            )
        )
    assert all(answer["usage"]["completion_tokens"] == 64 for answer in answers)


def test_replicas_without_ray(lab_cluster: LabCluster) -> None:
    """One process per node, one endpoint on the head, and no network check between engines that
    exchange nothing.
    """
    assert lab_cluster.vlaunch("up").code == 0
    result = lab_cluster.vlaunch(*REPLICAS, "--backend", "mp", timeout=600)

    assert result.code == 0, result.output
    assert re.search(r"^placement +node1: DP0; node2: DP1$", result.out, re.MULTILINE)
    assert re.search(
        r"^replicas +all 2 answered: DP0 in .*s, DP1 in .*s$", result.out, re.MULTILINE
    )
    assert "dp2" in result.out
    assert "Check the network" not in result.err


def test_both_replicas_have_answered(lab_cluster: LabCluster) -> None:
    """By vLLM's own counters; requests without a replica reach both."""
    before = count_finished(lab_cluster)
    send_flood(lab_cluster)
    after = count_finished(lab_cluster)

    assert sorted(before) == ["0", "1"]
    assert all(before.values())
    assert all(after[replica] > before[replica] for replica in after)


def test_status_shows_the_total_capacity(lab_cluster: LabCluster) -> None:
    """The caches of both replicas together."""
    (server,) = json.loads(lab_cluster.vlaunch("status", "--json").out)["servers"]

    assert server["state"] == "answering"
    assert server["kv_tokens"] == 65536


def test_the_same_replicas_are_watched_again(lab_cluster: LabCluster) -> None:
    """The same request starts nothing; another number of replicas is another server."""
    again = lab_cluster.vlaunch(*REPLICAS, "--backend", "mp", timeout=120)
    other = lab_cluster.vlaunch("serve", "--backend", "mp")

    assert again.code == 0, again.output
    assert "already running as server" in again.err
    assert other.code == 2
    assert "server `default` is already running /data/huggingface/tiny-llama" in other.err
    assert "`--replace`" in other.err


def test_stop_ends_every_replica(lab_cluster: LabCluster) -> None:
    """No process is left on any node."""
    result = lab_cluster.vlaunch("stop")

    assert result.code == 0, result.output
    assert "vllm serve" not in lab_cluster.command_lines()


@pytest.mark.long
def test_replicas_in_ray(lab_cluster: LabCluster) -> None:
    """One process starts both engines, each in a placement group of its own."""
    assert lab_cluster.vlaunch("up").code == 0
    result = lab_cluster.vlaunch(*REPLICAS, timeout=600)

    assert result.code == 0, result.output
    assert re.search(r"^placement +node1: DP0; node2: DP1$", result.out, re.MULTILINE)
    assert "all 2 answered" in result.out
    assert sorted(count_finished(lab_cluster)) == ["0", "1"]
    send_flood(lab_cluster)


@pytest.mark.long
def test_stop_frees_the_gpus_of_replicas(lab_cluster: LabCluster) -> None:
    """After `stop` all GPUs are free in Ray."""
    result = lab_cluster.vlaunch("stop")

    assert result.code == 0, result.output
    status = lab_cluster.docker("node1", "exec", "vlaunch-lab-node1", "ray", "status")
    assert "0.0/2.0 GPU" in status


@pytest.mark.long
def test_replicas_of_a_mixture_of_experts(lab_cluster: LabCluster) -> None:
    """Its layers span the nodes: the network is checked first, with the reason, and with expert
    parallelism both replicas answer.
    """

    def eager(document: dict[str, Any]) -> None:
        del document["engine_args"]["compilation_config"]
        document["engine_args"]["enforce_eager"] = True

    lab_cluster.write(eager)
    assert lab_cluster.vlaunch("up").code == 0
    model = ("--model", "/data/huggingface/tiny-moe")
    result = lab_cluster.vlaunch(*REPLICAS, *model, "--", "--enable-expert-parallel", timeout=600)
    stopped = lab_cluster.vlaunch("stop")

    assert result.code == 0, result.output
    assert "the model's 4 experts are spread over all 2 ranks" in result.err
    assert "Check the network between the nodes" in result.err
    assert "prefer `--backend mp`" in result.err
    assert "all 2 answered" in result.out
    assert "dp2-ep" in result.out
    assert stopped.code == 0, stopped.output


def test_more_replicas_than_gpus(lab_cluster: LabCluster) -> None:
    """Refused before a node is contacted, with a command that works."""
    result = lab_cluster.vlaunch("serve", "--data-parallel-size", "3")

    assert result.code == 2
    assert "it needs 3 GPUs, the cluster has 2" in result.err
    assert "`--data-parallel-size 2 --tp 1`" in result.err


def test_down_leaves_nothing(lab_cluster: LabCluster) -> None:
    """`down` checks that the hosts are clean."""
    lab_cluster.write()
    result = lab_cluster.vlaunch("down", "--yes")

    assert result.code == 0, result.output
    assert lab_cluster.containers() == {}
