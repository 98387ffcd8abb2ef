"""Runs inside the head container: asks Ray's dashboard and vLLM's API over loopback and prints one JSON object.

Standard library only, so that an answer costs a Python start and no `import ray`. Secrets are read from the mounted files.
Usage: head.py nodes|jobs|submit|stop|watch|server|complete|chat [--flags]; `submit` and `chat` read JSON on standard input
(`chat` one line of it; the end of its input ends it).
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # its siblings, also when it is loaded as a module

import record
from head_api import (  # noqa: F401 - siblings find all here
    Refused,
    api,
    chat,
    complete,
    no_chat,
    ray,
    request,
    say,
    secret,
    until,
)

LOGS = os.environ.get("VLAUNCH_RAY_LOGS", "/tmp/ray/session_latest/logs")
AGAIN = "starting the engine again"  # what the supervisor says in the job's log: what is above is of another engine
OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")


def nodes(args: argparse.Namespace) -> object:
    """Ray's node table, `ray status`, and whether the head can open each peer's raylet port (a one-way firewall shows here)."""
    table = ray(args, "/api/v0/nodes?detail=1&limit=10000")
    return {
        "nodes": table,
        "status": status(args),
        "unreachable": [each for each in args.peers if not reachable(each)],
    }


def status(args: argparse.Namespace) -> str:
    """The text of `ray status`, which the dashboard formats too: no `import ray`; empty when this Ray does not."""
    try:
        return ray(args, "/api/cluster_status?format=1")["data"]["clusterStatus"]
    except (Refused, KeyError, TypeError, ValueError):
        return ""


def reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3):
            return True
    except OSError:
        return False


def jobs(args: argparse.Namespace) -> object:
    """Submitted jobs, Ray's tables, the supervisor's word, what vLLM's API says, and which peers' raylets do not listen.

    Ray's node table has a dead node alive for some seconds more.
    """
    alive = "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
    tables = {
        "nodes": "/api/v0/nodes?detail=1&limit=10000",
        "actors": f"/api/v0/actors?detail=1&limit=10000&{alive}",
        "groups": "/api/v0/placement_groups?detail=1&limit=10000",
    }
    with ThreadPoolExecutor(32) as pool:  # a busy dashboard is slow to begin with each
        knocks = {each: pool.submit(reachable, each) for each in args.peers}
        listed = pool.submit(ray, args, "/api/jobs/")
        asked = {name: pool.submit(ray, args, path) for name, path in tables.items()}
        return {
            "jobs": [shown(job) for job in listed.result() if job.get("submission_id")],
            **{name: table.result() for name, table in asked.items()},
            "listening": reachable(f"{args.api_host}:{args.api}"),
            "unreachable": [each for each, knock in knocks.items() if not knock.result()],
            **server(args),
        }


def shown(job: dict[str, object]) -> dict[str, object]:
    wanted = ("submission_id", "job_id", "status", "message", "metadata", "start_time", "end_time", "driver_exit_code")
    return {key: job.get(key) for key in wanted}


def server(args: argparse.Namespace) -> dict[str, object]:
    """What vLLM's API says: `/health`, the models, and the capacity in `/metrics`; and what its supervisor wrote down."""
    health, said = api(args, "/health", timeout=5)
    answer: dict[str, object] = {"health": health, "health_said": said[:300] if health == 0 else "", "supervised": supervised()}
    if health == 200:
        status, text = api(args, "/v1/models")
        answer["models"] = [each["id"] for each in json.loads(text)["data"]] if status == 200 else []
        answer["models_status"] = status
        answer["capacity"] = capacity(api(args, "/metrics")[1])
    return answer


