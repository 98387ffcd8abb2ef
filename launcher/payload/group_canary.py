"""Watches rank 0's API from a thread, by the rules of the supervisor: a completion every few seconds, and what becomes of it.

`/health` alone says 200 for an engine whose other ranks have died. A completion that comes late is no proof of death either:
the engine may be busy. Only when its counters stand still as well, and for long, is it dead. Standard library only.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from supervisor_look import SILENT, Canary, Counters, Look, Still

_SLOW = 2.0  # seconds after which a canary makes us look at the counters
_ODD = 3  # answers in a row that are no answers, until they mean death


class Watch:
    """One generation's canaries, from the start of the engine to its end.

    `good` is None until a completion has come back, then when the last one did (seconds since 1970) and how long it took;
    `dead` says why the engine is dead, `note` why a completion proved nothing, `in_flight` how many requests it had last.
    """

    def __init__(self, wanted: dict[str, Any], every: float, timeout: float, stuck: float) -> None:
        self.good: tuple[float, float] | None = None
        self.dead, self.note = "", ""
        self.in_flight: int | None = None
        self._look, self._every, self._timeout = Look(wanted), every, timeout
        self._asked = self._odd = 0
        self._still = Still(timeout, stuck)
        self._over = threading.Event()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End, as soon as the completion under way is over."""
        self._over.set()

    def _run(self) -> None:
        wait = 0.0
        while not self._over.wait(wait) and not self.dead:
            began = time.monotonic()
            if self.good is None:
                if self._look.answers():
                    self._count(self._look.counters())
                    self.good = (time.time(), round(time.monotonic() - began, 3))
                wait = min(1.0, self._every)
            else:
                try:
                    self._next()
                except SILENT as error:
                    self.note = f"it cannot be looked at: {type(error).__name__}: {error}"
                hurry = self._odd or self._still.since
                wait = max(0.05, (min(1.0, self._every) if hurry else self._every) - (time.monotonic() - began))

    def _next(self) -> None:
        replica = self._asked % self._look.replicas if self._look.replicas > 1 else None
        self._asked += 1
        canary, before = Canary(self._look, self._timeout, replica), None
        canary.join(min(_SLOW, self._timeout / 2))
        if canary.is_alive():
            before = self._look.counters()
            canary.join()
        if canary.late:
            return self._late(replica, before)
        self._still.answered(replica)
        if 0 < canary.status < 500:  # also a refusal is an answer: the API key may have changed
            self._odd, self.good = 0, (time.time(), round(canary.seconds, 3))
            self.note = self._still.said if canary.status == 200 else f"a completion is refused with {canary.status}"
            self._count(self._look.counters())
            return None
        self._odd += 1
        self.note = f"a completion ends with {canary.status}" if canary.status else "the API does not answer"
        closed = canary.status == 0 and "refused" in canary.said
        if closed or "EngineDead" in canary.said or self._odd >= _ODD or self._look.health() == 503:
            self.dead = f"{self.note}: {canary.said[:300]}"
        return None

    def _late(self, replica: int | None, before: Counters | None) -> None:
        """Judge an engine whose canary did not come back in time: busy, or dead."""
        after = self._look.counters()
        self.note = f"no completion{'' if replica is None else f' of replica {replica}'} within {self._timeout:g} s"
        self._count(after)
        self._still.late(replica, before, after)
        if self._still.dead:
            self.dead = self._still.said

    def _count(self, counters: Counters | None) -> None:
        if counters is not None:
            self.in_flight = counters.in_flight
