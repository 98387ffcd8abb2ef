"""Remaining time of simulated jobs: replicas that answer many rows at once, in batches."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from launcher.batch.driver.forecast import Forecast

SLOTS, BATCH, IN_FLIGHT = 128, 64, 6  # rows at once in an engine, rows of a batch, batches
SPEED = 6000.0  # work of a replica in a second
TOKENS = 0.25  # tokens of a byte


@dataclass(frozen=True)
class Row:
    """A row: bytes in the input, tokens of its answer."""

    size: int
    answer: int

    @property
    def work(self) -> float:
        """Time that it takes, in tokens of a prompt."""
        return self.size * TOKENS + 5 * self.answer


@dataclass
class Replica:
    """An engine whose rows share its speed equally. `progress` is the work of a row since its
    start.
    """

    progress: float = 0.0
    now: float = 0.0
    waiting: list[tuple[int, Row]] = field(default_factory=list)
    active: list[tuple[float, int, int]] = field(default_factory=list)
    batches: dict[int, tuple[int, list[Row]]] = field(default_factory=dict)

    def take(self, number: int, rows: list[Row]) -> None:
        self.batches[number] = len(rows), rows
        self.waiting += [(number, row) for row in rows]
        self.fill()

    def fill(self) -> None:
        while self.waiting and len(self.active) < SLOTS:
            number, row = self.waiting.pop(0)
            heapq.heappush(self.active, (self.progress + row.work, id(row), number))

    def next_end(self) -> float:
        if not self.active:
            return float("inf")
        return self.now + (self.active[0][0] - self.progress) * len(self.active) / SPEED

    def step(self) -> list[Row]:
        """Finish the next row; return its batch's rows if it is the last."""
        self.now = self.next_end()
        self.progress, _, number = heapq.heappop(self.active)
        left, rows = self.batches.pop(number)
        self.fill()
        if left > 1:
            self.batches[number] = left - 1, rows
            return []
        return rows


def simulate(
    rows: Sequence[Row], changes: Sequence[tuple[float, int]], resumed: float = 0.0
) -> Iterator[tuple[float, int, list[Row]]]:
    """Yield time, ready replicas, and finished rows; replicas change at given times."""
    queue = [list(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH)]
    coming = sorted(changes)
    replicas: list[Replica] = []
    left, number, now = len(rows), 0, resumed
    while left:
        change = resumed + coming[0][0] if coming else float("inf")
        end = min((replica.next_end() for replica in replicas), default=float("inf"))
        if change <= end:
            now, count = change, coming.pop(0)[1]
            for lost in replicas[count:]:  # their rows are handed out again
                queue = [batch for _, batch in lost.batches.values()] + queue
            replicas = replicas[:count]
            replicas += [Replica(now=now) for _ in range(count - len(replicas))]
            finished: list[Row] = []
        else:
            replica = min(replicas, key=Replica.next_end)
            finished, now = replica.step(), end
        for replica in replicas:
            while queue and len(replica.batches) < IN_FLIGHT:
                if not replica.active:
                    replica.now = now
                number += 1
                replica.take(number, queue.pop(0))
        left -= len(finished)
        if finished or change <= end:
            yield now, len(replicas), finished


def make_rows(count: int, size: Callable[[float], float], answer: float) -> list[Row]:
    """Return rows whose size depends on their position from 0 to 1, with answers of any length."""
    chance = random.Random(count)
    return [
        Row(
            max(1, int(size(index / count) * chance.uniform(0.5, 1.5))),
            max(1, int(answer * chance.uniform(0.3, 1.7))),
        )
        for index in range(count)
    ]


SAME = make_rows(20_000, lambda _: 2000, 100)
RUNS = {
    "constant rate": (SAME, [(30.0, 4)]),
    "equal rows": ([Row(2000, 100)] * 20_000, [(30.0, 4)]),
    "slow start": (SAME, [(1800.0, 1), (1850.0, 4)]),
    "replicas added": (SAME, [(30.0, 1), (150.0, 8)]),
    "replica lost": (SAME, [(30.0, 4), (200.0, 3)]),
    "replica lost and back": (SAME, [(30.0, 4), (150.0, 3), (260.0, 4)]),
    "long rows last": (
        make_rows(20_000, lambda at: 1000 if at < 0.6 else 12_000, 20),
        [(30.0, 4)],
    ),
    "sorted by length": (make_rows(20_000, lambda at: 200 + 8000 * at, 50), [(30.0, 4)]),
    "longest rows first": (make_rows(20_000, lambda at: 8200 - 8000 * at, 50), [(30.0, 4)]),
    "no answers": (make_rows(20_000, lambda at: 500 + 4000 * at, 0), [(30.0, 2)]),
}


def predict(
    rows: Sequence[Row], changes: Sequence[tuple[float, int]], resumed: float
) -> tuple[list[float], list[float]]:
    """Return the errors of the predictions once a tenth is done and all replicas have come: as
    shares of the remaining time, and of the job's time.
    """
    events = list(simulate(rows, changes, resumed))
    began, settled, end = resumed + changes[0][0], resumed + changes[-1][0], events[-1][0]
    forecast = Forecast()
    forecast.set_replicas(resumed, 0)
    forecast.begin(len(rows), sum(row.size for row in rows))
    done = tokens_out = 0
    tokens_in = 0.0
    errors, shares = [], []
    for now, ready, finished in events:
        forecast.set_replicas(now, ready)
        if finished:
            forecast.add(now, len(finished), sum(row.size for row in finished))
        done += len(finished)
        tokens_in += sum(row.size for row in finished) * TOKENS
        tokens_out += sum(row.answer for row in finished)
        if done >= len(rows) / 10 and settled < now < end:
            remaining = forecast.remaining(now + 0.5, int(tokens_in), tokens_out)
            assert remaining is not None
            errors.append(abs(remaining - (end - now)) / (end - now))
            shares.append(abs(remaining - (end - now)) / (end - began))
    return errors, shares


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("resumed", [0.0, 1e6])
def test_a_tenth_of_a_job_predicts_its_end(name: str, resumed: float) -> None:
    """The remaining time within a fifth, and later the end within a fifth of the job's time.

    Where rows suddenly become much longer, nothing is finished for a while.
    """
    errors, shares = predict(*RUNS[name], resumed)

    assert errors[0] < 0.2
    assert max(shares) < (0.45 if name == "long rows last" else 0.2)


def test_classes_have_no_tokens() -> None:
    """Rows count the same, whatever their size."""
    forecast = Forecast()
    forecast.begin(1000, 1e6)
    for second in range(1, 11):
        forecast.add(float(second), 10, 50_000.0)

    assert forecast.remaining(10.0, 0, 0) == pytest.approx(90)


def test_nothing_is_predicted_without_results() -> None:
    """Before the second one, without replicas, or long after the last one."""
    forecast = Forecast()
    forecast.set_replicas(0.0, 0)
    forecast.begin(100, 100.0)
    assert forecast.remaining(1.0, 0, 0) is None
    forecast.set_replicas(1.0, 1)
    for second in (2.0, 3.0, 4.0):
        assert forecast.remaining(second, 0, 0) is None or second > 3
        forecast.add(second, 1, 1.0)
    assert forecast.remaining(4.0, 0, 0) == pytest.approx(97)
    assert forecast.remaining(33.0, 0, 0) == pytest.approx(68)
    assert forecast.remaining(35.0, 0, 0) is None
    forecast.set_replicas(35.0, 0)
    assert forecast.remaining(35.0, 0, 0) is None
