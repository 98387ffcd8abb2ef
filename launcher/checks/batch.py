"""Judges of a batch job to be (is there room, on accelerators and on the head's disk), and of one
that was stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher import sizes
from launcher.checks.gpu_use import LIST_GROUPS, Holder, busy_gpus, held, positive, rows
from launcher.checks.shape import Finding, failed, gone, passed, skipped
from launcher.model import Inventory, Node
from launcher.tools import job_store
from launcher.tools.host import HostFacts

OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
_SPARE = 64 * 2**20  # bytes that stay free beside a batch job's files


def claimed(job: Mapping[str, Any]) -> float:
    """Return how many accelerators a batch's Ray job needs at least, as its metadata says."""
    try:
        return positive(float((job.get("metadata") or {}).get(job_store.GPUS, 0)))
    except ValueError:
        return 0.0


def holders(said: Mapping[str, Any]) -> list[Holder]:
    """Return the batch jobs that run and need accelerators."""
    return [
        Holder(what=f"batch job `{name}`", gpus=claimed(job), end=f"vlaunch stop {name}")
        for job in said.get("jobs", ())
        if job["status"] not in OVER
        and (name := job_store.named(job.get("metadata") or {}))
        and claimed(job)
    ]


def room(
    inventory: Inventory,
    least: float,
    most: float,
    said: Mapping[str, Any],
    holders: Sequence[Holder],
    *,
    queue: bool,
) -> list[Finding]:
    """Judge that a batch job can begin now; with `queue` it may wait for what others hold."""
    # Who has just begun holds nothing yet, but soon will.
    free = max(0.0, inventory.gpus - max(busy_gpus(said), sum(each.gpus for each in holders)))
    unit = "slots" if inventory.accelerator == "cpu" else "GPUs"
    text = f"{free:g} of {inventory.gpus} {unit} are free in Ray"
    if free >= least:
        short = f"; of {most:g} that the job would use" if free < most else ""
        return [passed("", text + short)]
    text += f", the job needs {least:g}{held(holders)}"
    if queue:
        return [Finding(node="", status="warn", text=f"{text}; it waits for them")]
    ends = ", ".join(f"`{each.end}`" for each in holders)
    who = f"end what holds them: {ends}" if ends else f"see who holds them: `{LIST_GROUPS}`"
    return [failed("", text, fix=f"{who}\nor submit it, to wait for them: `--queue`")]


def disk(node: Node, need: int, facts: HostFacts) -> list[Finding]:
    """Judge that the head has room for what is shipped, and for as much output again."""
    if facts.disk_free is None:
        return [skipped(node, f"nobody could say how much room {node.hf_home} has")]
    wanted = 2 * need + _SPARE
    if facts.disk_free >= wanted:
        return [passed(node, f"{sizes.told(facts.disk_free)} free under {node.hf_home}")]
    return [
        failed(
            node,
            f"{sizes.told(facts.disk_free)} free under {node.hf_home}, the job's files need about"
            f" {sizes.told(wanted)}",
            fix=(
                "free some space there, remove jobs that are done (`vlaunch jobs --remove NAME`),\n"
                "or read from and write to a path of the nodes (`nodes:/…`) or an object store"
            ),
        )
    ]


def stopped(jobs: Sequence[str], said: Mapping[str, Any], alive: Sequence[str]) -> list[Finding]:
    """Judge that batch jobs are over, their drivers gone, and nothing of theirs left in Ray.

    Args:
        jobs: their Ray jobs.
        said: what the head said about Ray, or its `error`.
        alive: the names of those whose driver still holds its lock.
    """
    if "jobs" not in said:
        text = f"Ray cannot be asked any more: {said.get('error', 'no answer')}"
        return [failed("", text, fix="look at `vlaunch status`")]
    states = {job["submission_id"]: job["status"] for job in said["jobs"]}
    left = [
        f"job {name} is {states[name]}" for name in jobs if states.get(name, "ABSENT") not in OVER
    ]
    left += [f"the driver of `{name}` still lives" for name in alive]
    left += _left_in_ray(_numbers(jobs, said), said)
    return [gone(left, "the job is gone; what was done stays")]


def _numbers(jobs: Sequence[str], said: Mapping[str, Any]) -> list[str]:
    """Return Ray's own numbers of jobs, by which it says what belongs to them."""
    return [
        job["job_id"] for job in said["jobs"] if job["submission_id"] in jobs and job.get("job_id")
    ]


def _left_in_ray(own: Sequence[str], said: Mapping[str, Any]) -> list[str]:
    """Return in words what jobs, by Ray's numbers of them, still have there: what others hold is
    not ours to wait for.
    """
    groups = [
        row
        for row in rows(said.get("groups"))
        if row.get("creator_job_id") in own and row.get("state") != "REMOVED"
    ]
    # Ray Data's own actors (statistics and others) are detached: the first job makes them, and all
    # that follow use them.
    actors = [
        row
        for row in rows(said.get("actors"))
        if row.get("job_id") in own and row.get("state") == "ALIVE" and not row.get("is_detached")
    ]
    return [
        f"{len(found)} {what} still there"
        for found, what in ((actors, "actors"), (groups, "placement groups"))
        if found
    ]
