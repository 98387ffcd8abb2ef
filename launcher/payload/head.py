"""Runs inside the head container: asks Ray's dashboard and vLLM's API over loopback and prints one JSON object.

Standard library only, so that an answer costs a Python start and no `import ray`. Secrets are read from the mounted files.
Usage: head.py nodes|jobs|submit|stop|watch|complete|metrics|chat [--flags]; `submit` and `chat` read JSON on standard input.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request

SECRETS = "/run/vlaunch/secrets"


def secret(name: str) -> str:
    try:
        with open(os.path.join(SECRETS, name), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def request(url: str, token: str, body: object = None, timeout: float = 10.0, method: str | None = None):
    """Open a loopback URL; the token travels in a header."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    # ProxyHandler({}): a proxy in the container's environment must not see loopback requests or their tokens.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, data, headers, method=method), timeout=timeout)


def ray(args: argparse.Namespace, path: str, body: object = None, method: str | None = None) -> object:
    with request(f"http://127.0.0.1:{args.dashboard}{path}", secret("RAY_AUTH_TOKEN"), body, method=method) as answer:
        text = answer.read().decode()
        return json.loads(text) if text else None


def api(args: argparse.Namespace, path: str, body: object = None, timeout: float = 10.0) -> tuple[int, str]:
    """Return status and text of vLLM's answer; 0 when nobody listens."""
    try:
        with request(f"http://{args.api_host}:{args.api}{path}", secret("VLLM_API_KEY"), body, timeout) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def nodes(args: argparse.Namespace) -> object:
    """Ray's node table, and whether the head can open each declared address's raylet port (a one-way firewall shows here)."""
    table = ray(args, "/api/v0/nodes?detail=1&limit=10000")
    return {"nodes": table, "unreachable": [each for each in args.peers if not reachable(each)]}


def reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=3):
            return True
    except OSError:
        return False


def jobs(args: argparse.Namespace) -> object:
    """Jobs that were submitted here, Ray's node table, the actors that hold ranks, and what vLLM's API says."""
    listed = ray(args, "/api/jobs/")
    return {
        "jobs": [job for job in listed if job.get("submission_id")],
        "nodes": ray(args, "/api/v0/nodes?detail=1&limit=10000"),
        "actors": ray(args, "/api/v0/actors?limit=10000&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"),
        **server(args),
    }


def server(args: argparse.Namespace) -> dict[str, object]:
    """What vLLM's API says: `/health`, the models, and the capacity line of `/metrics`."""
    health, said = api(args, "/health", timeout=5)
    answer: dict[str, object] = {"health": health, "health_said": said[:300] if health == 0 else ""}
    if health == 200:
        status, text = api(args, "/v1/models")
        answer["models"] = [each["id"] for each in json.loads(text)["data"]] if status == 200 else []
        answer["models_status"] = status
        _, metrics = api(args, "/metrics")
        found = re.search(r"^vllm:cache_config_info\{(.*)\} ", metrics, re.M)
        answer["capacity"] = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
    return answer


def submit(args: argparse.Namespace) -> object:
    """Submit a Ray job; standard input is `{"argv": […], "submission_id": …, "metadata": {…}, "env": {…}}`."""
    asked = json.load(sys.stdin)
    body = {
        "entrypoint": "exec " + shlex.join(asked["argv"]),
        "submission_id": asked["submission_id"],
        "metadata": asked["metadata"],
    }
    try:
        return ray(args, "/api/jobs/", body)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        if "already exists" in said:
            return {"submission_id": asked["submission_id"], "existing": True}
        raise


def stop(args: argparse.Namespace) -> object:
    """Stop a job; then its processes, if they ignore the polite signal (vLLM does while it waits for a placement group)."""
    try:
        ray(args, f"/api/jobs/{args.job}/stop", {}, "POST")
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
    deadline = time.monotonic() + args.grace
    while time.monotonic() < deadline:
        left = processes(args.job)
        if not left:
            break
        time.sleep(0.5)
    for pid in left if (left := processes(args.job)) else ():
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    return {"killed": left, "job": job(args)}


def processes(submission: str) -> list[int]:
    """Pids whose environment names the job: the driver and everything it started on this node."""
    wanted = f"VLAUNCH_JOB={submission}\0".encode()
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                if wanted in file.read() + b"\0":
                    found.append(int(path.split("/")[2]))
        except OSError:
            continue
    return found


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
    path = f"/tmp/ray/session_latest/logs/job-driver-{args.job}.log"
    text, offset = "", args.offset
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            chunk = file.read(1 << 20)
            # Only whole lines: half a line would be judged twice, or not at all.
            whole = chunk[: chunk.rfind(b"\n") + 1] or (chunk if len(chunk) == 1 << 20 else b"")
            text, offset = whole.decode(errors="replace"), offset + len(whole)
    except FileNotFoundError:
        pass
    return {"job": job(args), "log": text, "offset": offset, **server(args)}


def complete(args: argparse.Namespace) -> object:
    """Ask for a completion and return what came back: the only proof of being ready."""
    status, text = api(args, "/v1/models")
    if status != 200:
        return {"status": status, "error": text[:500]}
    model = json.loads(text)["data"][0]["id"]
    started = time.monotonic()
    ask = {"model": model, "max_tokens": args.max_tokens, "temperature": 0}
    path, body = "/v1/chat/completions", {**ask, "messages": [{"role": "user", "content": args.prompt}]}
    status, text = api(args, path, body, args.timeout)
    if status == 400 and "chat template" in text:
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
    }


def chat(args: argparse.Namespace) -> None:
    """Stream one answer: a line of JSON a piece. Standard input is the list of messages."""
    messages = json.load(sys.stdin)
    status, text = api(args, "/v1/models")
    if status != 200:
        print(json.dumps({"error": f"{status}: {text[:500]}"}), flush=True)
        return
    body = {
        "model": json.loads(text)["data"][0]["id"],
        "messages": messages,
        "max_tokens": args.max_tokens,
        "stream": True,
    }
    url = f"http://{args.api_host}:{args.api}/v1/chat/completions"
    try:
        with request(url, secret("VLLM_API_KEY"), body, args.timeout) as answer:
            for raw in answer:
                line = raw.decode(errors="replace").strip()
                if line.startswith("data: ") and line != "data: [DONE]":
                    piece = json.loads(line[6:])
                    delta = (piece.get("choices") or [{}])[0].get("delta") or {}
                    shown = {"text": delta.get("content") or "", "system_fingerprint": piece.get("system_fingerprint")}
                    print(json.dumps(shown), flush=True)
    except urllib.error.HTTPError as error:
        print(json.dumps({"error": f"{error.code}: {error.read().decode(errors='replace')[:500]}"}), flush=True)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("nodes", "jobs", "submit", "stop", "watch", "complete", "server", "chat"))
    parser.add_argument("--dashboard", type=int, default=8265)
    parser.add_argument("--api-host", default="127.0.0.1")
    parser.add_argument("--api", type=int, default=8000)
    parser.add_argument("--job", default="")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("--prompt", default="Say hello.")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--peers", nargs="*", default=[])
    args = parser.parse_args()
    verb = globals()[args.verb]
    try:
        answer = verb(args)
    except (OSError, urllib.error.URLError, ValueError, KeyError) as error:
        said = error.read().decode(errors="replace")[:500] if isinstance(error, urllib.error.HTTPError) else str(error)
        print(json.dumps({"error": said or type(error).__name__}))
        return 1
    if answer is not None:
        print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
