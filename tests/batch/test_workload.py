"""The judge of stopped batch jobs."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.batch.workload import judge_stopped
from tests.ray_rows import group, table


def stopped(
    status: str = "STOPPED", alive: tuple[str, ...] = (), **changes: Any
) -> tuple[str, str]:
    jobs = [
        {"submission_id": "batch-b-1", "status": status, "job_id": "02"},
        {"submission_id": "serve-1", "status": "RUNNING"},
    ]
    (result,) = judge_stopped(["batch-b-1"], {"jobs": jobs, **changes}, alive)
    return result.status, result.text


@pytest.mark.parametrize(
    ("extra", "status", "text"),
    [
        ({}, "pass", "results are kept"),
        ({"status": "RUNNING"}, "wait", "job batch-b-1 is RUNNING"),
        ({"alive": ("b",)}, "wait", "the driver of `b` is still running"),
        ({"groups": table(group(1), group(1))}, "wait", "2 placement groups still there"),
        ({"groups": table(group(1, job="01"), group(1, "REMOVED"))}, "pass", "results are kept"),
        ({"actors": table({"job_id": "02", "state": "ALIVE"})}, "wait", "1 actors still running"),
        ({"actors": table({"job_id": "01", "state": "ALIVE"})}, "pass", "results are kept"),
        (
            {"actors": table({"job_id": "02", "state": "ALIVE", "is_detached": True})},
            "pass",
            "results are kept",
        ),
    ],
)
def test_a_stopped_job_leaves_nothing(extra: dict[str, Any], status: str, text: str) -> None:
    """GPUs of other jobs are not awaited."""
    result = stopped(**extra)

    assert result[0] == status
    assert text in result[1]


def test_silence_is_no_end() -> None:
    """The job's state is unknown."""
    (result,) = judge_stopped(["batch-b-1"], {"error": "timed out"}, ())

    assert result.status == "fail"