def capacity(metrics: str) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`, a line for each replica; tokens and concurrency are a replica's and added up."""
    lines = re.findall(r"^vllm:cache_config_info\{(.*)\} ", metrics, re.M)
    each = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
    total = dict(each[0]) if each else {}
    for name, number in (("kv_cache_size_tokens", int), ("kv_cache_max_concurrency", float)):
        try:
            total[name] = str(sum(number(labels[name]) for labels in each)) if len(each) > 1 else total[name]
        except (KeyError, ValueError):
            continue
    return total


def supervised() -> dict[str, object]:
    """What the supervisor of the present server wrote down (`record.py`) and how many seconds ago; empty without one."""
    said, wanted = record.read(record.SERVER) or {}, record.read(record.WANTED) or {}
    if not said or (wanted and wanted.get("id") != said.get("id")):
        return {}
    age = round(max(0.0, time.time() - said.get("written", 0)), 1)
    return {**said, "age": age, "wanted": bool(wanted), **{key: wanted.get(key) for key in ("backend", "metadata")}}


def submit(args: argparse.Namespace) -> object:
    """Submit a Ray job; standard input is `{"argv": […], "submission_id": …, "metadata": {…}}`.

    Its processes carry the job's name in VLAUNCH_JOB, by which `stop` finds them. A server comes with `wanted` (`record.py`):
    its supervisor is what Ray starts then. With `wanted: null` nobody supervises it.
    """
    asked = json.load(sys.stdin)
    name = asked["submission_id"]
    if "wanted" not in asked:
        return post(args, name, asked["argv"], asked["metadata"])
    if not os.path.isdir(record.FOLDER):
        return {"error": f"the head's container has no {record.FOLDER}: run `vlaunch up`, which starts it anew"}
    with record.locked():
        if not asked["wanted"]:
            record.remove(record.WANTED)
            record.remove(record.SERVER)
            return post(args, name, asked["argv"], asked["metadata"])
        # First what is wanted, then the job: a head that dies in between starts it when it is back.
        record.write(record.WANTED, {**asked["wanted"], "job": name})
        record.renew(asked["wanted"])
        answer = post(args, name, supervisor(name), asked["metadata"])
        if "error" in answer:
            record.remove(record.WANTED)
        return answer


def supervisor(job: str, *more: str) -> tuple[str, ...]:
    """Return what Ray starts for a server that is supervised."""
    return ("python3", os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervisor.py"), "run", "--job", job, *more)


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
    """Stop a job; then its processes, if they ignore the polite signal (vLLM does while it waits for a placement group).

    What is stopped is not wanted any more, whatever becomes of the rest.
    """
    if is_wanted(args.job):
        # A head that comes back may have handed it to Ray since, under its next number, or be about to.
        args.job = (record.read(record.WANTED) or {}).get("job") or args.job
        record.remove(record.WANTED)
        with record.locked():
            if is_wanted(args.job):
                args.job = (record.read(record.WANTED) or {}).get("job") or args.job
                record.remove(record.WANTED)
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


def is_wanted(name: str) -> bool:
    """True for the jobs of the server that should run: its supervisor starts it under another number when a head is back."""
    wanted = record.read(record.WANTED)
    return bool(wanted) and re.fullmatch(rf"serve-{re.escape(str(wanted.get('id')))}-\d+", name) is not None


def processes(submission: str) -> list[int]:
    """Pids whose environment names the job: the driver and everything it started on this node."""
    pids = [int(path.split("/")[2]) for path in glob.glob("/proc/[0-9]*")]
    return sorted(pid for pid in pids if belongs(pid, submission))


def belongs(pid: object, submission: str) -> bool:
    """True while a process runs whose environment names the job. Zombies have none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"VLAUNCH_JOB={submission}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def job(args: argparse.Namespace) -> dict[str, object]:
    try:
        answer = ray(args, f"/api/jobs/{args.job}")
    except Refused as error:
        if error.code == 404:
            return {"status": "ABSENT", "message": "no such job"}
        raise
    return answer if isinstance(answer, dict) else {}


def watch(args: argparse.Namespace) -> object:
    """The job's state, what its log gained since `--offset` bytes, and what vLLM's API says.

    A server whose head restarted, or whose supervisor died, goes on under its next name: that one is watched.
    """
    if is_wanted(args.job):
        args.job = (record.read(record.WANTED) or {}).get("job") or args.job
    state = job(args)
    if comes_back(args.job, state.get("status")):
        state = {"status": "PENDING"}
    text, offset = "", args.offset
    try:
        with open(os.path.join(LOGS, f"job-driver-{args.job}.log"), "rb") as file:
            if file.seek(0, os.SEEK_END) < offset:
                offset = 0  # of the log before
            file.seek(offset)
            chunk = file.read(1 << 20)
    except FileNotFoundError:
        chunk = b""
    # Only whole lines: half a line would be judged twice, or not at all. Progress bars end theirs with a carriage return.
    end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
    if end == 0 and (len(chunk) == 1 << 20 or state.get("status") in OVER):
        end = len(chunk)
    text, offset = chunk[:end].decode(errors="replace"), offset + end
    return {"job": shown(state), "log": text, "offset": offset, **server(args)}


def comes_back(name: str, status: object) -> bool:
    """True for a server that is handed to Ray again: Ray forgot its job, or it had answered and its supervisor died.

    A supervisor that gives up, or ends for any other reason of its own, does not want the server any more.
    """
    answered = supervised().get("state") in ("ready", "recovering")
    return is_wanted(name) and (status == "ABSENT" or (status == "FAILED" and answered))


VERBS = {
    "nodes": nodes, "jobs": jobs, "submit": submit, "stop": stop, "watch": watch,
    "server": server, "complete": complete, "chat": chat,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--dashboard", type=int, default=8265)
    parser.add_argument("--api-host", default="127.0.0.1")
    parser.add_argument("--api", type=int, default=8000)
    parser.add_argument("--job", default="")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("--prompt", default="Say hello.")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--peers", nargs="*", default=[])
    args = parser.parse_args()
    try:
        answer = VERBS[args.verb](args)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        said = error.said[:500] if isinstance(error, Refused) else str(error)
        say({"error": said or type(error).__name__})
        return 1
    if answer is not None:
        say(answer)
    return 1 if isinstance(answer, dict) and "error" in answer and args.verb in ("submit", "stop") else 0


if __name__ == "__main__":
    sys.exit(main())
