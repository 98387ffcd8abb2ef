"""Judges of batch jobs: is there room, on accelerators and on the head's disk, and is one that was
stopped gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.checks import batch
from launcher.checks.gpu_use import Holder
from launcher.model import Accelerator, Inventory, Node
from launcher.tools.host import HostFacts
from tests.ray_rows import group, table

HEAD = Node(name="n1", host="n1", ip="10.0.0.1", gpus=4, head=True)
SERVER = Holder(what="the server of m", gpus=3, end="vlaunch stop")
JOB = Holder(what="batch job `b`", gpus=0, end="vlaunch stop b")


def inventory(accelerator: Accelerator = "nvidia") -> Inventory:
    return Inventory(
        path=Path("inventory.yaml"), cluster="c", image="i", nodes=(HEAD,), accelerator=accelerator
    )


@pytest.mark.parametrize(
    ("said", "holders", "status", "text"),
    [
        ({}, [], "pass", "4 of 4 GPUs are free in Ray"),
        (
            {"groups": table(group(2))},
            [],
            "pass",
            "2 of 4 GPUs are free in Ray; of 4 that the job would use",
        ),
        ({"groups": table(group(3))}, [], "fail", "1 of 4 GPUs are free in Ray, the job needs 2"),
        ({"groups": table(group(3, "REMOVED"))}, [], "pass", "4 of 4 GPUs are free in Ray"),
        # It has been submitted, and holds nothing yet.
        (
            {},
            [SERVER],
            "fail",
            "1 of 4 GPUs are free in Ray, the job needs 2: the server of m holds 3",
        ),
        # What it holds and what it claims are the same GPUs.
        (
            {"groups": table(group(3))},
            [SERVER, JOB],
            "fail",
            "the server of m holds 3, batch job `b`",
        ),
    ],
)
def test_room(said: dict[str, Any], holders: list[Holder], status: str, text: str) -> None:
    """What is reserved in Ray is taken, and so is what has been promised to somebody who begins."""
    (found,) = batch.room(inventory(), 2, 4, said, holders, queue=False)

    assert found.status == status
    assert text in found.text


def test_who_is_in_the_way_is_told_with_how_to_end_it() -> None:
    """Each of them; where nobody is known, with how to see who it is."""
    (named,) = batch.room(inventory(), 2, 4, {}, [SERVER, JOB], queue=False)
    (unknown,) = batch.room(inventory("cpu"), 2, 4, {"groups": table(group(4))}, [], queue=False)

    assert "`vlaunch stop`, `vlaunch stop b`" in named.fix
    assert "ray list placement-groups" in unknown.fix
    assert unknown.text.startswith("0 of 4 slots")
    assert all("`--queue`" in each.fix for each in (named, unknown))


def test_a_job_that_may_wait_is_let_through() -> None:
    """With a warning that says why nothing happens."""
    (found,) = batch.room(inventory(), 2, 4, {}, [SERVER], queue=True)

    assert (found.status, found.text.endswith("it waits for them")) == ("warn", True)


@pytest.mark.parametrize(
    ("free", "status"), [(None, "skip"), (264 * 10**6, "fail"), (268 * 10**6, "pass")]
)
def test_disk(free: int | None, status: str) -> None:
    """What is sent, as much output again, and some to spare."""
    (found,) = batch.disk(HEAD, 100 * 10**6, HostFacts(disk_free=free))

    assert found.status == status


@pytest.mark.parametrize(("said", "gpus"), [("2", 2.0), ("0.5", 0.5), ("many", 0.0), ("-1", 0.0)])
def test_claims(said: str, gpus: float) -> None:
    """Metadata is text, and anybody's."""
    assert batch.claimed({"metadata": {"vlaunch.gpus": said}}) == gpus


def stopped(status: str = "STOPPED", alive: tuple[str, ...] = (), **more: Any) -> tuple[str, str]:
    jobs = [
        {"submission_id": "batch-b-1", "status": status, "job_id": "02"},
        {"submission_id": "serve-1", "status": "RUNNING"},
    ]
    (found,) = batch.stopped(["batch-b-1"], {"jobs": jobs, **more}, alive)
    return found.status, found.text


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ({}, "pass", "what was done stays"),
        ({"status": "RUNNING"}, "wait", "job batch-b-1 is RUNNING"),
        ({"alive": ("b",)}, "wait", "the driver of `b` still lives"),
        ({"groups": table(group(1), group(1))}, "wait", "2 placement groups still there"),
        ({"groups": table(group(1, job="01"), group(1, "REMOVED"))}, "pass", "what was done stays"),
        ({"actors": table({"job_id": "02", "state": "ALIVE"})}, "wait", "1 actors still there"),
        ({"actors": table({"job_id": "01", "state": "ALIVE"})}, "pass", "what was done stays"),
        (
            {"actors": table({"job_id": "02", "state": "ALIVE", "is_detached": True})},
            "pass",
            "what was done stays",
        ),
    ],
)
def test_a_stopped_job_is_gone_when_nothing_of_it_is_left(
    more: dict[str, Any], status: str, text: str
) -> None:
    """Nothing of its own: what others hold is not waited for."""
    found = stopped(**more)

    assert found[0] == status
    assert text in found[1]


def test_silence_is_no_end() -> None:
    """Nobody could say whether the job is over."""
    (found,) = batch.stopped(["batch-b-1"], {"error": "timed out"}, ())

    assert found.status == "fail"
