"""Test requests to a model, and the answers to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.health import answer, api
from launcher.agent.health.api import QueryTarget
from tests.agent.web import CHAT, Replicas, Server

FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm"
RECORDED: dict[str, dict[str, tuple[int, Any]]] = json.loads((FIXTURES / "tasks.json").read_text())
pytestmark = pytest.mark.usefixtures("folders")


def complete(server: Server, **fields: Any) -> Any:
    return answer.request_first_answer(
        QueryTarget(api=server.port, dashboard=server.port, **fields)
    )


def test_a_completion(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has text and fingerprint; the key is sent as a header, and proxies are ignored."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    reply = complete(server)

    assert (reply.text, reply.fingerprint, reply.model) == ("Hi", "vllm-0.32.0-pp2-x", "m")
    post = server.requests[-1]
    assert post[:3] == ("POST", "/v1/chat/completions", "Bearer api-key")
    assert post[3]["messages"] == [{"role": "user", "content": "Say hello."}]


def test_an_empty_completion_is_no_answer(server: Server) -> None:
    """Although its status is 200."""
    server.answers["/v1/chat/completions"] = {**CHAT, "usage": {"completion_tokens": 0}}

    assert complete(server).error == "a completion without a token"


def test_every_replica_is_tested(server: Server) -> None:
    """One unrouted completion, then one per replica; the replica's counters prove its answer."""
    server.replicas = Replicas()
    reply = complete(server, engines=2)

    assert len(reply.replicas) == 2
    assert server.replicas.finished == [9, 8]
    assert {call[2] for call in server.requests} == {"Bearer api-key"}


def test_an_answer_without_its_counter_proves_nothing(server: Server) -> None:
    """An old vLLM ignores the header, and another replica answers."""
    server.replicas = Replicas(obeyed=False)

    assert complete(server, engines=2).error == "replica 1 did not answer: it generated no tokens"


def test_without_counters_answers_suffice(server: Server) -> None:
    """`--disable-log-stats` removes the counters."""
    server.replicas = Replicas(counting=False)

    assert len(complete(server, engines=2).replicas) == 2


def test_a_replica_that_refuses(server: Server) -> None:
    """Its message is reported, and the answers of other replicas count."""
    server.replicas = Replicas(refusing={1: (500, "EngineDeadError")})
    reply = complete(server, engines=2)

    assert (reply.status, reply.error) == (500, "replica 1 did not answer: EngineDeadError")


def test_a_model_without_a_chat_template(server: Server) -> None:
    """A base model gets a completion request."""
    server.answers["/v1/chat/completions"] = (
        400,
        '{"error": "default chat template is no longer allowed"}',
    )
    server.answers["/v1/completions"] = {
        "choices": [{"text": "and then"}],
        "usage": {"completion_tokens": 2},
    }
    reply = complete(server)

    assert (reply.task, reply.text) == ("completion", "and then")


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
    """Its status and message are reported."""
    server.answers[path] = answer
    reply = complete(server)

    assert (reply.status, reply.error) == (status, answer[1])


def test_no_answer_in_time(server: Server) -> None:
    """The answer has no status."""
    release: list[object] = []
    server.answers["/v1/chat/completions"] = lambda _: api.wait_until(lambda: release, 10) or ""
    reply = complete(server, timeout=1.0)
    release.append(1)

    assert (reply.status, reply.error) == (0, "timed out")


NOT_FOUND = (404, '{"detail":"Not Found"}')


def requested_paths(server: Server) -> list[str]:
    """Return the paths of the POST requests."""
    return [path for verb, path, *_ in server.requests if verb == "POST"]


