"""Answers the launcher's questions inside a container: the servers' files, Ray's dashboard, and
vLLM's API on this node.

Standard library only, so that an answer costs a Python start and no `import ray`. Secrets are read
from the mounted files. Prints one JSON object. `submit` and `chat` read JSON on standard input
(`chat` one line of it; the end of its input ends it).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from . import process, state
from .answer import complete
from .api import Refused, Where, api, capacity, ray, read_counters, say, until
from .talk import chat

OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
_AGAIN = 0.25  # seconds between two looks whether an API listens
_CHUNK = 1 << 20  # bytes of a log that are told at once
# What is told of `/metrics` (0.32, v1/metrics/loggers.py): whoever asks does so every two seconds.
_COUNTED = re.compile(
    r"^(?:vllm:(?:num_requests_(?:running|waiting)|kv_cache_usage_perc"
    r"|(?:generation|prompt)_tokens_total"
    r"|prefix_cache_(?:queries|hits)_total|num_preemptions_total|request_success_total"
    r"|(?:time_to_first_token|inter_token_latency)_seconds_bucket)|http_requests_total)"
    r"(?:\{[^\n]*\})? \S+$",
    re.M,
)
# verbs whose error is the exit code, too
_ENDS = ("submit", "stop")


def nodes(args: argparse.Namespace) -> object:
    """Ray's node table, `ray status`, and whether the head can open each peer's raylet port (a
    one-way firewall shows here).
    """
    table = ray(args, "/api/v0/nodes?detail=1&limit=10000")
    return {
        "nodes": table,
        "status": status(args),
        "unreachable": [each for each in args.peers if not reachable(each)],
        **servers(args),
    }


def status(args: argparse.Namespace) -> str:
    """The text of `ray status`, which the dashboard formats too: no `import ray`; empty when this
    Ray does not.
    """
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
    """Submitted jobs, Ray's tables, the servers, whether the API's port is open, and which peers'
    raylets do not listen.

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
        asked = {}
        if not args.no_ray:
            asked["jobs"] = pool.submit(submitted, args)
            asked |= {name: pool.submit(ray, args, path) for name, path in tables.items()}
        return {
            **{name: answer.result() for name, answer in asked.items()},
            "listening": reachable(f"{args.api_host}:{args.api}"),
            "unreachable": [each for each, knock in knocks.items() if not knock.result()],
            **servers(args),
        }


def submitted(args: argparse.Namespace) -> list[dict[str, object]]:
    """The jobs that somebody submitted; Ray also lists what is connected to it otherwise."""
    return [shown(job) for job in ray(args, "/api/jobs/") if job.get("submission_id")]


def shown(job: dict[str, object]) -> dict[str, object]:
    wanted = ("submission_id", "job_id", "status", "message", "metadata", "driver_exit_code")
    return {key: job.get(key) for key in wanted}


def servers(_: argparse.Namespace) -> dict[str, object]:
    """What is wanted and how it is, as the files say, and when each node's agent was heard last;
    times are seconds ago.
    """
    now, said = time.time(), state.read(os.path.join(state.FOLDER, state.MEMBERS))
    age = since(said, now)
    return {
        "servers": [kept(name, now) for name in state.names()],
        "members": {}
        if age is None
        else {node: round(silent + age, 1) for node, silent in said["members"].items()},
        "agent": age,
    }


def since(said: object, now: float) -> float | None:
    """How many seconds ago a record was written; None where it is none."""
    written = said.get("written") if isinstance(said, dict) else None
    return round(max(0.0, now - written), 1) if isinstance(written, (int, float)) else None


def kept(name: str, now: float) -> dict[str, object]:
    """One server's files."""
    seen = state.read(state.path(name, state.OBSERVED))
    return {
        "name": name,
        "desired": state.read(state.path(name, state.DESIRED)),
        "observed": seen,
        "age": since(seen, now),
    }


def server(args: argparse.Namespace) -> dict[str, object]:
    """What vLLM's API says: `/health`, the models, the capacity and the load in `/metrics`."""
    health, _ = api(args, "/health", timeout=3)
    answer: dict[str, object] = {"health": health}
    if health == 200:
        status, text = api(args, "/v1/models")
        answer["models"] = (
            [each["id"] for each in json.loads(text)["data"]] if status == 200 else []
        )
        metrics = api(args, "/metrics")[1]
        answer["capacity"] = capacity(metrics)
        if found := read_counters(metrics):
            answer["load"] = {
                "running": found.running,
                "waiting": found.waiting,
                "tokens_per_s": None,
            }
    return answer


def metrics(args: argparse.Namespace) -> object:
    """What each API of `--apis` (`host:port`) on this node counts, all asked at once, and on the
    head what `servers` says.
    """

    def count(api_of: str) -> dict[str, object]:
        host, _, port = api_of.rpartition(":")
        status, text = api(
            Where(api_host=host.strip("[]"), api=int(port)), "/metrics", timeout=args.timeout
        )
        found = _COUNTED.findall(text) if status == 200 else []
        return {"status": status, "text": "\n".join(found), "error": "" if found else text[:300]}

    with ThreadPoolExecutor(16) as pool:
        counted = dict(zip(args.apis, pool.map(count, args.apis), strict=True))
    return {"apis": counted, **servers(args)}


def watch(args: argparse.Namespace) -> object:
    """What a server's log on this node gained since `--offset` bytes, of its present engine only,
    what vLLM's API says, and on the head what `servers` says.

    While an engine starts, `--patience` seconds are waited until its API listens, or its log tells
    of an end: whoever asks again and again takes the cores that small nodes need to load.
    """
    deadline = time.monotonic() + args.patience
    text, offset, anew = log(state.path(args.name, state.LOG), args.offset)
    while time.monotonic() < deadline and not reachable(f"{args.api_host}:{args.api}"):
        time.sleep(_AGAIN)
        more, offset, newer = log(state.path(args.name, state.LOG), offset)
        text, anew = more if newer else text + more, anew or newer
        if newer or process.ENDS in more:
            break
    return {"log": text, "offset": offset, "anew": anew, **server(args), **servers(args)}


def log(path: str, offset: int) -> tuple[str, int, bool]:
    """Return the whole lines of a log since an offset, where they end, and whether another engine
    has begun among them.
    """
    try:
        with open(path, "rb") as file:
            if file.seek(0, os.SEEK_END) < offset:
                offset = 0  # of the log before
            file.seek(offset)
            chunk = file.read(_CHUNK)
    except OSError:
        return "", offset, False
    # Half a line would be judged twice, or not at all. Progress bars end theirs with a carriage
    # return.
    end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1 or (
        len(chunk) if len(chunk) == _CHUNK else 0
    )
    text, offset = chunk[:end].decode(errors="replace"), offset + end
    _, begins, rest = text.rpartition(process.BEGINS)
    return (rest.partition("\n")[2] if begins else text), offset, bool(begins)


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
    "nodes": nodes,
    "jobs": jobs,
    "submit": submit,
    "stop": stop,
    "servers": servers,
    "watch": watch,
    "server": server,
    "metrics": metrics,
    "complete": complete,
    "chat": chat,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--dashboard", type=int, default=8265)
    parser.add_argument("--api-host", default="127.0.0.1")
    parser.add_argument("--api", type=int, default=8000)
    parser.add_argument("--job", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("--task", default="")
    parser.add_argument("--prompt", default="Say hello.")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--apis", nargs="*", default=[])
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
