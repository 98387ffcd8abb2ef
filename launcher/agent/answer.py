"""The only proof that a model works: its answer to a completion, an embedding, a score and the like
(`task.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import api, task
from .api import Where
from .observed import FirstAnswer, Refusal
from .task import Task


@dataclass(frozen=True)
class Attempt:
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


class Replica(NamedTuple):
    """The answer of a replica to a request; without an `error` it has answered."""

    status: int
    seconds: float
    error: str


def complete(target: Where) -> FirstAnswer | Refusal:
    """Ask for a completion, or whatever else the model gives; of several replicas, every one."""
    status, text = api.api(target, "/v1/models", timeout=min(10.0, target.timeout))
    if status != 200:
        return Refusal(status=status, error=text[:500] or "no answer")
    model = str(json.loads(text)["data"][0]["id"])
    before = finished(target) if target.engines > 1 else {}
    started = time.monotonic()
    attempt = ask(target, model)
    task, seconds = attempt.task.name, round(time.monotonic() - started, 3)
    fields, error = _parse(attempt)
    if error:
        return Refusal(status=attempt.status, error=error[:500], task=task)
    answers = replicas(target, attempt.task, model, before) if target.engines > 1 else []
    if any(answer.error for answer in answers):
        errors = (
            f"replica {number} gave no answer: {answer.error}"
            for number, answer in enumerate(answers)
            if answer.error
        )
        status = max((answer.status for answer in answers if answer.status != 200), default=0)
        return Refusal(status=status, error="; ".join(errors)[:500], task=task)
    replica_seconds = tuple(answer.seconds for answer in answers)
    return FirstAnswer(model=model, task=task, seconds=seconds, replicas=replica_seconds, **fields)


def _parse(attempt: Attempt) -> tuple[dict[str, str], str]:
    """Return what an answer brought, and why it is none; empty when it is one."""
    if attempt.status != 200:
        return {}, attempt.text or "no answer"
    if not attempt.task.generates:
        description = attempt.task.came(attempt.text)
        error = "" if description else f"no answer of {attempt.task.path}: {attempt.text[:200]}"
        return {"came": description, "refused": attempt.refused[:500]}, error
    answer = json.loads(attempt.text)
    tokens = (answer.get("usage") or {}).get("completion_tokens", 0)
    fingerprint = str(answer.get("system_fingerprint") or "")
    fields = {"text": str(content(answer["choices"][0], "message")), "fingerprint": fingerprint}
    return fields, "" if tokens else "a completion without a token"


def ask(target: Where, model: str) -> Attempt:
    """Ask a model for a chat, a plain completion, or as one that does not generate: the first task
    that fits decides, whatever its answer.
    """
    for candidate in (task.CHAT, task.COMPLETION):
        attempt = _ask(target, candidate, model)
        if not attempt.unfit:
            return attempt
    return other(target, model)


def other(target: Where, model: str) -> Attempt:
    """Ask a model that does not generate: the first task with an answer is its own.

    Where none has: the error of one that is broken, else the answer of `/health`. Silence proves
    nothing about a model that transcribes, whatever its answer.
    """
    refusals = list[Attempt]()
    for candidate in task.OTHERS:
        attempt = _ask(target, candidate, model)
        if attempt.status in (0, 200, 401, 403):
            return attempt
        if not attempt.unfit:
            refusals.append(attempt)
    for refusal in refusals:
        if refusal.status >= 500 and refusal.task is not task.TRANSCRIPTION:
            return refusal
    health = _ask(target, task.HEALTH, model)
    texts = [f"{refusal.task.path}: {refusal.status} {refusal.text[:200]}" for refusal in refusals]
    refused = "; ".join(texts) or "it has no route that we know"
    return Attempt(task.HEALTH, health.status, health.text, refused)


def _ask(target: Where, model_task: Task, model: str) -> Attempt:
    body = model_task.body(model, target.prompt, target.max_tokens)
    return Attempt(model_task, *api.api(target, model_task.path, body, target.timeout))


def content(choice: Mapping[str, Any], of_chat: str) -> Any:
    """Return the text of a choice: of a plain completion, or of a chat's `message` or `delta`."""
    return choice.get("text") or (choice.get(of_chat) or {}).get("content") or ""


def finished(target: Where) -> dict[int, float]:
    """Return how many requests each replica has finished, by its number among all of the server's;
    empty where vLLM does not count.
    """
    counts: dict[int, float] = {}
    for labels, number in api.samples(api.api(target, "/metrics")[1], "vllm:request_success_total"):
        if labels.get("engine", "").isdigit():
            replica = int(labels["engine"])
            counts[replica] = counts.get(replica, 0.0) + number
    return counts


def replicas(target: Where, task: Task, model: str, before: dict[int, float]) -> list[Replica]:
    """Ask every replica at once; one has answered when a request came back and its own count of
    finished ones has grown.

    Where vLLM chooses the replica, an answer is one of all: it is unknown whose it was.
    """
    body = task.body(model, target.prompt, target.max_tokens)

    def ask_one(number: int) -> Replica:
        started = time.monotonic()
        status, text = api.api(target, task.path, body, target.timeout, number)
        error = "" if status == 200 else text[:500] or "no answer"
        return Replica(status, round(time.monotonic() - started, 3), error)

    with ThreadPoolExecutor(target.engines) as pool:
        answers = list(pool.map(ask_one, range(target.engines)))
    # vLLM counts nothing (`--disable-log-stats`), or chooses: the answers have to do.
    if not before or not task.steered:
        return answers
    came = 1 + sum(answer.status == 200 for answer in answers)
    grown = [0.0] * target.engines

    def counted() -> bool:
        counts = finished(target)
        for number in range(target.engines):
            replica = target.first + number
            grown[number] = counts.get(replica, 0.0) - before.get(replica, 0.0)
        return all(count > 0 for count in grown) or sum(grown) >= came

    api.until(counted, 5)  # Counts follow the answers a moment later.
    return [
        answer if answer.error or count > 0 else answer._replace(error="its count did not grow")
        for answer, count in zip(answers, grown, strict=True)
    ]
