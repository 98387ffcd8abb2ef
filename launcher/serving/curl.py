"""The line that asks a server with curl, for people to copy. It is never run by us."""

from __future__ import annotations

import json
import shlex

from launcher.agent.task import HEALTH, TRANSCRIPTION, Task

_PROMPT = "Say hello."


def line(endpoint: str, task: Task, model: str, *, key: bool) -> str:
    """Return the line that asks a server for what its model does.

    Args:
        endpoint: the URL of its API, with `/v1`.
        task: what the model does.
        model: its name.
        key: the server demands one: a shell variable stands for it, as the line may be pasted
            anywhere.
    """
    words = ["curl", f"{endpoint.removesuffix('/v1')}{task.path}"]
    header = ' -H "Authorization: Bearer $VLLM_API_KEY"' if key else ""
    return f"{shlex.join(words)}{header}{_body(task, model)}"


def _body(task: Task, model: str) -> str:
    if task is HEALTH:
        return ""
    if task is TRANSCRIPTION:
        return f" -F {shlex.quote(f'model={model}')} -F file=@speech.wav"
    body = json.dumps(task.body(model, _PROMPT, 64))
    return f" -H 'Content-Type: application/json' -d {shlex.quote(body)}"
