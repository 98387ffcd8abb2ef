"""What the programs inside a container ask: Ray's dashboard and vLLM's API on this node, and
completions of vLLM.

Standard library only. Secrets are read from the mounted files, and travel in headers.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# seconds for Ray's dashboard, which gets its turn late on a head whose engines have every core
PATIENCE = 25.0
SECRETS = os.environ.get("VLAUNCH_SECRETS", "/run/vlaunch/secrets")


def secret(name: str) -> str:
    try:
        with open(os.path.join(SECRETS, name), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


class Refused(OSError):
    """An answer that is an error: its HTTP status and what it says."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"HTTP {code}: {said}")
        self.code, self.said = code, said


def request(
    host: str,
    port: int,
    path: str,
    token: str,
    body: object = None,
    timeout: float = 10.0,
    method: str | None = None,
    engine: int | None = None,
):
    """Ask for a path of a server on this host; the token travels in a header, and so does the
    replica that is to answer.

    Not by urllib.request, which takes longer to import than all the rest, and sends what it asks to
    a proxy. Raises Refused.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if engine is not None:
        headers["X-data-parallel-rank"] = str(engine)  # vllm/entrypoints/generate/base/serving.py
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
        answer = connection.getresponse()
        if answer.status >= 300:
            raise Refused(answer.status, answer.read().decode(errors="replace"))
    except BaseException:
        connection.close()
        raise
    return answer


def ray(
    args: Where,
    path: str,
    body: object = None,
    method: str | None = None,
    timeout: float = PATIENCE,
) -> object:
    with request(
        "127.0.0.1", args.dashboard, path, secret("RAY_AUTH_TOKEN"), body, timeout, method
    ) as answer:
        text = answer.read().decode()
        return json.loads(text) if text else None


def api(
    args: Where, path: str, body: object = None, timeout: float = 10.0, engine: int | None = None
) -> tuple[int, str]:
    """Return status and text of vLLM's answer; 0 when nobody listens or it takes too long."""
    try:
        with request(
            args.api_host, args.api, path, secret("VLLM_API_KEY"), body, timeout, engine=engine
        ) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except Refused as error:
        return error.code, error.said
    except OSError as error:
        return 0, str(error)


@dataclass(frozen=True)
class Where:
    """Where a server's API and Ray's dashboard are, and what to ask for: the command line of
    `head.py` has the same names.
    """

    api_host: str = "127.0.0.1"
    api: int = 8000
    dashboard: int = 8265
    engines: int = 1
    prompt: str = "Say hello."
    max_tokens: int = 1
    timeout: float = 60.0


@dataclass(frozen=True)
class Counters:
    """What vLLM counts.

    `progress` is equal exactly when nothing has moved; aborted requests, as of canaries, are no
    progress.

    `tokens` were generated, `good` requests succeeded, and `failed` were answered with 5xx, all
    since it started.
    """

    progress: tuple[str, ...]
    running: int
    waiting: int
    tokens: float
    good: float
    failed: float

    def of(self, replica: int | None) -> tuple[str, ...]:
        """Return the progress of one replica; of all of them for None."""
        return tuple(
            line for line in self.progress if replica is None or f'engine="{replica}"' in line
        )


_PROGRESS = re.compile(
    r"^vllm:(?:generation_tokens_total|prompt_tokens_total"
    r"|iteration_tokens_total_(?:count|sum)|num_preemptions_total|"
    r"kv_cache_usage_perc|request_success_total)(?:\{[^\n]*\})? \S+$",
    re.M,
)


def counters(where: Where, timeout: float = 5.0) -> Counters | None:
    """Return what vLLM counts; None when it does not say in time, or counts nothing
    (`--disable-log-stats`).
    """
    status, text = api(where, "/metrics", timeout=timeout)
    return read_counters(text) if status == 200 else None


