"""Stream a model's answer to `vlaunch chat`, one JSON object per line.

This is a program and not a route of the agent: `docker exec` signals the launcher's exit only by
the end of standard input. Standard library only, to start fast.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from ... import upstream
from . import answer, task
from .api import HttpError, QueryTarget, query_api, request_api


def main() -> None:
    """Stream the answer to the messages on the first line of standard input: `{"messages": […],
    …}`, with fields of `QueryTarget`. A model without chat is reported with its `task`.
    """
    try:
        line = json.loads(sys.stdin.readline())
        messages = line.pop("messages")
        threading.Thread(target=_end_with_input, daemon=True).start()
        error = _chat(QueryTarget(**line), messages)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as problem:
        _print({"error": str(problem) or type(problem).__name__})
        sys.exit(1)
    if error is not None:
        _print(error)


def _chat(target: QueryTarget, messages: list[dict[str, str]]) -> dict[str, Any] | None:
    """Stream one answer; return the error, if any."""
    status, text = query_api(target, upstream.text("vllm.route-models"))
    if status != 200:
        return {"error": text[:500], "status": status}
    model = json.loads(text)["data"][0]["id"]
    body = {"model": model, "max_tokens": target.max_tokens, "stream": True}
    error = _stream(target, task.CHAT.path, {**body, "messages": messages})
    if error is None or not task.lacks_chat_template(error["status"], error["error"]):
        return error
    error = _stream(target, task.COMPLETION.path, {**body, "prompt": messages[-1]["content"]})
    if error is None or not task.lacks_task(error["status"], error["error"]):
        return error
    attempt = answer.query_other_task(target, model)
    return {**error, "task": attempt.task.name, "model": model}


def _end_with_input() -> None:
    """Exit when standard input ends: the launcher is gone, and vLLM must stop the answer."""
    # Not through sys.stdin: a thread that waits inside its buffer breaks the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(1)


def _stream(target: QueryTarget, path: str, body: object) -> dict[str, Any] | None:
    """Print each piece of an answer as it arrives; return the error, if any."""
    try:
        with request_api(target, path, body, target.timeout) as response:
            for piece in _pieces(response):
                if "error" in piece:
                    return {"status": 500, "error": json.dumps(piece["error"])[:500]}
                choice = (piece.get("choices") or [{}])[0]
                fingerprint = piece.get("system_fingerprint") or ""
                text = answer.choice_text(choice, "delta")
                _print({"text": text, "system_fingerprint": fingerprint})
    except HttpError as error:
        return {"status": error.code, "error": error.text[:500]}
    except OSError as error:
        return {"status": 0, "error": str(error)}
    return None


def _pieces(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the pieces of a streamed answer (server-sent events)."""
    for raw in lines:
        line = raw.decode(errors="replace").strip()
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _print(piece: dict[str, Any]) -> None:
    print(json.dumps(piece), flush=True)


if __name__ == "__main__":
    main()
