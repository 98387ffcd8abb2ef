"""The front with OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.front.running import CHAT, EMBED, Running, running, wait_for
from tests.front.test_router import LARGEST, separate

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("haproxy")]
MESSAGES = [{"role": "user", "content": "Hello"}]
LONG = [{"role": "user", "content": "Hello" * 10_000}]


@pytest.fixture(scope="module")
def front(haproxy: None) -> Iterator[Running]:
    """A front with two servers."""
    with running(max_body=LARGEST) as (front, _, _):
        separate(front)
        front.add_key("any")
        front.add_key("embed", models=",embed,")
        yield front


def client(
    front: Running, key: str = "sk-any", *, path: str = "/v1", retries: int = 0
) -> openai.OpenAI:
    """Return a client of all servers, or of one."""
    url = f"http://127.0.0.1:{front.settings.port}{path}"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=retries)


def test_models_chat_and_embeddings(front: Running) -> None:
    """By the model, and by the name of the server."""
    everything, first = client(front), client(front, path="/chat/v1")

    assert [model.id for model in everything.models.list()] == [*CHAT, *EMBED[:2]]
    assert everything.models.retrieve("Qwen/chat").id == "Qwen/chat"
    assert [model.id for model in first.models.list()] == list(CHAT)
    for user in (everything, first):
        for messages in (MESSAGES, LONG):
            answer = user.chat.completions.create(model="Qwen/chat", messages=messages)
            assert answer.choices[0].message.content == "Hello"
    rows = everything.embeddings.create(model="e5", input="Hello", encoding_format="float").data
    assert rows[0].embedding == [0.5, 0.25]
    text = everything.audio.transcriptions.create(
        model="e5", file=("a.wav", b"R" * 300_000), response_format="verbose_json"
    )
    assert text.model_extra["path"] == "/v1/audio/transcriptions"


@pytest.mark.parametrize("messages", [MESSAGES, LONG])
def test_a_stream_and_one_that_is_cut(front: Running, messages: list[dict[str, str]]) -> None:
    """The client raises an error at the cut."""
    body = {"parts": 3, "gap": 0.05}
    create = client(front).chat.completions.create
    stream = create(model="Qwen/chat", messages=messages, stream=True, extra_body=body)
    texts = [part.choices[0].delta.content or "" for part in stream]
    assert [text.split()[0] for text in texts] == ["0", "1", "2"]

    cut = create(
        model="Qwen/chat", messages=messages, stream=True, extra_body={**body, "cut": True}
    )
    texts = []
    with pytest.raises(openai.APIConnectionError):
        for part in cut:
            texts.append(part.choices[0].delta.content or "")
    assert [text.split()[0] for text in texts] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("key", "model", "size", "expected"),
    [
        ("sk-wrong", "Qwen/chat", 1, openai.AuthenticationError),
        ("sk-embed", "Qwen/chat", 1, openai.PermissionDeniedError),
        ("sk-embed", "Qwen/chat", 20_000, openai.PermissionDeniedError),
        ("sk-any", "other", 1, openai.NotFoundError),
        ("sk-any", "Qwen/chat", LARGEST, openai.APIStatusError),
    ],
)
def test_errors(front: Running, key: str, model: str, size: int, expected: type[Exception]) -> None:
    """As classes of the client, with the front's message."""
    messages = [{"role": "user", "content": "x" * size}]
    with pytest.raises(expected) as raised:
        client(front, key).chat.completions.create(model=model, messages=messages)

    error = raised.value
    assert isinstance(error, openai.APIStatusError)
    assert error.type == "invalid_request_error"
    assert error.status_code == 413 or size < LARGEST


def test_the_client_waits_for_a_limit(front: Running) -> None:
    """It tries again after `Retry-After`."""
    key = front.add_key("slow", concurrent=1)
    user = client(front, key, retries=9)
    body = {"parts": 10_000, "gap": 0.1}
    stream = user.chat.completions.create(
        model="Qwen/chat", messages=MESSAGES, stream=True, extra_body=body
    )
    next(stream)
    with pytest.raises(openai.RateLimitError) as raised:
        client(front, key).chat.completions.create(model="Qwen/chat", messages=MESSAGES)
    assert raised.value.response.headers["retry-after"] == "1"
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(user.chat.completions.create, model="Qwen/chat", messages=MESSAGES)
        wait_for(
            lambda: [line["status"] for line in front.log if line["user"] == "slow"] == [429] * 2
        )
        stream.close()

    assert answer.result().choices[0].message.content == "Hello"