def read_counters(text: str) -> Counters | None:
    """Read the text of `/metrics`."""
    lines = [line for line in _PROGRESS.findall(text) if 'finished_reason="abort"' not in line]
    if not lines:
        return None

    def total(name: str, labels: str = "") -> float:
        found = re.findall(rf"^{name}(?:\{{([^\n]*)\}})? (\S+)$", text, re.M)
        return sum(float(number) for having, number in found if labels in having)

    try:
        return Counters(
            progress=tuple(lines),
            running=int(total("vllm:num_requests_running")),
            waiting=int(total("vllm:num_requests_waiting")),
            tokens=total("vllm:generation_tokens_total"),
            good=sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith("vllm:request_success_total")
            ),
            failed=total("http_requests_total", 'status="5xx"'),
        )
    except (ValueError, OverflowError):
        return None


def capacity(metrics: str) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`, a line for each replica; tokens and concurrency are a
    replica's and added up.
    """
    lines = re.findall(r"^vllm:cache_config_info\{(.*)\} ", metrics, re.M)
    each = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
    total = dict(each[0]) if each else {}
    for name, number in (("kv_cache_size_tokens", int), ("kv_cache_max_concurrency", float)):
        try:
            total[name] = (
                str(sum(number(labels[name]) for labels in each)) if len(each) > 1 else total[name]
            )
        except (KeyError, ValueError):
            continue
    return total


def until(true, seconds: float) -> None:
    """Wait until a condition holds, or for so many seconds."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.3)


def finished(args: Where) -> dict[int, float]:
    """How many requests each replica has finished; empty where vLLM does not count."""
    counts: dict[int, float] = {}
    for labels, number in re.findall(
        r"^vllm:request_success_total\{(.*)\} (\S+)", api(args, "/metrics")[1], re.M
    ):
        found = re.search(r'\bengine="(\d+)"', labels)
        if found:
            counts[int(found[1])] = counts.get(int(found[1]), 0.0) + float(number)
    return counts


def complete(args: Where) -> object:
    """Ask for a completion and return what came back: the only proof of being ready.

    Of several replicas, each is asked.

    Where none comes back in time, it is said whether anything moved meanwhile: a server that is
    busy is not silent.
    """
    first, began = counters(args, 2.0), time.monotonic()
    status, text = api(args, "/v1/models", timeout=min(10.0, args.timeout))
    if status != 200:
        return {"status": status, "error": text[:500], **({"moved": None} if status == 0 else {})}
    model = json.loads(text)["data"][0]["id"]
    before = finished(args) if args.engines > 1 else {}
    started = time.monotonic()
    path, body, status, text = prompt(args, model)
    if status != 200:
        meanwhile = (
            moved(first, counters(args, 2.0), time.monotonic() - began) if status == 0 else {}
        )
        return {"status": status, "error": text[:1000], "path": path, **meanwhile}
    answer = json.loads(text)
    said: dict[str, object] = {
        "status": status,
        "path": path,
        "model": model,
        "text": content(answer["choices"][0], "message"),
        "tokens": (answer.get("usage") or {}).get("completion_tokens", 0),
        "system_fingerprint": answer.get("system_fingerprint") or "",
        "seconds": round(time.monotonic() - started, 3),
    }
    if args.engines > 1:
        said["replicas"] = replicas(args, path, body, before)
    return said


def prompt(args: Where, model: str) -> tuple[str, object, int, str]:
    """Ask a model to answer the prompt: in a chat, or by a plain completion where it cannot chat.

    Return the path and the body that were sent last, and status and text of the answer.
    """
    ask = {"model": model, "max_tokens": args.max_tokens, "temperature": 0}
    path, body = (
        "/v1/chat/completions",
        {**ask, "messages": [{"role": "user", "content": args.prompt}]},
    )
    status, text = api(args, path, body, args.timeout)
    if no_chat(status, text):
        path, body = "/v1/completions", {**ask, "prompt": args.prompt}
        status, text = api(args, path, body, args.timeout)
    return path, body, status, text


def content(choice: dict, of_chat: str) -> str:
    """Return the text of a choice: of a plain completion, or of a chat's `message` or `delta`."""
    return choice.get("text") or (choice.get(of_chat) or {}).get("content") or ""


def moved(first: Counters | None, last: Counters | None, seconds: float) -> dict[str, object]:
    """Say whether a server did anything between two looks (None where nobody knows), and how much
    it has to do.
    """
    if first is None or last is None:
        return {"moved": None}
    rate = round(max(0.0, last.tokens - first.tokens) / max(seconds, 0.001), 1)
    load = {"running": last.running, "waiting": last.waiting, "tokens_per_s": rate}
    return {"moved": first.progress != last.progress, "load": load}


def replicas(
    args: Where, path: str, body: object, before: dict[int, float]
) -> list[dict[str, object]]:
    """Ask every replica at once; one has answered when a request came back and its own count of
    finished ones has grown.
    """
    found: list[dict[str, object]] = [{} for _ in range(args.engines)]

    def ask(number: int) -> None:
        started = time.monotonic()
        status, text = api(args, path, body, args.timeout, number)
        seconds = round(time.monotonic() - started, 3)
        found[number] = {
            "status": status,
            "seconds": seconds,
            "error": "" if status == 200 else text[:500],
        }

    asked = [threading.Thread(target=ask, args=(number,)) for number in range(args.engines)]
    for each in asked:
        each.start()
    for each in asked:
        each.join()
    if not before:  # vLLM counts nothing (`--disable-log-stats`): the answers have to do.
        return [{**each, "answered": each["status"] == 200} for each in found]
    # the one before these went to some replica too
    came = 1 + sum(each["status"] == 200 for each in found)
    grown: dict[int, float] = {}

    def counted() -> bool:
        grown.update(
            {number: count - before.get(number, 0.0) for number, count in finished(args).items()}
        )
        return (
            all(grown.get(number, 0) > 0 for number in range(args.engines))
            or sum(grown.values()) >= came
        )

    until(counted, 5)  # Counts follow the answers a moment later.
    return [
        {**each, "answered": each["status"] == 200 and grown.get(number, 0) > 0}
        for number, each in enumerate(found)
    ]


def no_chat(status: int, said: str) -> bool:
    """True when a model cannot chat: base models have no chat template."""
    return status in (400, 404) and ("chat template" in said or "does not support Chat" in said)


def chat(args: Where) -> None:
    """Stream one answer: a line of JSON a piece. The list of messages is a line of standard
    input.
    """
    messages = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_input, daemon=True).start()
    status, text = api(args, "/v1/models")
    if status != 200:
        say({"error": text[:500], "status": status})
        return
    ask = {
        "model": json.loads(text)["data"][0]["id"],
        "max_tokens": args.max_tokens,
        "stream": True,
    }
    error = stream(args, "/v1/chat/completions", {**ask, "messages": messages})
    if error is not None and no_chat(error["status"], error["error"]):
        error = stream(args, "/v1/completions", {**ask, "prompt": messages[-1]["content"]})
    if error is not None:
        say(error)


def end_with_input() -> None:
    """End this process when its standard input ends: nobody waits for the answer any more, and vLLM
    must not go on with it.
    """
    # Not through sys.stdin: a thread that waits inside its buffer breaks the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(1)


def stream(args: Where, path: str, body: object) -> dict[str, object] | None:
    """Print each piece of an answer as it comes; return the error, if there is one."""
    try:
        with request(
            args.api_host, args.api, path, secret("VLLM_API_KEY"), body, args.timeout
        ) as answer:
            for piece in pieces(answer):
                if "error" in piece:
                    return {"status": 500, "error": json.dumps(piece["error"])[:500]}
                choice = (piece.get("choices") or [{}])[0]
                fingerprint = piece.get("system_fingerprint") or ""
                say({"text": content(choice, "delta"), "system_fingerprint": fingerprint})
    except Refused as error:
        return {"status": error.code, "error": error.said[:500]}
    except OSError as error:
        return {"status": 0, "error": str(error)}
    return None


def pieces(answer: Iterable[bytes]) -> Iterator[dict]:
    """Yield the pieces of a streamed answer (server-sent events) as they come."""
    for raw in answer:
        line = raw.decode(errors="replace").strip()
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)
