"""Queries of a server's API from threads on its own node: canaries, counters, `/health`. Judges
nothing.

A canary is a completion of one token, or another request that the model supports (`task.py`). There
is no short deadline: under load it waits in the queue like any other request, and shows the waiting
time.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ... import upstream
from ..observed import FirstAnswer, Refusal
from ..records import Amount
from . import answer, api
from .api import Counters, QueryTarget
from .task import CHAT, ModelTask, task_named

QUERY_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    http.client.HTTPException,
)
_PATIENCE = 3600.0  # seconds for a canary; the supervisor decides long before
_EARLY = 1.0  # seconds between two queries of a server that has not answered
_OPEN = 5.0  # seconds between two queries at most while a canary waits
_LATE = 10.0  # seconds after which a canary is late, however rarely one is sent
_FIRST = 8  # tokens of the first answer
_HEALTH = upstream.text("vllm.route-health")
# Paths that report a pause or sleep, where vLLM has them.
_REST_QUERIES = (
    (upstream.text("vllm.route-sleeping"), "is_sleeping", "it sleeps"),
    (upstream.text("vllm.route-paused"), "is_paused", "it is paused"),
)


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """Facts about an API; times are ages in seconds, since clocks differ between nodes.

    `task` is the model's task, empty before the first answer. `answers` has, for each replica that
    has answered ("" for the whole API), the count and the age of the last; `asking` the age of each
    open canary; `failing` for how long canaries have failed, with status and text of the last.
    `seconds` is the duration of the last answer. `progress` has a digest of `counters` for each
    replica, which changes exactly when a step ends; they were read `counted` seconds ago.
    """

    answers: Mapping[str, tuple[int, Amount]] = field(default_factory=dict)
    asking: Mapping[str, Amount] = field(default_factory=dict)
    failing: Mapping[str, tuple[Amount, int, str]] = field(default_factory=dict)
    seconds: Amount = 0.0
    health: int = 0
    rests: str = ""
    task: str = ""
    first: FirstAnswer | Refusal | None = None
    counters: Counters | None = None
    counted: Amount = 0.0
    progress: Mapping[str, str] = field(default_factory=dict)


class ApiProbe:
    """Queries of one API of an engine, from its start to its end.

    `replicas` are the numbers of those behind it, none if the server has only one.
    """

    def __init__(self, host: str, port: int, replicas: range, every: float) -> None:
        self.where = QueryTarget(
            api_host=host,
            api=port,
            engines=len(replicas) or 1,
            first=replicas.start,
            max_tokens=_FIRST,
        )
        self.every, self.replicas = every, replicas
        self._parts: dict[str, int | None] = {
            "": None,
            **{str(replica): replica for replica in replicas},
        }
        self._task: ModelTask | None = None  # as which the model has answered first
        self._body: object = None
        # by replica ("" for the whole): when the canary was sent that is on its way
        self._canaries: dict[str, float] = {}
        # how many answers, and when the last one came
        self._answers: dict[str, tuple[int, float]] = {}
        # since when canaries fail, and status and text of the last
        self._failing: dict[str, tuple[float, int, str]] = {}
        self._first: FirstAnswer | Refusal | None = None
        self._seconds, self._turn, self._health, self._rest_reason = 0.0, 0, 0, ""
        self._counters: Counters | None = None
        self._counted = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Stop without waiting for open requests."""
        self._over.set()

    @property
    def answers(self) -> int:
        """Number of canaries that have come back so far."""
        return sum(count for count, _ in list(self._answers.values()))

    def report(self) -> ProbeReport:
        """Return the known facts."""
        now, counters = time.monotonic(), self._counters
        return ProbeReport(
            answers={
                key: (count, _age(now, at)) for key, (count, at) in list(self._answers.items())
            },
            asking={part: _age(now, at) for part, at in list(self._canaries.items())},
            failing={
                key: (_age(now, since), status, text[:300])
                for key, (since, status, text) in list(self._failing.items())
            },
            seconds=round(self._seconds, 3),
            health=self._health,
            rests=self._rest_reason,
            task=self._task.name if self._task is not None else "",
            first=self._first,
            counters=None if counters is None else replace(counters, progress=()),
            counted=_age(now, self._counted),
            progress={
                part: _digest(counters.progress_of(replica))
                for part, replica in self._parts.items()
                if counters is not None
            },
        )

    def _run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            began = time.monotonic()
            try:
                if self._task is not None:
                    self._send_canaries(self._task)
                else:
                    self._await_first_answer()
            except QUERY_ERRORS:
                pass  # no server listens yet, or the response is invalid: queried again
            most = _EARLY if self._task is None else _OPEN if self._canaries else self.every
            pause = max(0.05, min(most, self.every) - (time.monotonic() - began))

    def _await_first_answer(self) -> None:
        """Wait for the first answer, one of each replica, and keep the request for canaries."""
        self._health = api.query_api(self.where, _HEALTH, timeout=5)[0]
        if self._health != 200:
            return
        first = answer.request_first_answer(self.where)
        if isinstance(first, Refusal):
            times = self._first.times + 1 if isinstance(self._first, Refusal) else 1
            self._first = replace(first, times=times)
            return
        task = task_named(first.task) or CHAT
        self._body = task.body(first.model, self.where.prompt, 1)
        self._first, self._seconds = first, first.seconds
        self._query_counters()
        for part in self._parts:
            self._note_step(part)
        self._task = task

    def _send_canaries(self, task: ModelTask) -> None:
        """Send new canaries, and query the counters."""
        has_replicas = len(self.replicas) > 1 and task.selects_replica
        part = str(self.replicas[self._turn % len(self.replicas)]) if has_replicas else ""
        self._turn += 1
        if part not in self._canaries and not self._over.is_set():
            began = self._canaries[part] = time.monotonic()
            canary = threading.Thread(
                target=self._send_canary, args=(task, part, began), daemon=True
            )
            canary.start()
            canary.join(min(1.0, self.every / 2))  # mostly it is back at once
        self._query_counters()
        oldest = min(list(self._canaries.values()), default=float("inf"))
        if self._failing or time.monotonic() - oldest > min(2 * self.every, _LATE):
            self._health, text = api.query_api(self.where, _HEALTH, timeout=5)
            self._rest_reason = query_rest_reason(self.where, self._health, text)
        else:
            self._health, self._rest_reason = 200, ""

    def _send_canary(self, task: ModelTask, part: str, began: float) -> None:
        """Send a canary, and record its outcome."""
        replica = self._parts[part]
        # vLLM numbers those behind this API alone (`data_parallel_rank`,
        # v1/engine/input_processor.py)
        engine = None if replica is None else replica - self.where.first
        try:
            status, text = api.query_api(self.where, task.path, self._body, _PATIENCE, engine)
        except QUERY_ERRORS as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        # Also a refusal is an answer: the API key may have changed.
        if 0 < status < 500 or status == 501:
            self._seconds = time.monotonic() - began
            # Where vLLM chose the replica, it is unknown whose answer it is; and what is unknown is
            # not still.
            for part_answered in self._parts if part == "" else ("", part):
                self._note_step(part_answered)
            self._failing.pop(part, None)
        else:
            since = self._failing.get(part, (began, 0, ""))[0]
            self._failing[part] = since, status, text or "no answer"
        self._canaries.pop(part, None)

    def _note_step(self, part: str) -> None:
        count, _ = self._answers.get(part, (0, 0.0))
        self._answers[part] = count + 1, time.monotonic()

    def _query_counters(self) -> None:
        counters = api.query_counters(self.where)
        if counters is not None:
            self._counters, self._counted = counters, time.monotonic()


def query_rest_reason(target: QueryTarget, health: int, health_text: str) -> str:
    """Return why a server rests on purpose; empty if it does not, or does not say.

    `health` and `health_text` are the status and body of its `/health`. While vLLM rescales its
    expert parallelism, it answers 503 on every path (entrypoints/serve/elastic_ep/middleware.py).
    """
    if health == 503 and upstream.text("vllm.rescaling") in health_text:
        return "it is being rescaled"
    for path, key, reason in _REST_QUERIES:
        status, text = api.query_api(target, path, timeout=5)
        reply = json.loads(text) if status == 200 else None
        if isinstance(reply, dict) and reply.get(key) is True:
            return reason
    return ""


def _age(now: float, at: float) -> float:
    """Return the seconds since a time, which another thread may have recorded after `now`."""
    return max(0.0, round(now - at, 2))


def _digest(lines: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
