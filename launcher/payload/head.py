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
import threading
import time
import urllib.error
import urllib.request

SECRETS = os.environ.get("VLAUNCH_SECRETS", "/run/vlaunch/secrets")
LOGS = os.environ.get("VLAUNCH_RAY_LOGS", "/tmp/ray/session_latest/logs")
OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")


def secret(name: str) -> str:
    try:
        with open(os.path.join(SECRETS, name), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def request(
    url: str, token: str, body: object = None, timeout: float = 10.0, method: str | None = None, engine: int | None = None
):
    """Open a loopback URL; the token travels in a header, and so does the replica that is to answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    if engine is not None:
        headers["X-data-parallel-rank"] = str(engine)  # vllm/entrypoints/generate/base/serving.py
    # ProxyHandler({}): a proxy in the container's environment must not see loopback requests or their tokens.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, data, headers, method=method), timeout=timeout)


def ray(args: argparse.Namespace, path: str, body: object = None, method: str | None = None) -> object:
    with request(f"http://127.0.0.1:{args.dashboard}{path}", secret("RAY_AUTH_TOKEN"), body, method=method) as answer:
        text = answer.read().decode()
        return json.loads(text) if text else None


def api_url(args: argparse.Namespace, path: str) -> str:
    host = f"[{args.api_host}]" if ":" in args.api_host else args.api_host
    return f"http://{host}:{args.api}{path}"


def api(
    args: argparse.Namespace, path: str, body: object = None, timeout: float = 10.0, engine: int | None = None
) -> tuple[int, str]:
    """Return status and text of vLLM's answer; 0 when nobody listens or it takes too long."""
    try:
        with request(api_url(args, path), secret("VLLM_API_KEY"), body, timeout, engine=engine) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


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
    except (urllib.error.HTTPError, KeyError, TypeError, ValueError):
        return ""


def reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3):
            return True
    except OSError:
        return False


def jobs(args: argparse.Namespace) -> object:
    """Submitted jobs, Ray's node table, living actors, placement groups, and what vLLM's API says."""
    listed = ray(args, "/api/jobs/")
    alive = "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
    return {
        "jobs": [shown(job) for job in listed if job.get("submission_id")],
        "nodes": ray(args, "/api/v0/nodes?detail=1&limit=10000"),
        "actors": ray(args, f"/api/v0/actors?detail=1&limit=10000&{alive}"),
        "groups": ray(args, "/api/v0/placement_groups?detail=1&limit=10000"),
        "listening": reachable(f"{args.api_host}:{args.api}"),
        **server(args),
    }


def shown(job: dict[str, object]) -> dict[str, object]:
    wanted = ("submission_id", "job_id", "status", "message", "metadata", "start_time", "end_time", "driver_exit_code")
    return {key: job.get(key) for key in wanted}


def server(args: argparse.Namespace) -> dict[str, object]:
    """What vLLM's API says: `/health`, the models, and the capacity in `/metrics`."""
    health, said = api(args, "/health", timeout=5)
    answer: dict[str, object] = {"health": health, "health_said": said[:300] if health == 0 else ""}
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


def finished(args: argparse.Namespace) -> dict[int, float]:
    """How many requests each replica has finished; empty where vLLM does not count."""
    counts: dict[int, float] = {}
    for labels, number in re.findall(r"^vllm:request_success_total\{(.*)\} (\S+)", api(args, "/metrics")[1], re.M):
        found = re.search(r'\bengine="(\d+)"', labels)
        if found:
            counts[int(found[1])] = counts.get(int(found[1]), 0.0) + float(number)
    return counts


def submit(args: argparse.Namespace) -> object:
    """Submit a Ray job; standard input is `{"argv": […], "submission_id": …, "metadata": {…}}`.

    Its processes carry the job's name in VLAUNCH_JOB, by which `stop` finds them.
    """
    asked = json.load(sys.stdin)
    name = asked["submission_id"]
    body = {
        "entrypoint": shlex.join(("exec", "env", f"VLAUNCH_JOB={name}", *asked["argv"])),
        "submission_id": name,
        "metadata": asked["metadata"],
    }
    try:
        return ray(args, "/api/jobs/", body)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        if "already exists" in said:
            return {"submission_id": name, "existing": True}
        return {"error": f"{error.code}: {said[-500:]}"}


def stop(args: argparse.Namespace) -> object:
    """Stop a job; then its processes, if they ignore the polite signal (vLLM does while it waits for a placement group)."""
    try:
        ray(args, f"/api/jobs/{args.job}/stop", {}, "POST")
    except urllib.error.HTTPError as error:
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


