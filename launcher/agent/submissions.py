"""Batch jobs, submitted to Ray's dashboard and stopped there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from . import process
from .api import Refused, Where, ray, until

OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
_SHOWN = ("submission_id", "job_id", "status", "message", "metadata", "driver_exit_code")


def shown(job: Mapping[str, object]) -> dict[str, object]:
    """Return the part of Ray's record of a job that the launcher reads."""
    return {key: job.get(key) for key in _SHOWN}


def dashboard(query: Mapping[str, str]) -> Where:
    """Return where a query says that Ray's dashboard is."""
    return Where(dashboard=int(query["dashboard"]))


def submit(_: object, query: Mapping[str, str]) -> Any:
    """Submit the job that the body describes. Its processes carry the job's name in VLAUNCH_JOB, by
    which `stop` finds them.

    Raises OSError with Ray's objection.
    """
    spec = json.loads(query["body"])
    name, metadata = spec["submission_id"], spec["metadata"]
    entrypoint = shlex.join(("exec", "env", f"VLAUNCH_JOB={name}", *spec["argv"]))
    body = {"entrypoint": entrypoint, "submission_id": name, "metadata": metadata}
    try:
        return ray(dashboard(query), "/api/jobs/", body)
    except Refused as error:
        if "already exists" in error.text:
            return {"submission_id": name, "existing": True}
        raise OSError(f"{error.code}: {error.text[-500:]}") from error


def stop(_: object, query: Mapping[str, str]) -> dict[str, Any]:
    """Stop a job; then kill its processes on this node that ignore the polite signal.

    Raises OSError for processes that do not end.
    """
    target, name = dashboard(query), query["job"]

    def is_over() -> bool:
        return not processes() and job(target, name).get("status") in OVER

    def processes() -> list[int]:
        return sorted(process.carrying(f"VLAUNCH_JOB={name}"))

    try:
        ray(target, f"/api/jobs/{name}/stop", {})
    except Refused as error:
        # 404: no such job; 400: it is over already. It may have left processes all the same.
        if error.code not in (400, 404):
            raise
    until(is_over, float(query["grace"]))
    killed = processes()
    process.kill(killed)
    until(is_over, 10)
    if remaining := processes():
        raise OSError(f"processes {remaining} do not end")
    return {"killed": len(killed), "job": shown(job(target, name))}


def job(target: Where, name: str) -> Mapping[str, Any]:
    """Return Ray's record of a job."""
    try:
        answer = ray(target, f"/api/jobs/{name}")
    except Refused as error:
        if error.code == 404:
            return {"status": "ABSENT", "message": "no such job"}
        raise
    return answer if isinstance(answer, dict) else {}
