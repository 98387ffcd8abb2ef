"""Batch jobs: submission to Ray's dashboard, and their stop."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ... import upstream
from ..health.api import HttpError, QueryTarget, query_ray, wait_until
from . import process

OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
_FIELDS = ("submission_id", "job_id", "status", "message", "metadata", "driver_exit_code")


def select_fields(job: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of Ray's record of a job that the launcher reads."""
    return {key: job.get(key) for key in _FIELDS}


def dashboard_target(query: Mapping[str, str]) -> QueryTarget:
    """Return the query target for the dashboard in a query."""
    return QueryTarget(dashboard=int(query["dashboard"]))


def submit(_: object, query: Mapping[str, str]) -> Any:
    """Submit the job in the body. Its processes have the job's name in VLAUNCH_JOB, by which `stop`
    finds them.

    Raises OSError with Ray's message.
    """
    spec = json.loads(query["body"])
    name, metadata = spec["submission_id"], spec["metadata"]
    entrypoint = shlex.join(("exec", "env", f"VLAUNCH_JOB={name}", *spec["argv"]))
    body = {"entrypoint": entrypoint, "submission_id": name, "metadata": metadata}
    try:
        return query_ray(dashboard_target(query), upstream.text("ray.route-jobs"), body)
    except HttpError as error:
        if upstream.text("ray.job-exists") in error.text:
            return {"submission_id": name, "existing": True}
        raise OSError(f"{error.code}: {error.text[-500:]}") from error


def stop(_: object, query: Mapping[str, str]) -> dict[str, Any]:
    """Stop a job; then kill its processes on this node that ignore SIGTERM.

    Raises OSError for processes that do not exit.
    """
    target, name = dashboard_target(query), query["job"]

    def is_over() -> bool:
        return not processes() and query_job(target, name).get("status") in OVER

    def processes() -> list[int]:
        return sorted(process.find_with_variable(f"VLAUNCH_JOB={name}"))

    try:
        query_ray(target, upstream.text("ray.route-job-stop").format(name), {})
    except HttpError as error:
        # 404: no such job; 400: it is over already. It may have left processes all the same.
        if error.code not in (400, 404):
            raise
    wait_until(is_over, float(query["grace"]))
    killed = processes()
    process.kill(killed)
    wait_until(is_over, 10)
    if remaining := processes():
        raise OSError(f"processes {remaining} did not exit")
    return {"killed": len(killed), "job": select_fields(query_job(target, name))}


def query_job(target: QueryTarget, name: str) -> Mapping[str, Any]:
    """Return Ray's record of a job."""
    try:
        answer = query_ray(target, upstream.text("ray.route-job").format(name))
    except HttpError as error:
        if error.code == 404:
            return {"status": "ABSENT", "message": "no such job"}
        raise
    return answer if isinstance(answer, dict) else {}
