"""Asks a server's API on its own node, from threads, what the keeper judges by: canaries, counters,
`/health`. Judges nothing.

A canary is a completion of one token, or whatever else the model gives (`task.py`). It is waited
for, however long it takes: under load it stands in the queue like any other request, and tells how
long that is. Standard library only.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import answer, api
from .api import Counters, Where
from .task import CHAT, Task, named

SILENT = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    http.client.HTTPException,
)
_PATIENCE = 3600.0  # seconds for a canary; the keeper decides long before
_EARLY = 1.0  # seconds between two looks at a server that has not answered
_OPEN = 5.0  # seconds between two looks at most while a canary waits
_LATE = 10.0  # seconds after which a canary is late, however rarely one is sent
_FIRST = 8  # tokens of the first answer
# Paths that report a pause or sleep, where vLLM has them.
_RESTS = (
    ("/is_sleeping", "is_sleeping", "it sleeps"),
    ("/is_paused", "is_paused", "it is paused"),
)


class Canary(threading.Thread):
    """A request on its way; when it has ended, `done` is called with its `status` and `said`."""

    def __init__(
        self,
        where: Where,
        way: Task,
        body: object,
        replica: int | None,
        done: Callable[[Canary], None],
    ) -> None:
        super().__init__(daemon=True)
        self.where, self.way, self.body, self.replica, self.done = where, way, body, replica, done
        self.status, self.said, self.began, self.seconds = 0, "", time.monotonic(), 0.0

    def run(self) -> None:
        """Ask."""
        # vLLM numbers those behind this API alone (`data_parallel_rank`,
        # v1/engine/input_processor.py)
        place = None if self.replica is None else self.replica - self.where.first
        try:
            self.status, self.said = api.api(self.where, self.way.path, self.body, _PATIENCE, place)
        except SILENT as error:
            self.said = f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - self.began
        self.done(self)


class Probe:
    """What is known of one API of an engine, from its start to its end.

    `replicas` are the numbers of those behind it, none where the server has only one. `report` is
    what travels to the keeper.
    """

    def __init__(self, host: str, port: int, replicas: range, every: float) -> None:
        self.where = Where(
            api_host=host,
            api=port,
            engines=len(replicas) or 1,
            first=replicas.start,
            max_tokens=_FIRST,
        )
        self.every, self.replicas = every, replicas
        self._task: Task | None = None  # as which the model has answered first
        self._body: object = None
        self._canaries: dict[int | None, Canary] = {}
        # replica ("" for the whole) → how many answers, and when the last one came
        self._answers: dict[str, list[float]] = {}
        # the same keys → since when canaries fail, and status and text of the last
        self._failing: dict[str, tuple[float, int, str]] = {}
        self._first: dict[str, Any] = {}
        self._seconds, self._turn, self._health, self._rests = 0.0, 0, 0, ""
        self._counters: Counters | None = None
        self._counted = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End; what is on its way is not waited for."""
        self._over.set()

    @property
    def answers(self) -> int:
        """How many canaries have come back so far."""
        return int(sum(count for count, _ in list(self._answers.values())))

    def report(self) -> dict[str, Any]:
        """Return what is known; all times are seconds ago, for clocks differ between nodes.

        `task` is what the model does, empty before the first answer; `first` what it answered
        first, or how it has refused so far (`observed.Observed.first_answer`).

        `answers` has, for each replica that has answered ("" for the whole API), how often and
        how long ago; `asking` how long each canary has been on its way; `failing` for how long
        canaries have failed, with status and text of the last.
        """
        now = time.monotonic()
        said: dict[str, Any] = {
            "answers": {
                key: [count, round(now - at, 2)] for key, (count, at) in list(self._answers.items())
            },
            "asking": {
                _key(each): round(now - canary.began, 2)
                for each, canary in list(self._canaries.items())
            },
            "seconds": round(self._seconds, 3),
            "failing": {
                key: [round(now - since, 2), status, text[:300]]
                for key, (since, status, text) in list(self._failing.items())
            },
            "health": self._health,
            "rests": self._rests,
            "task": self._task.name if self._task is not None else "",
            "first": self._first,
        }
        if counted := self._counters:
            said["counters"] = {
                "age": round(now - self._counted, 2),
                "running": counted.running,
                "waiting": counted.waiting,
                "tokens": counted.tokens,
                "good": counted.good,
                "failed": counted.failed,
                "held": dict(counted.held),
                "progress": {_key(each): _digest(counted.of(each)) for each in self._keys()},
            }
        return said

    def _keys(self) -> list[int | None]:
        return [None, *self.replicas]

    def _run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            began = time.monotonic()
            try:
                if self._task is not None:
                    self._look(self._task)
                else:
                    self._begin()
            except SILENT:
                pass  # nobody listens yet, or what came is no answer: asked again
            most = _EARLY if self._task is None else _OPEN if self._canaries else self.every
            pause = max(0.05, min(most, self.every) - (time.monotonic() - began))

    def _begin(self) -> None:
        """Wait for the first answer, one of each replica; what to ask from then on is
        remembered.
        """
        self._health = api.api(self.where, "/health", timeout=5)[0]
        if self._health != 200:
            return
        said = answer.complete(self.where)
        status, error = _refusal(said)
        if error:
            self._first = {
                "status": status,
                "error": error[:500],
                "task": str(said.get("task", "")),
                "times": self._first.get("times", 0) + 1,
            }
            return
        way = named(said["task"]) or CHAT
        self._body = way.body(said["model"], self.where.prompt, 1)
        self._seconds = float(said["seconds"])
        self._first = {
            "model": str(said["model"]),
            "fingerprint": str(said.get("system_fingerprint", "")),
            **{name: str(said.get(name, "")) for name in ("text", "came", "refused")},
            "task": way.name,
            "seconds": self._seconds,
            "replicas": [float(each["seconds"]) for each in said.get("replicas", ())],
        }
        self._count()
        for each in self._keys():
            self._note(each)
        self._task = way

    def _look(self, way: Task) -> None:
        """Send new canaries, and count."""
        several = len(self.replicas) > 1 and way.steered
        replica = self.replicas[self._turn % len(self.replicas)] if several else None
        self._turn += 1
        if replica not in self._canaries and not self._over.is_set():
            canary = Canary(self.where, way, self._body, replica, self._judge)
            self._canaries[replica] = canary
            canary.start()
            canary.join(min(1.0, self.every / 2))  # mostly it is back at once
        self._count()
        late = any(
            time.monotonic() - each.began > min(2 * self.every, _LATE)
            for each in list(self._canaries.values())
        )
        if late or self._failing:
            self._health, text = api.api(self.where, "/health", timeout=5)
            self._rests = resting(self.where, self._health, text)
        else:
            self._health, self._rests = 200, ""

    def _judge(self, canary: Canary) -> None:
        """Note how a canary ended; its own thread calls this."""
        key = _key(canary.replica)
        # Also a refusal is an answer: the API key may have changed.
        if 0 < canary.status < 500 or canary.status == 501:
            self._seconds = canary.seconds
            # Where vLLM chose the replica, nobody knows whose answer it is; and what is unknown is
            # not still.
            whose = self._keys() if canary.replica is None else [None, canary.replica]
            for each in whose:
                self._note(each)
            self._failing.pop(key, None)
        else:
            since = self._failing.get(key, (canary.began, 0, ""))[0]
            self._failing[key] = since, canary.status, canary.said or "no answer"
        self._canaries.pop(canary.replica, None)

    def _note(self, replica: int | None) -> None:
        count = self._answers.get(_key(replica), [0, 0.0])[0]
        self._answers[_key(replica)] = [count + 1, time.monotonic()]

    def _count(self) -> None:
        counted = api.counters(self.where)
        if counted is not None:
            self._counters, self._counted = counted, time.monotonic()


