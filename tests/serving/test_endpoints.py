"""Several endpoints of one server: addresses and states."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from launcher.agent.desired import Desired, ProcessSpec
from launcher.agent.health.task import (
    CHAT,
    CLASSIFY,
    EMBEDDING,
    HEALTH,
    POOLING,
    RERANK,
    TRANSCRIPTION,
    ModelTask,
)
from launcher.agent.observed import EndpointHealth
from launcher.serving import endpoints
from tests import supervision
from tests.cluster_status import serve
from tests.served import INVENTORY
from tests.simulated import World

ENDPOINT = "http://10.0.0.11:8000/v1"


def apart(*replicas: tuple[int, int], nodes: tuple[str, ...] = ("gpu01", "gpu02")) -> Desired:
    """Return a server with an API per node and this many replicas behind them."""
    processes = tuple(
        ProcessSpec(node=node, argv=("vllm", "serve"), replicas=size)
        for node, size in zip(nodes, replicas, strict=True)
    )
    return supervision.make_spec(
        backend="mp", processes=processes, replicas=sum(count for _, count in replicas)
    )


PAIR = apart((0, 1), (1, 1))


def test_every_node_has_an_endpoint(world: World) -> None:
    """Except for nodes that have left the inventory."""
    listed = endpoints.list_endpoints(world.inventory, apart((0, 2), (2, 1)))
    assert [(endpoint.node, endpoint.url) for endpoint in listed] == [
        ("gpu01", "http://10.0.0.11:8000/v1"),
        ("gpu02", "http://10.0.0.12:8000/v1"),
    ]

    gone = apart((0, 2), (2, 1), nodes=("gpu09", "gpu02"))
    assert [endpoint.node for endpoint in endpoints.list_endpoints(world.inventory, gone)] == [
        "gpu02"
    ]


ANSWERS = EndpointHealth(verdict="answering", seconds=0.25)
LATE = EndpointHealth(verdict="busy", reason="canary: no completion after 9 s")


def test_every_endpoint_has_the_supervisors_verdict(world: World) -> None:
    """It has the duration of its last answer; node names replace addresses."""
    judged = {"gpu01": ANSWERS, "gpu02": replace(LATE, reason="10.0.0.12 is late")}
    server = serve(world, supervision.make_record(verdict="busy", endpoints=judged), spec=PAIR)

    assert [
        (endpoint.node, endpoint.state, endpoint.detail, endpoint.seconds)
        for endpoint in server.endpoints
    ] == [
        ("gpu01", "answering", "", 0.25),
        ("gpu02", "busy", "gpu02 is late", 0.0),
    ]
    assert (server.state, server.endpoint) == ("busy", "http://10.0.0.11:8000/v1")


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ({"state": "starting"}, "starting"),
        ({"verdict": "answering"}, "answering"),
        ({"verdict": "sad", "endpoints": {"gpu02": EndpointHealth(verdict="sad")}}, "unknown"),
    ],
)
def test_an_endpoint_without_a_verdict_has_the_servers_state(
    world: World, how: dict[str, Any], state: str
) -> None:
    """An unknown verdict of another version does not count."""
    server = serve(world, supervision.make_record(**how), spec=PAIR)

    assert [endpoint.state for endpoint in server.endpoints] == [state] * 2


def test_an_outdated_record_is_unknown(world: World) -> None:
    """For all endpoints, whatever its verdicts."""
    how = supervision.make_record(endpoints={"gpu01": ANSWERS, "gpu02": ANSWERS})
    server = serve(world, how, spec=PAIR, agent=99.0)

    assert (server.state, server.detail) == (
        "unknown",
        "the head's agent has not reported for 99 s",
    )
    assert [endpoint.state for endpoint in server.endpoints] == ["unknown"] * 2


def test_capacities_of_endpoints_are_summed(world: World) -> None:
    """The sum is unknown if one of them does not report its capacity."""
    labels = {"kv_cache_size_tokens": "1000", "kv_cache_max_concurrency": "2.5"}
    both = {"gpu01": labels, "gpu02": labels}
    server = serve(
        world, supervision.make_record(held=both, first_answer={"model": "m"}), spec=PAIR
    )

    assert (server.kv_tokens, server.concurrency) == (2000, 5.0)
    assert endpoints.total_capacity([labels, {}]).tokens is None


@pytest.mark.parametrize(
    ("bind", "url"),
    [
        ("0.0.0.0", "http://10.0.0.1:8000/v1"),
        ("::", "http://10.0.0.1:8000/v1"),
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("fd00::1", "http://[fd00::1]:8000/v1"),
    ],
)
def test_urls_for_clients(bind: str, url: str) -> None:
    """The head's address in the nodes' network, or the bound one."""
    assert endpoints.endpoint_url(INVENTORY, bind, 8000) == url
    assert endpoints.endpoint_url(INVENTORY, bind, 8000, "n2") == url.replace(
        "10.0.0.1", "10.0.0.2"
    )


@pytest.mark.parametrize(
    ("task", "url", "body"),
    [
        (CHAT, "/v1/chat/completions", {"max_tokens": 64, "temperature": 0}),
        (EMBEDDING, "/v1/embeddings", {"input": "Say hello."}),
        (RERANK, "/rerank", {"query": "Say hello.", "documents": ["Say hello."]}),
        (CLASSIFY, "/classify", {"input": "Say hello."}),
        (POOLING, "/pooling", {"input": "Say hello."}),
    ],
)
def test_the_example_request_fits_the_models_task(
    task: ModelTask, url: str, body: dict[str, object]
) -> None:
    """At the address that `serve` prints, with shell-safe JSON."""
    argv = shlex.split(endpoints.curl_line(ENDPOINT, task, "it's $(a) model"))

    assert argv[:4] == [
        "curl",
        f"http://10.0.0.11:8000{url}",
        "-H",
        "Content-Type: application/json",
    ]
    payload = json.loads(argv[5])
    assert payload["model"] == "it's $(a) model"
    assert body.items() <= payload.items()


def test_a_key_is_a_variable() -> None:
    """A copied command contains no secret."""
    line = endpoints.curl_line(ENDPOINT, EMBEDDING, "m", key="VLLM_API_KEY")

    assert ' -H "Authorization: Bearer $VLLM_API_KEY" ' in line


def test_a_transcription_sends_a_file() -> None:
    """As a form."""
    line = endpoints.curl_line(ENDPOINT, TRANSCRIPTION, "m")

    assert (
        line == "curl http://10.0.0.11:8000/v1/audio/transcriptions -F model=m -F file=@speech.wav"
    )


def test_a_model_without_requests() -> None:
    """Its state is shown."""
    assert endpoints.curl_line(ENDPOINT, HEALTH, "m") == "curl http://10.0.0.11:8000/health"
