"""Tasks of models: requests, answers, and refusals of models with another task."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.agent.health import task
from launcher.agent.health.task import (
    CHAT,
    CLASSIFY,
    COMPLETION,
    EMBEDDING,
    HEALTH,
    POOLING,
    RERANK,
    TRANSCRIPTION,
    Form,
    ModelTask,
)

# as vLLM 0.32 writes it
_UNKNOWN = '{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}'
_NO_ROUTE = '{"detail":"Not Found"}'


@pytest.mark.parametrize(
    ("status", "expected", "unfit"),
    [
        (404, _NO_ROUTE, True),
        (404, _UNKNOWN, False),
        (405, "Method Not Allowed", True),
        (501, "The model does not support Embeddings API", True),
        (400, "this model's maximum context length is 4 tokens", False),
        (200, "", False),
        (401, "Unauthorized", False),
        (500, "EngineDeadError", False),
        (503, "", False),
        (0, "timed out", False),
    ],
)
def test_refusals_of_another_task(status: int, expected: str, unfit: bool) -> None:
    """A dead engine or a wrong key is reported instead."""
    assert task.lacks_task(status, expected) is unfit
    assert task.lacks_chat_template(status, expected) is unfit


def test_a_base_model_cannot_chat() -> None:
    """Without a chat template, 400 has several messages."""
    text = "As of transformers v4.44, default chat template is no longer allowed"

    assert task.lacks_chat_template(400, text)
    assert not task.lacks_task(400, text)


@pytest.mark.parametrize(
    ("model_task", "text", "came"),
    [
        (EMBEDDING, {"data": [{"embedding": [0.1, 0.2]}]}, "an embedding of 2 numbers"),
        (RERANK, {"results": [{"relevance_score": 0.51234}]}, "a score of 0.512"),
        (CLASSIFY, {"data": [{"probs": [0.1, 0.2, 0.7]}]}, "a classification of 3 labels"),
        (POOLING, {"data": [{"data": [[0.1], [0.2]]}]}, "a pooled output of 2 values"),
        (TRANSCRIPTION, {"text": ""}, "a transcription"),
        (HEALTH, "", "an answer of `/health` alone"),
    ],
)
def test_descriptions_of_answers(model_task: ModelTask, text: Any, came: str) -> None:
    """Silence is transcribed as an empty text."""
    assert model_task.describe_answer(json.dumps(text)) == came


@pytest.mark.parametrize("model_task", [EMBEDDING, RERANK, CLASSIFY, POOLING, TRANSCRIPTION])
@pytest.mark.parametrize(
    "expected", ["", "null", "7", "[]", "{}", '{"data": []}', '{"data": [{}]}', '{"results": [{}]}']
)
def test_invalid_answers(model_task: ModelTask, expected: str) -> None:
    """Another program may have the port."""
    assert model_task.describe_answer(expected) == ""


def test_an_embedding_without_numbers() -> None:
    """Although the structure is right."""
    assert EMBEDDING.describe_answer('{"data": [{"embedding": []}]}') == ""


def test_requests() -> None:
    """In the route's format; chats and completions are short."""
    few = {"max_tokens": 1, "temperature": 0}

    assert CHAT.body("m", "Hi", 1) == {
        "model": "m",
        **few,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    assert COMPLETION.body("m", "Hi", 1) == {"model": "m", **few, "prompt": "Hi"}
    assert RERANK.body("m", "Hi", 1) == {"model": "m", "query": "Hi", "documents": ["Hi"]}
    assert {item.name for item in (CHAT, COMPLETION, EMBEDDING) if item.generates} == {
        "chat",
        "completion",
    }
    for model_task in (EMBEDDING, CLASSIFY, POOLING):
        assert model_task.body("m", "Hi", 1) == {"model": "m", "input": "Hi"}
    assert HEALTH.body("m", "Hi", 1) is None


def test_speech_is_sent_as_a_form() -> None:
    """A second of silence as an ordinary WAV file."""
    form = TRANSCRIPTION.body("org/whisper", "Hi", 1)
    assert isinstance(form, Form)
    kind, _, limit = form.content_type.partition("; boundary=")
    first, second, rest = form.data.split(f"--{limit}".encode())[1:4]
    head, _, sound = second.partition(b"\r\n\r\n")

    assert kind == "multipart/form-data"
    assert first.endswith(b'name="model"\r\n\r\norg/whisper\r\n')
    assert b'name="file"; filename="silence.wav"' in head
    assert rest == b"--\r\n"
    sound = sound.removesuffix(b"\r\n")
    assert (sound[:4], sound[8:16], len(sound)) == (b"RIFF", b"WAVEfmt ", 44 + 32_000)
    assert int.from_bytes(sound[4:8], "little") == len(sound) - 8
    assert int.from_bytes(sound[24:28], "little") == 16_000


def test_task_names() -> None:
    """They identify a task; unknown names give none."""
    assert [task.task_named(item.name) for item in (CHAT, *task.OTHERS, HEALTH)] == [
        CHAT,
        *task.OTHERS,
        HEALTH,
    ]
    assert task.task_named("") is task.task_named("poetry") is None
