"""Queries of vLLM's API and of Ray's dashboard, and parsers of their answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.health import api
from launcher.agent.health.api import QueryTarget
from tests.agent.web import Replicas, Server

METRICS = (Path(__file__).parents[2] / "fixtures" / "vllm" / "mp_pp2.metrics").read_text()
pytestmark = pytest.mark.usefixtures("folders")


def where(server: Server, **fields: Any) -> QueryTarget:
    return QueryTarget(api=server.port, dashboard=server.port, **fields)


def test_the_counters_of_a_real_server() -> None:
    """Recorded after seven requests: the sum over all replicas, and 5xx answers to clients."""
    result = api.parse_counters(METRICS)
    assert result is not None

    assert (result.running, result.waiting, result.tokens, result.failed) == (0, 0, 53.0, 0.0)
    assert result.held == {
        "kv_cache_size_tokens": "65536",
        "kv_cache_max_concurrency": "128.0",
        "num_gpu_blocks": "512",
        "block_size": "128",
    }
    failing = api.parse_counters(
        METRICS + 'http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 3.0\n'
    )
    assert failing is not None
    assert failing.failed == 3.0


def test_progress() -> None:
    """Tokens and completed requests; aborted ones are canaries, and waiting ones no progress."""
    result = api.parse_counters(METRICS)
    waiting = api.parse_counters(
        re.sub(r"(?m)^(vllm:num_requests_waiting\{.*) 0.0$", r"\1 9.0", METRICS)
    )
    aborted = api.parse_counters(
        re.sub(r'(?m)^(.*finished_reason="abort".*) 0.0$', r"\1 4.0", METRICS)
    )
    working = api.parse_counters(METRICS.replace("} 53.0", "} 54.0"))
    assert result and waiting and aborted and working

    assert waiting.waiting == 9
    assert result.progress == waiting.progress == aborted.progress != working.progress


def test_progress_of_one_replica() -> None:
    """Every replica has its own lines."""
    two = api.parse_counters(
        METRICS + METRICS.replace('engine="0"', 'engine="1"').replace("} 53.0", "} 99.0")
    )
    first = api.parse_counters(METRICS)
    assert two and first

    assert two.progress_of(0) == first.progress
    assert two.progress_of(1) != two.progress_of(0)
    assert two.progress_of(None) == two.progress


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "vllm:cache_config_info{} 1.0\n",
        "vllm:generation_tokens_total{} x\n",
        "vllm:generation_tokens_total 1e999\nvllm:num_requests_running 1e999\n",
        *(f"vllm:generation_tokens_total {odd}\n" for odd in ("NaN", "+Inf", "-1", "1e18")),
    ],
)
def test_a_server_without_counters(text: str) -> None:
    """Or with counters that are not numbers: progress is unknown."""
    assert api.parse_counters(text) is None


def test_capacity_of_replicas_is_summed() -> None:
    """vLLM prints tokens and concurrency per replica, and the sum of all blocks."""
    result = api.parse_capacity(Replicas(finished=[7, 7, 7]).metrics())

    assert (
        result["kv_cache_size_tokens"],
        result["kv_cache_max_concurrency"],
        result["num_gpu_blocks"],
    ) == (
        "98304",
        "192.0",
        "512",
    )
    assert api.parse_capacity("") == {}


def test_a_closed_port() -> None:
    """Status 0, with the reason."""
    status, text = api.query_api(QueryTarget(api=1), "/health")

    assert (status, "refused" in text) == (0, True)


def test_a_missing_secret(server: Server, folders: Path) -> None:
    """It is not sent."""
    (folders / "secrets" / "VLLM_API_KEY").unlink()
    api.query_api(where(server), "/health")

    assert server.requests[-1][2] == ""
