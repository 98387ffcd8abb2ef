"""Remaining time of a job: its remaining work, at the recent rate of each replica."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

# time of a token of an answer, relative to one of a prompt, in an engine with full batches
ANSWER_COST = 5.0
SKIPPED = 0.25  # share of the time since the first result that the rate leaves out
SAMPLES = 256  # most results that are kept
IDLE = 30.0  # seconds without a result after which nothing is predicted, if that is unusual


@dataclass(frozen=True, slots=True)
class Sample:
    """A result: when it came, in seconds and in seconds of working replicas, and all finished
    work.
    """

    time: float
    replica_seconds: float
    rows: int
    bytes: float


class Forecast:
    """Estimator of the remaining time.

    - Rows are weighed by their bytes in the input, as far as prompts take time: inputs may be
      sorted by length.
    - The rate is per replica, for replicas come and go; a new one counts when it should have its
      first result.
    - The rate is the slope of a line through recent results, so that neither loading the model nor
      the rows in flight count.
    """

    def __init__(self) -> None:
        self.rows_left = self.rows = 0
        self.bytes_left = self.bytes = 0.0
        self.working = 1  # replicas; a pipeline may not report them
        self.starting: list[float] = []  # times at which the others were ready
        self.latency = float("inf")  # seconds from a replica's start to its first result
        self.time = self.replica_seconds = 0.0
        self.samples: list[Sample] = []

    def begin(self, rows: int, size: float) -> None:
        """Set the remaining rows and their bytes."""
        self.rows_left, self.bytes_left = rows, size

    def set_replicas(self, now: float, ready: int) -> None:
        """Set the number of ready replicas."""
        self.advance(now)
        self.working = min(self.working, ready)
        new = ready - self.working - len(self.starting)
        self.starting = [*self.starting, *[now] * new][: ready - self.working]

    def advance(self, now: float) -> None:
        """Count the time of the working replicas."""
        while self.starting and self.starting[0] + self.latency <= now:
            self.count_time(max(self.time, self.starting.pop(0) + self.latency))
            self.working += 1
        self.count_time(now)

    def count_time(self, now: float) -> None:
        self.replica_seconds += self.working * (now - self.time)
        self.time = now

    def add(self, now: float, rows: int, size: float) -> None:
        """Add finished rows and their bytes."""
        if self.starting and self.latency == float("inf"):
            self.latency = now - self.starting[0]
        self.advance(now)
        self.rows, self.bytes = self.rows + rows, self.bytes + size
        self.samples.append(Sample(now, self.replica_seconds, self.rows, self.bytes))
        if len(self.samples) > SAMPLES:
            self.samples = self.samples[::2]
        self.rows_left, self.bytes_left = self.rows_left - rows, self.bytes_left - size

    def remaining(self, now: float, tokens_in: int, tokens_out: int) -> float | None:
        """Return the remaining seconds; None if unknown.

        Args:
            now: monotonic seconds.
            tokens_in: tokens of the finished rows' prompts that vLLM's cache did not have.
            tokens_out: tokens of their answers.
        """
        replicas = self.working + len(self.starting)
        if len(self.samples) < 2 or not replicas:
            return None
        idle = now - self.samples[-1].time
        gaps = (later.time - sooner.time for sooner, later in itertools.pairwise(self.samples))
        if idle > max(IDLE, 3 * max(gaps)):
            return None
        per_byte = tokens_in / self.bytes if self.bytes > 0 else 0.0
        per_row = ANSWER_COST * tokens_out / self.rows
        if not per_byte and not per_row:
            per_row = 1.0  # a class, which has no tokens
        first, last = self.samples[0].time, self.samples[-1].time
        begin = first + SKIPPED * (last - first)
        recent = [sample for sample in self.samples if sample.time >= begin]
        times = [sample.replica_seconds for sample in recent]
        work = [per_byte * sample.bytes + per_row * sample.rows for sample in recent]
        try:
            rate = statistics.linear_regression(times, work).slope
        except statistics.StatisticsError:  # all at the same time
            return None
        left = per_byte * self.bytes_left + per_row * self.rows_left
        return max(0.0, left / (rate * replicas) - idle) if rate > 0 else None
