"""Test requests to a model, the only proof that it works: a completion, an embedding, a score and
the like (`task.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import upstream
from ..observed import FirstAnswer, Refusal
from . import api, task
from .api import QueryTarget
from .task import ModelTask


@dataclass(frozen=True)
class Attempt:
    """A request of one task, with the status and text of its answer.

    `refused` has the answers to other tasks, if none of them fits.
    """

    task: ModelTask
    status: int
    text: str
    refused: str = ""

    @property
    def lacks_task(self) -> bool:
        """True if the model does not have this task."""
        judge = task.lacks_chat_template if self.task is task.CHAT else task.lacks_task
        return judge(self.status, self.text)


class ReplicaAnswer(NamedTuple):
    """A replica's answer to a request; without an `error` it has answered."""

    status: int
    seconds: float
    error: str


def request_first_answer(target: QueryTarget) -> FirstAnswer | Refusal:
    """Request a completion, or another task that the model has, from every replica."""
    status, text = api.query_api(
        target, upstream.text("vllm.route-models"), timeout=min(10.0, target.timeout)
    )
    if status != 200:
        return Refusal(status=status, error=text[:500] or "no answer")
    model = str(json.loads(text)["data"][0]["id"])
    before = count_finished(target) if target.engines > 1 else {}
    started = time.monotonic()
    attempt = query_model(target, model)
    task, seconds = attempt.task.name, round(time.monotonic() - started, 3)
    fields, error = _parse_answer(attempt)
    if error:
        return Refusal(status=attempt.status, error=error[:500], task=task)
    answers = query_replicas(target, attempt.task, model, before) if target.engines > 1 else []
    if any(answer.error for answer in answers):
        errors = (
            f"replica {number} did not answer: {answer.error}"
            for number, answer in enumerate(answers)
            if answer.error
        )
        status = max((answer.status for answer in answers if answer.status != 200), default=0)
        return Refusal(status=status, error="; ".join(errors)[:500], task=task)
    replica_seconds = tuple(answer.seconds for answer in answers)
    return FirstAnswer(model=model, task=task, seconds=seconds, replicas=replica_seconds, **fields)


def _parse_answer(attempt: Attempt) -> tuple[dict[str, str], str]:
    """Return the fields of an answer, and an error; empty if the answer is valid."""
    if attempt.status != 200:
        return {}, attempt.text or "no answer"
    if not attempt.task.generates:
        description = attempt.task.describe_answer(attempt.text)
        error = "" if description else f"no answer of {attempt.task.path}: {attempt.text[:200]}"
        return {"came": description, "refused": attempt.refused[:500]}, error
    answer = json.loads(attempt.text)
    tokens = (answer.get("usage") or {}).get("completion_tokens", 0)
    fingerprint = str(answer.get("system_fingerprint") or "")
    fields = {"text": str(choice_text(answer["choices"][0], "message")), "fingerprint": fingerprint}
    return fields, "" if tokens else "a completion without a token"


def query_model(target: QueryTarget, model: str) -> Attempt:
    """Query a model for a chat, then a plain completion, then other tasks: the first task that the
    model has decides.
    """
    for candidate in (task.CHAT, task.COMPLETION):
        attempt = _send_request(target, candidate, model)
        if not attempt.lacks_task:
            return attempt
    return query_other_task(target, model)


def query_other_task(target: QueryTarget, model: str) -> Attempt:
    """Query a model that does not generate: the first task with an answer is its own.

    Otherwise return the error of a broken model, else the answer of `/health`. Silence proves
    nothing about a model that transcribes, whatever its answer.
    """
    refusals = list[Attempt]()
    for candidate in task.OTHERS:
        attempt = _send_request(target, candidate, model)
        if attempt.status in (0, 200, 401, 403):
            return attempt
        if not attempt.lacks_task:
            refusals.append(attempt)
    for refusal in refusals:
        if refusal.status >= 500 and refusal.task is not task.TRANSCRIPTION:
            return refusal
    health = _send_request(target, task.HEALTH, model)
    texts = [f"{refusal.task.path}: {refusal.status} {refusal.text[:200]}" for refusal in refusals]
    refused = "; ".join(texts) or "it has no known route"
    return Attempt(task.HEALTH, health.status, health.text, refused)


def _send_request(target: QueryTarget, model_task: ModelTask, model: str) -> Attempt:
    body = model_task.body(model, target.prompt, target.max_tokens)
    return Attempt(model_task, *api.query_api(target, model_task.path, body, target.timeout))


def choice_text(choice: Mapping[str, Any], of_chat: str) -> Any:
    """Return the text of a choice: of a plain completion, or of a chat's `message` or `delta`."""
    return choice.get("text") or (choice.get(of_chat) or {}).get("content") or ""


def count_finished(target: QueryTarget) -> dict[int, float]:
    """Return the number of finished requests by replica, numbered within the server; empty if vLLM
    does not count them.
    """
    counts: dict[int, float] = {}
    for labels, number in api.parse_samples(
        api.query_api(target, upstream.text("vllm.route-metrics"))[1],
        upstream.text("vllm.requests-finished"),
    ):
        if labels.get("engine", "").isdigit():
            replica = int(labels["engine"])
            counts[replica] = counts.get(replica, 0.0) + number
    return counts


def query_replicas(
    target: QueryTarget, task: ModelTask, model: str, before: dict[int, float]
) -> list[ReplicaAnswer]:
    """Query every replica at once; a replica has answered if a request came back and its own count
    of finished requests has grown.

    If vLLM chooses the replica, the replica behind an answer is unknown.
    """
    body = task.body(model, target.prompt, target.max_tokens)

    def query_replica(number: int) -> ReplicaAnswer:
        started = time.monotonic()
        status, text = api.query_api(target, task.path, body, target.timeout, number)
        error = "" if status == 200 else text[:500] or "no answer"
        return ReplicaAnswer(status, round(time.monotonic() - started, 3), error)

    with ThreadPoolExecutor(target.engines) as pool:
        answers = list(pool.map(query_replica, range(target.engines)))
    # vLLM counts nothing (`--disable-log-stats`), or chooses: the answers have to do.
    if not before or not task.selects_replica:
        return answers
    came = 1 + sum(answer.status == 200 for answer in answers)
    grown = [0.0] * target.engines

    def counted() -> bool:
        counts = count_finished(target)
        for number in range(target.engines):
            replica = target.first + number
            grown[number] = counts.get(replica, 0.0) - before.get(replica, 0.0)
        return all(count > 0 for count in grown) or sum(grown) >= came

    api.wait_until(counted, 5)  # Counts follow the answers a moment later.
    return [
        answer if answer.error or count > 0 else answer._replace(error="it generated no tokens")
        for answer, count in zip(answers, grown, strict=True)
    ]
