"""Streams a model's answer to `vlaunch chat`: a line of JSON a piece. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from . import answer, task
from .api import Refused, Where, api, request, say, secret


def chat(args: Where) -> None:
    """Stream one answer: a line of JSON a piece. The list of messages is a line of standard
    input. A model that one cannot talk to is named by its `task`.
    """
    messages: Any = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_input, daemon=True).start()
    status, text = api(args, "/v1/models")
    if status != 200:
        say({"error": text[:500], "status": status})
        return
    ask: dict[str, Any] = {
        "model": json.loads(text)["data"][0]["id"],
        "max_tokens": args.max_tokens,
        "stream": True,
    }
    error = stream(args, task.CHAT.path, {**ask, "messages": messages})
    if error is not None and task.no_chat(error["status"], error["error"]):
        prompt = {**ask, "prompt": messages[-1]["content"]}
        error = stream(args, task.COMPLETION.path, prompt)
        if error is not None and task.unfit(error["status"], error["error"]):
            found = answer.other(args, ask["model"])
            error |= {"task": found.task.name, "model": ask["model"]}
    if error is not None:
        say(error)


def end_with_input() -> None:
    """End this process when its standard input ends: nobody waits for the answer any more, and vLLM
    must not go on with it.
    """
    # Not through sys.stdin: a thread that waits inside its buffer breaks the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(1)


def stream(args: Where, path: str, body: object) -> dict[str, Any] | None:
    """Print each piece of an answer as it comes; return the error, if there is one."""
    try:
        with request(
            args.api_host, args.api, path, secret("VLLM_API_KEY"), body, args.timeout
        ) as came:
            for piece in pieces(came):
                if "error" in piece:
                    return {"status": 500, "error": json.dumps(piece["error"])[:500]}
                choice = (piece.get("choices") or [{}])[0]
                fingerprint = piece.get("system_fingerprint") or ""
                say({"text": answer.content(choice, "delta"), "system_fingerprint": fingerprint})
    except Refused as error:
        return {"status": error.code, "error": error.said[:500]}
    except OSError as error:
        return {"status": 0, "error": str(error)}
    return None


def pieces(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the pieces of a streamed answer (server-sent events) as they come."""
    for raw in lines:
        line = raw.decode(errors="replace").strip()
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])
