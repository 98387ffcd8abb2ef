"""The line that people copy to ask a server."""

from __future__ import annotations

import json
import shlex

import pytest

from launcher.agent.task import (
    CHAT,
    CLASSIFY,
    EMBEDDING,
    HEALTH,
    POOLING,
    RERANK,
    TRANSCRIPTION,
    Task,
)
from launcher.serving import curl

ENDPOINT = "http://10.0.0.11:8000/v1"


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
def test_the_line_asks_for_what_the_model_does(
    task: Task, url: str, body: dict[str, object]
) -> None:
    """At the address that `serve` prints, with a body that a shell leaves as it is."""
    words = shlex.split(curl.line(ENDPOINT, task, "it's $(a) model", key=False))

    assert words[:4] == [
        "curl",
        f"http://10.0.0.11:8000{url}",
        "-H",
        "Content-Type: application/json",
    ]
    said = json.loads(words[5])
    assert said["model"] == "it's $(a) model"
    assert body.items() <= said.items()


def test_a_key_is_a_variable() -> None:
    """Whoever copies the line copies no secret."""
    line = curl.line(ENDPOINT, EMBEDDING, "m", key=True)

    assert ' -H "Authorization: Bearer $VLLM_API_KEY" ' in line


def test_what_is_heard_is_a_file() -> None:
    """As a form."""
    line = curl.line(ENDPOINT, TRANSCRIPTION, "m", key=False)

    assert (
        line == "curl http://10.0.0.11:8000/v1/audio/transcriptions -F model=m -F file=@speech.wav"
    )


def test_a_model_that_can_be_asked_for_nothing() -> None:
    """Tells how it is."""
    assert curl.line(ENDPOINT, HEALTH, "m", key=False) == "curl http://10.0.0.11:8000/health"
