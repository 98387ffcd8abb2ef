"""What is asked of vLLM's API and of Ray's dashboard, and how the answers are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launcher.payload.agent import api
from launcher.payload.agent.api import Where
from tests.payload.agent.web import Replicas, Server

METRICS = (Path(__file__).parents[2] / "fixtures" / "vllm" / "mp_pp2.metrics").read_text()
pytestmark = pytest.mark.usefixtures("folders")


def where(server: Server, **more: Any) -> Where:
    return Where(api=server.port, dashboard=server.port, **more)


def complete(server: Server, **more: Any) -> Any:
    return api.complete(where(server, **more))


def test_a_completion(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text, tokens and fingerprint; the key travels in the header, and proxies are ignored."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    said = complete(server)

    assert (said["status"], said["text"], said["tokens"], said["system_fingerprint"]) == (
        200,
        "Hi",
        1,
        "vllm-0.32.0-pp2-x",
    )
    assert server.asked[-1][:3] == ("POST", "/v1/chat/completions", "Bearer api-key")
    assert server.asked[-1][3]["messages"] == [{"role": "user", "content": "Say hello."}]


def test_every_replica_is_asked(server: Server) -> None:
    """One completion goes where vLLM sends it, and one more to each replica, whose own counters
    prove the answer.
    """
    server.replicas = Replicas()
    said = complete(server, engines=2)

    assert [(each["status"], each["answered"], each["error"]) for each in said["replicas"]] == [
        (200, True, "")
    ] * 2
    assert server.replicas.finished == [9, 8]
    assert {call[2] for call in server.asked} == {"Bearer api-key"}


def test_an_answer_that_no_counter_confirms_is_none_of_that_replica(server: Server) -> None:
    """A vLLM that does not read the header lets another replica answer; the one that was asked has
    not proven anything.
    """
    server.replicas = Replicas(obeyed=False)

    assert [each["answered"] for each in complete(server, engines=2)["replicas"]] == [True, False]


def test_without_counters_answers_have_to_do(server: Server) -> None:
    """`--disable-log-stats` leaves no counters."""
    server.replicas = Replicas(counting=False)

    assert [each["answered"] for each in complete(server, engines=2)["replicas"]] == [True, True]


def test_a_replica_that_refuses(server: Server) -> None:
    """Its words come along, and the others' answers stand."""
    server.replicas = Replicas(refusing={1: (500, "EngineDeadError")})
    said = complete(server, engines=2)["replicas"]

    assert [(each["status"], each["answered"]) for each in said] == [(200, True), (500, False)]
    assert said[1]["error"] == "EngineDeadError"


def test_a_model_without_a_chat_template(server: Server) -> None:
    """A base model is asked in the way it can answer."""
    server.answers["/v1/chat/completions"] = (
        400,
        '{"error": "default chat template is no longer allowed"}',
    )
    server.answers["/v1/completions"] = {
        "choices": [{"text": "and then"}],
        "usage": {"completion_tokens": 2},
    }
    said = complete(server)

    assert (said["path"], said["text"], said["tokens"]) == ("/v1/completions", "and then", 2)


@pytest.mark.parametrize(
    ("path", "answer", "status"),
    [
        ("/v1/models", (401, "Unauthorized"), 401),
        ("/v1/chat/completions", (500, "EngineDeadError"), 500),
    ],
)
def test_a_refusal_is_an_answer(
    server: Server, path: str, answer: tuple[int, str], status: int
) -> None:
    """Its status and words come back; nobody looks whether something moved."""
    server.answers[path] = answer
    said = complete(server)

    assert (said["status"], said["error"], "moved" in said) == (status, answer[1], False)


@pytest.mark.parametrize("moves", [True, False])
def test_no_answer_in_time(server: Server, moves: bool) -> None:
    """What vLLM counts tells a server that is busy from one that is silent; with how much it has to
    do.
    """
    count = iter(range(10, 1000, 10))

    def metrics(_: object) -> str:
        return METRICS.replace("} 53.0", f"}} {next(count)}.0") if moves else METRICS

    release: list[object] = []
    server.answers["/metrics"] = metrics
    server.answers["/v1/chat/completions"] = lambda _: api.until(lambda: release, 5) or ""
    said = complete(server, timeout=0.2)
    release.append(1)

    assert (said["status"], said["moved"], said["load"]["running"]) == (0, moves, 0)
    assert (said["load"]["tokens_per_s"] > 0) == moves


def test_no_answer_and_no_counters(server: Server) -> None:
    """Nobody knows."""
    release: list[object] = []
    server.answers["/metrics"] = ""
    server.answers["/v1/chat/completions"] = lambda _: api.until(lambda: release, 5) or ""
    said = complete(server, timeout=0.2)
    release.append(1)

    assert (said["moved"], "load" in said) == (None, False)


def test_the_counters_of_a_real_server() -> None:
    """Recorded after seven requests; the sum of all replicas, and 5xx of those who asked."""
    found = api.read_counters(METRICS)
    assert found is not None

    assert (found.running, found.waiting, found.tokens, found.good, found.failed) == (
        0,
        0,
        53.0,
        7.0,
        0.0,
    )
    failing = api.read_counters(
        METRICS + 'http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 3.0\n'
    )
    assert failing is not None
    assert failing.failed == 3.0


def test_what_progress_is() -> None:
    """Tokens and requests that ended; aborted ones are our own canaries, and what waits is no work
    that was done.
    """
    found = api.read_counters(METRICS)
    waiting = api.read_counters(
        re.sub(r"(?m)^(vllm:num_requests_waiting\{.*) 0.0$", r"\1 9.0", METRICS)
    )
    aborted = api.read_counters(
        re.sub(r'(?m)^(.*finished_reason="abort".*) 0.0$', r"\1 4.0", METRICS)
    )
    working = api.read_counters(METRICS.replace("} 53.0", "} 54.0"))
    assert found and waiting and aborted and working

    assert waiting.waiting == 9
    assert found.progress == waiting.progress == aborted.progress != working.progress


def test_progress_of_one_replica() -> None:
    """Each has its own lines."""
    two = api.read_counters(
        METRICS + METRICS.replace('engine="0"', 'engine="1"').replace("} 53.0", "} 99.0")
    )
    one = api.read_counters(METRICS)
    assert two and one

    assert two.of(0) == one.progress
    assert two.of(1) != two.of(0)
    assert two.of(None) == two.progress


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "vllm:cache_config_info{} 1.0\n",
        "vllm:generation_tokens_total{} x\n",
        "vllm:generation_tokens_total 1e999\nvllm:num_requests_running 1e999\n",
    ],
)
def test_a_server_that_counts_nothing(text: str) -> None:
    """Or not in numbers: nobody knows."""
    assert api.read_counters(text) is None


def test_capacity_of_replicas_is_added_up() -> None:
    """vLLM prints tokens and concurrency of one replica in each line, and the sum of all blocks."""
    found = api.capacity(Replicas(finished=[7, 7, 7]).metrics())

    assert (
        found["kv_cache_size_tokens"],
        found["kv_cache_max_concurrency"],
        found["num_gpu_blocks"],
    ) == (
        "98304",
        "192.0",
        "512",
    )
    assert api.capacity("") == {}


def test_nobody_listens() -> None:
    """Status 0, with the reason."""
    status, said = api.api(Where(api=1), "/health")

    assert (status, "refused" in said) == (0, True)


def test_a_secret_that_is_not_there(server: Server, folders: Path) -> None:
    """Is not sent."""
    (folders / "secrets" / "VLLM_API_KEY").unlink()
    api.api(where(server), "/health")

    assert server.asked[-1][2] == ""
