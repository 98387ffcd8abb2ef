"""Asks a model for what it does, the only proof that it works: a completion, an embedding, a score
and the like (`task.py`).

Standard library only.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import api, task
from .api import Where
from .task import Task


@dataclass(frozen=True)
class Asked:
    """The way in which a model was asked last, and status and text of its answer.

    `refused` has what was said to other ways, where none of them fits.
    """

    task: Task
    status: int
    text: str
    refused: str = ""


def complete(args: Where) -> dict[str, Any]:
    """Ask for a completion, or whatever else the model gives, and return what came back.

    Of several replicas, each is asked.
    """
    status, text = api.api(args, "/v1/models", timeout=min(10.0, args.timeout))
    if status != 200:
        return {"status": status, "error": text[:500]}
    model = json.loads(text)["data"][0]["id"]
    before = finished(args) if args.engines > 1 else {}
    started = time.monotonic()
    asked = ask(args, model)
    said: dict[str, Any] = {"status": asked.status, "task": asked.task.name}
    if asked.status != 200:
        return {**said, "error": asked.text[:1000]}
    said |= {
        "model": model,
        **_came(asked),
        "seconds": round(time.monotonic() - started, 3),
    }
    if args.engines > 1:
        said["replicas"] = replicas(args, asked.task, model, before)
    return said


def _came(asked: Asked) -> dict[str, Any]:
    """Return what an answer brought: the text of a completion, else in words what came back."""
    if not asked.task.generates:
        came = asked.task.came(asked.text)
        odd = {} if came else {"error": f"no answer of {asked.task.path}: {asked.text[:200]}"}
        refused = {"refused": asked.refused[:500]} if asked.refused else {}
        return {"came": came, **odd, **refused}
    answer = json.loads(asked.text)
    none = not (answer.get("usage") or {}).get("completion_tokens", 0)
    return {
        **({"error": "a completion without a token"} if none else {}),
        "text": content(answer["choices"][0], "message"),
        "system_fingerprint": answer.get("system_fingerprint") or "",
    }


def ask(args: Where, model: str) -> Asked:
    """Ask a model in its own way: in a chat, by a plain completion, or as a model that does not
    generate.

    A way that fits is gone with whatever it answers. Where none does, what `/health` says.
    """
    for each in (task.CHAT, task.COMPLETION):
        asked = _ask(args, each, model)
        if not _unfit(asked):
            return asked
    return other(args, model)


def _unfit(asked: Asked) -> bool:
    judge = task.no_chat if asked.task is task.CHAT else task.unfit
    return judge(asked.status, asked.text)


def other(args: Where, model: str) -> Asked:
    """Ask a model that does not generate: the first way that gives an answer is its own.

    Where none does: why it is broken, where one of them says so, else what `/health` says. Silence
    proves nothing about a model that transcribes, whatever it says to it.
    """
    found = list[Asked]()
    for each in task.OTHERS:
        asked = _ask(args, each, model)
        if asked.status in (0, 200, 401, 403):
            return asked
        if not _unfit(asked):
            found.append(asked)
    for refusal in found:
        if refusal.status >= 500 and refusal.task is not task.TRANSCRIPTION:
            return refusal
    health = _ask(args, task.HEALTH, model)
    said = "; ".join(f"{one.task.path}: {one.status} {one.text[:200]}" for one in found)
    return Asked(task.HEALTH, health.status, health.text, said or "it has no route that we know")


def _ask(args: Where, each: Task, model: str) -> Asked:
    body = each.body(model, args.prompt, args.max_tokens)
    return Asked(each, *api.api(args, each.path, body, args.timeout))


def content(choice: Mapping[str, Any], of_chat: str) -> Any:
    """Return the text of a choice: of a plain completion, or of a chat's `message` or `delta`."""
    said: Any = choice.get("text") or (choice.get(of_chat) or {}).get("content") or ""
    return said


def finished(args: Where) -> dict[int, float]:
    """How many requests each replica has finished, by its number among all of the server's; empty
    where vLLM does not count.
    """
    counts: dict[int, float] = {}
    for labels, number in re.findall(
        r"^vllm:request_success_total\{(.*)\} (\S+)", api.api(args, "/metrics")[1], re.M
    ):
        found = re.search(r'\bengine="(\d+)"', labels)
        if found:
            counts[int(found[1])] = counts.get(int(found[1]), 0.0) + float(number)
    return counts


def replicas(args: Where, way: Task, model: str, before: dict[int, float]) -> list[dict[str, Any]]:
    """Ask every replica at once; one has answered when a request came back and its own count of
    finished ones has grown.

    Where vLLM chooses the replica, an answer is one of all: nobody can say whose it was.
    """
    found: list[dict[str, Any]] = [{} for _ in range(args.engines)]
    body = way.body(model, args.prompt, args.max_tokens)

    def ask_one(number: int) -> None:
        started = time.monotonic()
        status, text = api.api(args, way.path, body, args.timeout, number)
        seconds = round(time.monotonic() - started, 3)
        found[number] = {
            "status": status,
            "seconds": seconds,
            "error": "" if status == 200 else text[:500],
        }

    asked = [threading.Thread(target=ask_one, args=(number,)) for number in range(args.engines)]
    for each in asked:
        each.start()
    for each in asked:
        each.join()
    # vLLM counts nothing (`--disable-log-stats`), or chooses: the answers have to do.
    if not before or not way.steered:
        return [{**each, "answered": each["status"] == 200} for each in found]
    came = 1 + sum(each["status"] == 200 for each in found)
    grown: dict[int, float] = {}

    def counted() -> bool:
        grown.update(
            {
                number - args.first: count - before.get(number, 0.0)
                for number, count in finished(args).items()
            }
        )
        return (
            all(grown.get(number, 0) > 0 for number in range(args.engines))
            or sum(grown.values()) >= came
        )

    api.until(counted, 5)  # Counts follow the answers a moment later.
    return [
        {**each, "answered": each["status"] == 200 and grown.get(number, 0) > 0}
        for number, each in enumerate(found)
    ]