def until(true, seconds: float) -> None:
    """Wait until a condition holds, or for so many seconds."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.3)


def processes(submission: str) -> list[int]:
    """Pids whose environment names the job: the driver and everything it started on this node. Zombies have none."""
    wanted = f"VLAUNCH_JOB={submission}".encode()
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(path.split("/")[2]))
        except OSError:
            continue
    return sorted(found)


def job(args: argparse.Namespace) -> dict[str, object]:
    try:
        answer = ray(args, f"/api/jobs/{args.job}")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return {"status": "ABSENT", "message": "no such job"}
        raise
    return answer if isinstance(answer, dict) else {}


def watch(args: argparse.Namespace) -> object:
    """The job's state, what its log gained since `--offset` bytes, and what vLLM's API says."""
    state = job(args)
    text, offset = "", args.offset
    try:
        with open(os.path.join(LOGS, f"job-driver-{args.job}.log"), "rb") as file:
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


def complete(args: argparse.Namespace) -> object:
    """Ask for a completion and return what came back: the only proof of being ready. Of several replicas, each is asked."""
    status, text = api(args, "/v1/models")
    if status != 200:
        return {"status": status, "error": text[:500]}
    model = json.loads(text)["data"][0]["id"]
    before = finished(args) if args.engines > 1 else {}
    started = time.monotonic()
    ask = {"model": model, "max_tokens": args.max_tokens, "temperature": 0}
    path, body = "/v1/chat/completions", {**ask, "messages": [{"role": "user", "content": args.prompt}]}
    status, text = api(args, path, body, args.timeout)
    if no_chat(status, text):
        path, body = "/v1/completions", {**ask, "prompt": args.prompt}
        status, text = api(args, path, body, args.timeout)
    if status != 200:
        return {"status": status, "error": text[:1000], "path": path}
    answer = json.loads(text)
    choice = answer["choices"][0]
    return {
        "status": status,
        "path": path,
        "model": model,
        "text": choice.get("text") or (choice.get("message") or {}).get("content") or "",
        "tokens": (answer.get("usage") or {}).get("completion_tokens", 0),
        "system_fingerprint": answer.get("system_fingerprint") or "",
        "seconds": round(time.monotonic() - started, 3),
        **({"replicas": replicas(args, path, body, before)} if args.engines > 1 else {}),
    }


def replicas(args: argparse.Namespace, path: str, body: object, before: dict[int, float]) -> list[dict[str, object]]:
    """Ask every replica at once; one has answered when a request came back and its own count of finished ones has grown."""
    found: list[dict[str, object]] = [{} for _ in range(args.engines)]

    def ask(number: int) -> None:
        started = time.monotonic()
        status, text = api(args, path, body, args.timeout, number)
        seconds = round(time.monotonic() - started, 3)
        found[number] = {"status": status, "seconds": seconds, "error": "" if status == 200 else text[:500]}

    asked = [threading.Thread(target=ask, args=(number,)) for number in range(args.engines)]
    for each in asked:
        each.start()
    for each in asked:
        each.join()
    if not before:  # vLLM counts nothing (`--disable-log-stats`): the answers have to do.
        return [{**each, "answered": each["status"] == 200} for each in found]
    came = 1 + sum(each["status"] == 200 for each in found)  # the one before these went to some replica too
    grown: dict[int, float] = {}

    def counted() -> bool:
        grown.update({number: count - before.get(number, 0.0) for number, count in finished(args).items()})
        return all(grown.get(number, 0) > 0 for number in range(args.engines)) or sum(grown.values()) >= came

    until(counted, 5)  # Counts follow the answers a moment later.
    return [{**each, "answered": each["status"] == 200 and grown.get(number, 0) > 0} for number, each in enumerate(found)]


def no_chat(status: int, said: str) -> bool:
    """True when a model cannot chat: base models have no chat template."""
    return status in (400, 404) and ("chat template" in said or "does not support Chat" in said)


def chat(args: argparse.Namespace) -> None:
    """Stream one answer: a line of JSON a piece. The list of messages is a line of standard input."""
    messages = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_input, daemon=True).start()
    status, text = api(args, "/v1/models")
    if status != 200:
        say({"error": text[:500], "status": status})
        return
    ask = {"model": json.loads(text)["data"][0]["id"], "max_tokens": args.max_tokens, "stream": True}
    error = stream(args, "/v1/chat/completions", {**ask, "messages": messages})
    if error is not None and no_chat(error["status"], error["error"]):
        error = stream(args, "/v1/completions", {**ask, "prompt": messages[-1]["content"]})
    if error is not None:
        say(error)


def end_with_input() -> None:
    """End this process when its standard input ends: nobody waits for the answer any more, and vLLM must not go on with it."""
    # Not through sys.stdin: a thread that waits inside its buffer breaks the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(1)


def stream(args: argparse.Namespace, path: str, body: object) -> dict[str, object] | None:
    """Print each piece of an answer as it comes; return the error, if there is one."""
    try:
        with request(api_url(args, path), secret("VLLM_API_KEY"), body, args.timeout) as answer:
            for raw in answer:
                line = raw.decode(errors="replace").strip()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    return {"status": 500, "error": json.dumps(piece["error"])[:500]}
                choice = (piece.get("choices") or [{}])[0]
                said = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                say({"text": said, "system_fingerprint": piece.get("system_fingerprint") or ""})
    except urllib.error.HTTPError as error:
        return {"status": error.code, "error": error.read().decode(errors="replace")[:500]}
    except OSError as error:
        return {"status": 0, "error": str(error)}
    return None


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


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
        said = error.read().decode(errors="replace")[:500] if isinstance(error, urllib.error.HTTPError) else str(error)
        say({"error": said or type(error).__name__})
        return 1
    if answer is not None:
        say(answer)
    return 1 if isinstance(answer, dict) and "error" in answer and args.verb in ("submit", "stop") else 0


if __name__ == "__main__":
    sys.exit(main())
