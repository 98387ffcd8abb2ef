"""Waiting for a batch job: progress reports, and every outcome."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.batch.driver.progress import Progress
from launcher.batch.watch import WatchedJob, watch_job
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import BatchError, DeadlineError, VlaunchError
from launcher.core.events import Event
from launcher.core.transport import Command
from launcher.tools.site import Site
from tests.fakes import FakeTransport

INVENTORY = Inventory(
    path=Path("inventory.yaml"),
    cluster="c",
    image="i",
    nodes=(Node(name="n1", host="n1", ip="10.0.0.1", gpus=1, head=True),),
)
WATCHED = WatchedJob(name="j", work="/w/j", job="batch-j-2")
LOST = Answer(node="n1", code=255, err="the connection was lost")


@dataclass
class Head:
    """A fake head with an update per query (the last repeats), and a clock that sleeps advance."""

    updates: list[dict[str, Any] | Answer]
    now: float = 0.0
    commands: list[Command] = field(default_factory=list)

    def answer(self, command: Command) -> Answer:
        self.commands.append(command)
        message = self.updates[min(len(self.commands), len(self.updates)) - 1]
        return (
            message
            if isinstance(message, Answer)
            else Answer(node="n1", code=0, out=json.dumps(message))
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def update(
    state: str = "running",
    status: str = "RUNNING",
    *,
    log: str = "",
    job: Any = None,
    **progress: Any,
) -> dict[str, Any]:
    payload = {
        "state": state,
        "submission": "batch-j-2",
        "rows": 100,
        "done": 0,
        "updated": 1.0,
        **progress,
    }
    return {
        "job": {"status": status, **(job or {})},
        "log": log,
        "offset": len(log),
        "progress": payload,
    }


def follow(head: Head, *, attached: bool = False) -> tuple[list[Event], Progress]:
    events: list[Event] = []
    generator = watch_job(
        Site(INVENTORY),
        WATCHED,
        FakeTransport(head.answer),
        attached=attached,
        clock=lambda: head.now,
        sleep=head.sleep,
    )
    while True:
        try:
            events.append(next(generator))
        except StopIteration as over:
            return events, over.value
        except VlaunchError as error:
            error.events = events  # type: ignore[attr-defined]
            raise


def steps(events: list[Event]) -> list[str]:
    return [event.text for event in events if event.kind == "step"]


def test_a_job_to_its_end() -> None:
    """Finished states are steps, and the last progress is the result."""
    states = ["starting", "reading", "loading", "running", "finishing"]
    done = update("done", "SUCCEEDED", done=97, errors=3)
    events, progress = follow(Head([*(update(state) for state in states), done]))

    assert (progress.done, progress.errors) == (97, 3)
    assert steps(events) == [
        "starting the driver",
        "reading the input",
        "loading the model",
        "answering rows",
        "writing the last rows",
    ]


def test_an_attached_job() -> None:
    """Its past states are not reported."""
    events, _ = follow(Head([update(), update("done", "SUCCEEDED")]), attached=True)

    assert steps(events) == ["answering rows"]


def test_the_waiting_line() -> None:
    """Most important first: a narrow terminal cuts the rest."""
    running = update(
        done=12_340,
        errors=2,
        rows=100_000,
        rows_per_second=25.34,
        tokens_per_second=1912.4,
        eta=3461.2,
        gpu_hours=12.34,
        restarts=1,
        replicas={"ready": 1, "wanted": 2},
    )
    events, _ = follow(Head([running, update("done", "SUCCEEDED")]))
    line = next(event.text for event in events if event.kind == "wait")

    assert (
        line == "12,342 of 100,000 rows, 2 errors, 25.3 rows/s, 57m 41s left, 1 of 2 replicas, 1"
        " restart, 1,912 tokens/s, 12.3 GPU hours"
    )
    assert line.index("left") < 76


def test_progress_is_sent_once_a_second() -> None:
    """With data while rows are processed; printers choose the lines."""
    updates = [
        update("loading"),
        *(update(done=at) for at in range(5)),
        update("done", "SUCCEEDED"),
    ]
    events, _ = follow(Head(updates))
    waits = [event for event in events if event.kind == "wait"]

    assert [event.text for event in waits[:2]] == ["loading the model", "0 of 100 rows"]
    assert [bool(event.data) for event in waits] == [False, *[True] * 5]


def test_warnings_are_reported_once() -> None:
    """Although the driver repeats them."""
    events, _ = follow(
        Head(
            [
                update(warnings=["a"]),
                update(warnings=["a", "b"]),
                update("done", "SUCCEEDED", warnings=["a", "b"]),
            ]
        )
    )

    assert [event.text for event in events if event.kind == "warning"] == ["a", "b"]


def test_an_earlier_runs_progress_is_ignored() -> None:
    """It may be final while the new run has just started."""
    before = {
        **update(status="PENDING"),
        "progress": {"state": "done", "submission": "batch-j-1", "done": 7},
    }
    _, progress = follow(Head([*[before] * 40, update(), update("done", "SUCCEEDED", done=100)]))

    assert progress.done == 100


def test_contact_may_be_lost_for_a_while() -> None:
    """The job continues meanwhile."""
    events, _ = follow(Head([update(), *[LOST] * 40, update("done", "SUCCEEDED")]))

    assert "the head does not respond" in [event.text for event in events]


def test_contact_lost_for_good() -> None:
    """Reported with the next command."""
    with pytest.raises(BatchError, match="can no longer be watched") as raised:
        follow(Head([update(), LOST]))

    assert "the job may still be running" in raised.value.hint


def test_the_log_is_read_from_the_last_offset() -> None:
    """Without repetition."""
    head = Head([update(log="one\n"), update("done", "SUCCEEDED", log="two")])
    follow(head)

    assert [command.argv[command.argv.index("--offset") + 1] for command in head.commands] == [
        "0",
        "4",
    ]


def test_rays_status_may_precede_the_drivers() -> None:
    """The last progress is awaited, and so is the exit of a finished driver."""
    _, progress = follow(
        Head([update("finishing", "SUCCEEDED"), update("done", "SUCCEEDED", done=100)])
    )
    _, late = follow(
        Head([update("done", done=7), update("done", done=7), update("done", "SUCCEEDED", done=7)])
    )

    assert (progress.done, late.done) == (100, 7)


def test_a_finished_driver_that_does_not_exit() -> None:
    """Every row is accounted for: the command does not wait forever."""
    head = Head([update("done", done=100)])
    follow(head)

    assert 29 <= head.now <= 32


@pytest.mark.parametrize(
    ("last", "expected", "hint"),
    [
        (
            update(
                "failed",
                "FAILED",
                done=7,
                error={"message": "it broke", "evidence": "line", "hint": "mend it"},
            ),
            "failed: it broke",
            "mend it",
        ),
        (
            update("failed", "FAILED", error={"message": "rank 0 on 10.0.0.1", "hint": "mend it"}),
            "rank 0 on n1",
            "mend it",
        ),
        (
            update(
                "refused",
                "FAILED",
                error={"message": "the input changed", "hint": "--discard-results"},
            ),
            "was refused: the input",
            "--discard-results",
        ),
        (
            update("stopped", "STOPPED", done=7),
            "was stopped",
            "continues where this one stopped (7 of 100 rows are done)",
        ),
        (update(status="STOPPED", done=7), "was stopped", "7 of 100 rows are done"),
        (update(status="ABSENT", done=7), "Ray has no record of it", "7 of 100 rows are done"),
        (
            update(status="FAILED", done=7, job={"driver_exit_code": -9}),
            "was killed, by an operator or for lack of memory",
            "run the same command again",
        ),
        (
            update(
                status="FAILED",
                job={"message": "Job entrypoint command failed with exit code -9, last lines"},
            ),
            "was killed",
            "run the same command again",
        ),
        (
            update(status="FAILED", job={"driver_exit_code": 2}),
            "died with exit code 2",
            "run the same command again",
        ),
        (
            update(status="SUCCEEDED"),
            "exited before all rows were done",
            "run the same command again",
        ),
        (
            update(status="FAILED", log="torch.OutOfMemoryError: CUDA out of memory. Tried\n"),
            "a GPU ran out of memory",
            "`engine.tp`",
        ),
        (
            update(status="FAILED", log="OSError: [Errno 28] No space left on device\n"),
            "a disk is full, or /dev/shm",
            "jobs remove",
        ),
    ],
)
def test_interrupted_jobs(last: dict[str, Any], expected: str, hint: str) -> None:
    """The cause and a fix, usually the same command again."""
    with pytest.raises(BatchError) as raised:
        follow(Head([update(), last]))

    assert expected in raised.value.message
    assert hint in raised.value.hint


def test_a_failed_job_has_no_success() -> None:
    """Its last state did not succeed."""
    with pytest.raises(BatchError) as raised:
        follow(Head([update("loading"), update("failed", "FAILED", error={"message": "x"})]))

    assert steps(raised.value.events) == ["starting the driver"]  # type: ignore[attr-defined]


def test_a_silent_driver() -> None:
    """A living driver writes every second."""
    head = Head([update(), update(log="last words\n"), update()])
    with pytest.raises(DeadlineError, match="has not reported for 300s") as raised:
        follow(head)

    assert "last words" in raised.value.evidence
    assert "vlaunch stop j" in raised.value.hint