@pytest.mark.parametrize(
    ("model", "task", "came"),
    [
        ("tiny-embed", "embedding", "an embedding of 128 numbers"),
        ("tiny-rerank", "rerank", "a score of "),
        ("tiny-classify", "classify", "a classification of 3 labels"),
        ("tiny-colbert", "rerank", "a score of "),
    ],
)
def test_the_task_of_real_models(server: Server, model: str, task: str, came: str) -> None:
    """From recorded answers of vLLM's CPU build on every route."""
    del server.answers["/v1/chat/completions"]
    server.answers |= {path: tuple(reply) for path, reply in RECORDED[model].items()}
    reply = complete(server)
    assert reply.task == task
    assert reply.came.startswith(came)


def test_one_broken_route_is_not_fatal(server: Server) -> None:
    """An answer to another task counts."""
    server.answers["/v1/chat/completions"] = NOT_FOUND
    server.answers |= {
        "/rerank": (500, "no template"),
        "/classify": {"data": [{"probs": [0.5]}]},
    }

    assert complete(server).task == "classify"


@pytest.mark.parametrize("status", [0, 401, 500])
def test_failures_of_an_embedding_model(server: Server, status: int) -> None:
    """Reported with the task: a wrong key, a dead engine, a timeout."""
    server.answers["/v1/chat/completions"] = NOT_FOUND
    release: list[object] = []
    server.answers["/v1/embeddings"] = (
        (status, "no") if status else lambda _: api.wait_until(lambda: release, 30) or ""
    )
    reply = complete(server, timeout=60 if status else 2)
    release.append(1)

    assert (reply.status, reply.task) == (status, "embedding")
    assert reply.error in ("no", "timed out")


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_transcription_model_without_speech_support(server: Server, status: int) -> None:
    """`/health` must suffice, and the refusal is reported."""
    server.answers["/v1/chat/completions"] = NOT_FOUND
    server.answers["/v1/audio/transcriptions"] = (status, "too quiet")
    reply = complete(server)

    assert reply.task == "health"
    assert reply.refused == f"/v1/audio/transcriptions: {status} too quiet"
    assert reply.came == "an answer of `/health` alone"


def test_speech_is_sent_as_a_form(server: Server) -> None:
    """Its transcription may be empty."""
    server.answers["/v1/chat/completions"] = NOT_FOUND
    server.answers["/v1/audio/transcriptions"] = {"text": ""}
    reply = complete(server)

    assert (reply.task, reply.came) == ("transcription", "a transcription")
    assert b"silence.wav" in server.requests[-1][3]


def test_a_server_without_known_routes(server: Server) -> None:
    """Only its health is queried, and the report says so."""
    del server.answers["/v1/chat/completions"]
    reply = complete(server)
    assert (reply.task, reply.refused) == ("health", "it has no known route")

    server.answers["/health"] = (503, "")
    assert complete(server).status == 503


def test_an_invalid_answer(server: Server) -> None:
    """Although its status is 200."""
    server.answers["/v1/chat/completions"] = NOT_FOUND
    server.answers["/v1/embeddings"] = {"data": []}
    reply = complete(server)

    assert reply.status == 200
    assert reply.error == 'no answer of /v1/embeddings: {"data": []}'


def test_replicas_chosen_by_vllm(server: Server) -> None:
    """One request per replica; without knowing which replica answers, counters are not compared."""
    server.answers["/metrics"] = Replicas().metrics()
    server.answers["/v1/chat/completions"] = NOT_FOUND
    server.answers["/v1/embeddings"] = {"data": [{"embedding": [0.5]}]}
    reply = complete(server, engines=2)

    assert len(reply.replicas) == 2
    assert requested_paths(server).count("/v1/embeddings") == 3


def test_a_token_embedding_model(server: Server) -> None:
    """Such as a reward model with `/pooling` alone. (Recorded from a model that also ranks, without
    its `/rerank`.)
    """
    del server.answers["/v1/chat/completions"]
    server.answers |= {path: tuple(reply) for path, reply in RECORDED["tiny-colbert"].items()}
    del server.answers["/rerank"]
    reply = complete(server)

    assert (reply.task, reply.came) == ("pooling", "a pooled output of 6 values")
