"""Two replicas behind one endpoint on real parts, on either backend: each answers, and vLLM spreads
requests over both.
"""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.conftest import API_KEY, Practice

pytestmark = pytest.mark.lab

REPLICAS = ("serve", "--data-parallel-size", "2", "--timeout", "500")
COUNT = re.compile(r'^vllm:request_success_total\{.*\bengine="(\d+)".*\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def clean(practice: Practice) -> None:
    """Begin with nothing."""
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0


def ask(practice: Practice, path: str, body: dict[str, Any] | None = None) -> str:
    """Ask the endpoint as a client does."""
    url = f"http://{practice.lab.hosts[0].ip}:8000{path}"
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    asked = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return str(answer.read().decode())


def finished(practice: Practice) -> dict[str, float]:
    """Return how many requests each replica has finished, as vLLM counts them."""
    counts: dict[str, float] = {}
    for replica, count in COUNT.findall(ask(practice, "/metrics")):
        counts[replica] = counts.get(replica, 0.0) + float(count)
    return counts


def flood(practice: Practice) -> None:
    """Send requests at once, none of which names a replica."""
    body = {
        "model": "/data/huggingface/tiny-llama",
        "prompt": "def",
        "max_tokens": 64,
        "ignore_eos": True,
    }
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: json.loads(ask(practice, "/v1/completions", body)), range(8))
        )
    assert all(answer["usage"]["completion_tokens"] == 64 for answer in answers)


def test_replicas_without_ray(practice: Practice) -> None:
    """A process a node, one endpoint on the head, and nothing to prove between engines that
    exchange nothing.
    """
    assert practice.vlaunch("up").code == 0
    ran = practice.vlaunch(*REPLICAS, "--backend", "mp", timeout=600)

    assert ran.code == 0, ran.said
    assert re.search(r"^placement +node1: DP0; node2: DP1$", ran.out, re.MULTILINE)
    assert re.search(r"^replicas +all 2 answered: DP0 in .*s, DP1 in .*s$", ran.out, re.MULTILINE)
    assert "dp2" in ran.out
    assert "Check the network" not in ran.err


def test_both_replicas_have_answered(practice: Practice) -> None:
    """vLLM's own counters say so of each; and requests that name none are spread over both."""
    before = finished(practice)
    flood(practice)
    after = finished(practice)

    assert sorted(before) == ["0", "1"]
    assert all(before.values())
    assert all(after[replica] > before[replica] for replica in after)


def test_status_knows_the_whole_capacity(practice: Practice) -> None:
    """Both replicas' caches together."""
    (server,) = json.loads(practice.vlaunch("status", "--json").out)["servers"]

    assert server["state"] == "answering"
    assert server["kv_tokens"] == 65536


def test_the_same_replicas_are_watched_again(practice: Practice) -> None:
    """The same request starts nothing; another number of replicas is another server."""
    again = practice.vlaunch(*REPLICAS, "--backend", "mp", timeout=120)
    other = practice.vlaunch("serve", "--backend", "mp")

    assert again.code == 0, again.said
    assert "already running as server" in again.err
    assert other.code == 2
    assert "server `default` is already running /data/huggingface/tiny-llama" in other.err
    assert "`--replace`" in other.err


def test_stop_ends_every_replica(practice: Practice) -> None:
    """Processes are gone on all nodes."""
    ran = practice.vlaunch("stop")

    assert ran.code == 0, ran.said
    assert "vllm serve" not in practice.command_lines()


def test_replicas_in_ray(practice: Practice) -> None:
    """One process starts both engines, each in a placement group of its own."""
    ran = practice.vlaunch(*REPLICAS, timeout=600)

    assert ran.code == 0, ran.said
    assert re.search(r"^placement +node1: DP0; node2: DP1$", ran.out, re.MULTILINE)
    assert "all 2 answered" in ran.out
    assert sorted(finished(practice)) == ["0", "1"]
    flood(practice)


def test_stop_frees_what_replicas_held(practice: Practice) -> None:
    """After `stop` Ray has all GPUs again."""
    ran = practice.vlaunch("stop")

    assert ran.code == 0, ran.said
    status = practice.docker("node1", "exec", "vlaunch-lab-node1", "ray", "status")
    assert "0.0/2.0 GPU" in status


@pytest.mark.long
def test_replicas_of_a_mixture_of_experts(practice: Practice) -> None:
    """Its layers cross the nodes: the network is proven first, why is said, and with expert
    parallel both replicas answer.
    """

    def eager(document: dict[str, Any]) -> None:
        del document["engine_args"]["compilation_config"]
        document["engine_args"]["enforce_eager"] = True

    practice.write(eager)
    assert practice.vlaunch("up").code == 0
    model = ("--model", "/data/huggingface/tiny-moe")
    ran = practice.vlaunch(*REPLICAS, *model, "--", "--enable-expert-parallel", timeout=600)
    stopped = practice.vlaunch("stop")

    assert ran.code == 0, ran.said
    assert "the model's 4 experts are spread over all 2 ranks" in ran.err
    assert "Check the network between the nodes" in ran.err
    assert "prefer `--backend mp`" in ran.err
    assert "all 2 answered" in ran.out
    assert "dp2-ep" in ran.out
    assert stopped.code == 0, stopped.said


def test_more_replicas_than_there_is_room_for(practice: Practice) -> None:
    """Refused before a node is reached, with what works."""
    ran = practice.vlaunch("serve", "--data-parallel-size", "3")

    assert ran.code == 2
    assert "it needs 3 GPUs, the cluster has 2" in ran.err
    assert "`--data-parallel-size 2 --tp 1`" in ran.err


def test_nothing_is_left(practice: Practice) -> None:
    """`down` proves that the hosts are as they were."""
    practice.write()
    ran = practice.vlaunch("down", "--yes")

    assert ran.code == 0, ran.said
    assert practice.containers() == {}
