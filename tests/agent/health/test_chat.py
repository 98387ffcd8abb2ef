"""`vlaunch chat` in the container: the program against a fake vLLM API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.tools.shipped import zipapps
from tests.agent.web import Server


@pytest.fixture
def start(server: Server, folders: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start the program as mounted, in the image's Python, with its first line of input; the input
    stays open, as under `docker exec`.
    """
    archive = folders / zipapps.AGENT
    archive.write_bytes(zipapps.pack(zipapps.agent_files()))

    def begin(port: int | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c"),
                f"import sys; sys.path.insert(0, {str(archive)!r});"
                " from vlaunch_agent.agent.health.chat import main; main()",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "VLAUNCH_SECRETS": str(folders / "secrets"),
                "http_proxy": "http://127.0.0.1:9",
            },
        )
        assert process.stdin is not None
        messages = [{"role": "user", "content": "hello"}]
        request = {"messages": messages, "api": port or server.port, "max_tokens": 8}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return process

    return begin


def answers(process: subprocess.Popen[str]) -> list[Any]:
    """Return the lines of the answer."""
    process.wait(timeout=60)
    out, err = process.communicate(timeout=60)
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.processes
def test_chat_streams(server: Server, start: Any) -> None:
    """One line per chunk, as it arrives, without comments and the end marker."""
    pieces = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Hi"}}]},
        {"choices": []},
    ]
    stream = (
        "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + ": ping\n\ndata: [DONE]\n\n"
    )
    server.answers["/v1/chat/completions"] = stream
    with start() as process:
        replies = answers(process)

    assert (process.returncode, "".join(item["text"] for item in replies)) == (0, "Hi")
    verb, path, token, body = server.requests[-1]
    assert (verb, path, token) == ("POST", "/v1/chat/completions", "Bearer api-key")
    assert (body["stream"], body["max_tokens"]) == (True, 8)


@pytest.mark.processes
def test_chat_with_a_base_model(server: Server, start: Any) -> None:
    """Without a chat template the last message is continued."""
    server.answers["/v1/chat/completions"] = (400, "no chat template")
    server.answers["/v1/completions"] = 'data: {"choices": [{"text": "and"}]}\n\ndata: [DONE]\n\n'
    with start() as process:
        replies = answers(process)

    assert [item["text"] for item in replies] == ["and"]
    assert server.requests[-1][3]["prompt"] == "hello"


@pytest.mark.processes
def test_chat_with_an_embedding_model(server: Server, start: Any) -> None:
    """The error has the task and the model's name, for the hint."""
    del server.answers["/v1/chat/completions"]
    server.answers["/v1/embeddings"] = {"data": [{"embedding": [0.5]}]}
    with start() as process:
        (reply,) = answers(process)

    assert (reply["status"], reply["task"], reply["model"]) == (404, "embedding", "m")


@pytest.mark.processes
@pytest.mark.parametrize(("port", "status"), [(1, 0), (None, 400)])
def test_chat_refused(server: Server, start: Any, port: int | None, status: int) -> None:
    """An error is one object with its status; 0 if the port is closed."""
    server.answers["/v1/chat/completions"] = (400, "too long")
    with start(port) as process:
        (reply,) = answers(process)

    assert reply["status"] == status


@pytest.mark.processes
def test_chat_ends_with_its_input(server: Server, start: Any) -> None:
    """A cancelled launcher closes the input; the connection to vLLM is closed too."""
    requests, release = threading.Event(), threading.Event()

    def never(_: object) -> str:
        requests.set()
        release.wait(60)
        return ""

    server.answers["/v1/chat/completions"] = never
    with start() as process:
        try:
            assert requests.wait(60)
            assert process.poll() is None
            process.stdin.close()
            assert process.wait(timeout=60) == 1
        finally:
            release.set()
            process.kill()
