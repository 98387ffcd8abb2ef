"""The only proof that a model works: its answer to a completion, an embedding, a score and the like
(`task.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import api, task
from .api import Where
from .task import Task


@dataclass(frozen=True)
class Asked:
    """A request of one task, with status and text of its answer.

    `refused` has the answers to other tasks, where none of them fits.
    """

    task: Task
    status: int
    text: str
    refused: str = ""

    @property
    def unfit(self) -> bool:
        """True when the model has no such task."""
        judge = task.no_chat if self.task is task.CHAT else task.unfit
        return judge(self.status, self.text)


def complete(where: Where) -> dict[str, Any]:
    """Request a completion, or whatever else the model gives, of each replica, and return what came
    back.
    """
    status, text = api.api(where, "/v1/models", timeout=min(10.0, where.timeout))
    if status != 200:
        return {"status": status, "error": text[:500]}
    model = json.loads(text)["data"][0]["id"]
    before = finished(where) if where.engines > 1 else {}
    started = time.monotonic()
    asked = ask(where, model)
    result: dict[str, Any] = {"status": asked.status, "task": asked.task.name}
    if asked.status != 200:
        return {**result, "error": asked.text[:1000]}
    seconds = round(time.monotonic() - started, 3)
    result |= {"model": model, **_came(asked), "seconds": seconds}
    if where.engines > 1:
        result["replicas"] = replicas(where, asked.task, model, before)
    return result


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


def ask(where: Where, model: str) -> Asked:
    """Ask a model for a chat, a plain completion, or as one that does not generate: the first task
    that fits decides, whatever its answer.
    """
    for way in (task.CHAT, task.COMPLETION):
        asked = _ask(where, way, model)
        if not asked.unfit:
            return asked
    return other(where, model)


def other(where: Where, model: str) -> Asked:
    """Ask a model that does not generate: the first task with an answer is its own.

    Where none has: the error of one that is broken, else the answer of `/health`. Silence proves
    nothing about a model that transcribes, whatever its answer.
    """
    refusals = list[Asked]()
    for way in task.OTHERS:
        asked = _ask(where, way, model)
        if asked.status in (0, 200, 401, 403):
            return asked
        if not asked.unfit:
            refusals.append(asked)
    for refusal in refusals:
        if refusal.status >= 500 and refusal.task is not task.TRANSCRIPTION:
            return refusal
    health = _ask(where, task.HEALTH, model)
    texts = [f"{one.task.path}: {one.status} {one.text[:200]}" for one in refusals]
    refused = "; ".join(texts) or "it has no route that we know"
    return Asked(task.HEALTH, health.status, health.text, refused)


def _ask(where: Where, way: Task, model: str) -> Asked:
    body = way.body(model, where.prompt, where.max_tokens)
    return Asked(way, *api.api(where, way.path, body, where.timeout))


def content(choice: Mapping[str, Any], of_chat: str) -> Any:
    """Return the text of a choice: of a plain completion, or of a chat's `message` or `delta`."""
    return choice.get("text") or (choice.get(of_chat) or {}).get("content") or ""


def finished(where: Where) -> dict[int, float]:
    """Return how many requests each replica has finished, by its number among all of the server's;
    empty where vLLM does not count.
    """
    counts: dict[int, float] = {}
    for labels, number in api.samples(api.api(where, "/metrics")[1], "vllm:request_success_total"):
        if labels.get("engine", "").isdigit():
            replica = int(labels["engine"])
            counts[replica] = counts.get(replica, 0.0) + number
    return counts


def replicas(
    where: Where, way: Task, model: str, before: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Ask every replica at once; one has answered when a request came back and its own count of
    finished ones has grown.

    Where vLLM chooses the replica, an answer is one of all: it cannot be told whose it was.
    """
    body = way.body(model, where.prompt, where.max_tokens)

    def ask_one(number: int) -> dict[str, Any]:
        started = time.monotonic()
        status, text = api.api(where, way.path, body, where.timeout, number)
        seconds = round(time.monotonic() - started, 3)
        return {"status": status, "seconds": seconds, "error": "" if status == 200 else text[:500]}

    with ThreadPoolExecutor(where.engines) as pool:
        results = list(pool.map(ask_one, range(where.engines)))
    # vLLM counts nothing (`--disable-log-stats`), or chooses: the answers have to do.
    if not before or not way.steered:
        return [{**result, "answered": result["status"] == 200} for result in results]
    came = 1 + sum(result["status"] == 200 for result in results)
    grown = [0.0] * where.engines

    def counted() -> bool:
        counts = finished(where)
        for number in range(where.engines):
            replica = where.first + number
            grown[number] = counts.get(replica, 0.0) - before.get(replica, 0.0)
        return all(count > 0 for count in grown) or sum(grown) >= came

    api.until(counted, 5)  # Counts follow the answers a moment later.
    return [
        {**result, "answered": result["status"] == 200 and count > 0}
        for result, count in zip(results, grown, strict=True)
    ]