def resting(where: Where, health: int, health_text: str) -> str:
    """Return why a server stands still on purpose; empty when it does not, or does not say.

    `health` and `health_text` are the status and body of its `/health`. While vLLM rescales its
    expert parallelism, it answers 503 on every path (entrypoints/serve/elastic_ep/middleware.py).
    """
    if health == 503 and "scaling" in health_text:
        return "it is being rescaled"
    for path, field, words in _RESTS:
        status, text = api.api(where, path, timeout=5)
        if (
            status == 200
            and isinstance(said := json.loads(text), Mapping)
            and said.get(field) is True
        ):
            return words
    return ""


def _refusal(said: Mapping[str, Any]) -> tuple[int, str]:
    """Return the status (0: none) and why a first request has brought no answer; empty when it
    has.
    """
    status = int(said.get("status") or 0)
    if status != 200 or said.get("error"):
        return status, str(said.get("error") or "no answer")
    mute = {
        number: each for number, each in enumerate(said.get("replicas", ())) if not each["answered"]
    }
    told = [
        f"replica {number} gave no answer: {each.get('error') or 'its count did not grow'}"
        for number, each in mute.items()
    ]
    refused = [each["status"] for each in mute.values() if each["status"] != 200]
    return max(refused, default=0), "; ".join(told)


def _key(replica: int | None) -> str:
    return "" if replica is None else str(replica)


def _digest(lines: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
