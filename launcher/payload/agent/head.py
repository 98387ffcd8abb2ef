"""Programs inside a container that end or stream: submit and stop a batch job, and chat.

Standard library only, so that one costs a Python start and no `import ray`. Secrets are read from
the mounted files. Prints one JSON object. `submit` and `chat` read JSON on standard input (`chat`
one line of it; the end of its input ends it). What only asks is served by the agent (`queries.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys

from . import process
from .api import Refused, ray, say, until
from .talk import chat

OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
# verbs whose error is the exit code, too
_ENDS = ("submit", "stop")


def shown(job: dict[str, object]) -> dict[str, object]:
    wanted = ("submission_id", "job_id", "status", "message", "metadata", "driver_exit_code")
    return {key: job.get(key) for key in wanted}


def submit(args: argparse.Namespace) -> object:
    """Submit a batch job to Ray; standard input is `{"argv": […], "submission_id": …, "metadata":
    {…}}`.

    Its processes carry the job's name in VLAUNCH_JOB, by which `stop` finds them.
    """
    asked = json.load(sys.stdin)
    return post(args, asked["submission_id"], asked["argv"], asked["metadata"])


def post(args: argparse.Namespace, name: str, argv: object, metadata: object) -> dict[str, object]:
    """Hand a job to Ray; what it says against it is an `error`."""
    body = {
        "entrypoint": shlex.join(("exec", "env", f"VLAUNCH_JOB={name}", *argv)),
        "submission_id": name,
        "metadata": metadata,
    }
    try:
        return ray(args, "/api/jobs/", body)
    except Refused as error:
        if "already exists" in error.said:
            return {"submission_id": name, "existing": True}
        return {"error": f"{error.code}: {error.said[-500:]}"}


def stop(args: argparse.Namespace) -> object:
    """Stop a job; then its processes, if they ignore the polite signal."""
    try:
        ray(args, f"/api/jobs/{args.job}/stop", {}, "POST")
    except Refused as error:
        # 404: no such job; 400: it is over already. Its processes are looked for all the same.
        if error.code not in (400, 404):
            raise
    until(lambda: not processes(args.job) and job(args).get("status") in OVER, args.grace)
    killed = processes(args.job)
    for pid in killed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    until(lambda: not processes(args.job) and job(args).get("status") in OVER, 10)
    left = processes(args.job)
    answer = {"killed": len(killed), "left": left, "job": shown(job(args))}
    return {**answer, "error": f"processes {left} do not end"} if left else answer


def processes(submission: str) -> list[int]:
    """Pids whose environment names the job: the driver and everything it started on this node."""
    return sorted(process.carrying(f"VLAUNCH_JOB={submission}"))


def job(args: argparse.Namespace) -> dict[str, object]:
    try:
        answer = ray(args, f"/api/jobs/{args.job}")
    except Refused as error:
        if error.code == 404:
            return {"status": "ABSENT", "message": "no such job"}
        raise
    return answer if isinstance(answer, dict) else {}


VERBS = {
    "submit": submit,
    "stop": stop,
    "chat": chat,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--dashboard", type=int, default=8265)
    parser.add_argument("--api-host", default="127.0.0.1")
    parser.add_argument("--api", type=int, default=8000)
    parser.add_argument("--job", default="")
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.set_defaults(prompt="Say hello.")  # of a model that one cannot talk to
    args = parser.parse_args()
    try:
        answer = VERBS[args.verb](args)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        said = error.said[:500] if isinstance(error, Refused) else str(error)
        say({"error": said or type(error).__name__})
        return 1
    if answer is not None:
        say(answer)
    return 1 if isinstance(answer, dict) and "error" in answer and args.verb in _ENDS else 0
