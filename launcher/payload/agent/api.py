"""How the programs inside a container ask Ray's dashboard and vLLM's API on this node, and what
vLLM counts.

Standard library only. Secrets are read from the mounted files, and travel in headers.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from .task import Form

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
    replica that is to answer, by its place among those behind this API.

    Not by urllib.request, which takes longer to import than all the rest, and sends what it asks to
    a proxy. Raises Refused.
    """
    form = body if isinstance(body, Form) else Form(json.dumps(body).encode(), "application/json")
    data = None if body is None else form.data
    headers = {"Content-Type": form.kind, "Connection": "close"}
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

    `engines` is how many replicas are behind the API, `first` the number of the first of them among
    all of the server's, by which vLLM counts.
    """

    api_host: str = "127.0.0.1"
    api: int = 8000
    dashboard: int = 8265
    engines: int = 1
    first: int = 0
    prompt: str = "Say hello."
    max_tokens: int = 1
    timeout: float = 60.0


@dataclass(frozen=True)
class Counters:
    """What vLLM counts.

    `progress` is equal exactly when nothing has moved; aborted requests, as of canaries, are no
    progress.

    `tokens` were generated, `good` requests succeeded, and `failed` were answered with 5xx, all
    since it started. `held` is what its KV cache holds, as `capacity` reads it.
    """

    progress: tuple[str, ...]
    running: int
    waiting: int
    tokens: float
    good: float
    failed: float
    held: Mapping[str, str] = field(default_factory=dict)

    def of(self, replica: int | None) -> tuple[str, ...]:
        """Return the progress of one replica; of all of them for None."""
        return tuple(
            line for line in self.progress if replica is None or f'engine="{replica}"' in line
        )


_HELD = ("kv_cache_size_tokens", "kv_cache_max_concurrency", "num_gpu_blocks", "block_size")
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
            held={name: label for name, label in capacity(text).items() if name in _HELD},
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


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)
