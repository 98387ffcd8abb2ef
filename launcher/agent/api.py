"""A client of Ray's dashboard and vLLM's API on this node, and vLLM's counters.

Standard library only, for `chat.py`, which must start fast. Secrets are read from the mounted
files, and travel in headers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from . import records
from .records import Amount, Count
from .task import Form

# seconds for Ray's dashboard, which gets its turn late on a head whose engines have every core
PATIENCE = 25.0
SECRETS = os.environ.get("VLAUNCH_SECRETS", "/run/vlaunch/secrets")


class Refused(OSError):
    """An answer that is an error: its HTTP status and its text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"HTTP {code}: {text}")
        self.code, self.text = code, text


@dataclass(frozen=True)
class Where:
    """The address of a server's API and the port of Ray's dashboard, and what to ask for.

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


def request(
    host: str,
    port: int,
    path: str,
    secret: str,
    body: object = None,
    timeout: float = 10.0,
    engine: int | None = None,
) -> http.client.HTTPResponse:
    """Send a GET, or a POST of a body, to a server on this node; a secret travels in a header, and
    so does the replica that is to answer, by its place among those behind this API.

    Not by urllib.request, which takes longer to import than all the rest, and sends requests to a
    proxy. Raises Refused.
    """
    form = body if isinstance(body, Form) else Form(json.dumps(body).encode(), "application/json")
    headers = {"Content-Type": form.kind, "Connection": "close"}
    with (
        contextlib.suppress(OSError),
        open(os.path.join(SECRETS, secret), encoding="utf-8") as file,
    ):
        if token := file.read().strip():
            headers["Authorization"] = f"Bearer {token}"
    if engine is not None:
        headers["X-data-parallel-rank"] = str(engine)  # vllm/entrypoints/generate/base/serving.py
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        method, data = ("GET", None) if body is None else ("POST", form.data)
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        if answer.status >= 300:
            raise Refused(answer.status, answer.read().decode(errors="replace"))
    except BaseException:
        connection.close()
        raise
    return answer


def ray(target: Where, path: str, body: object = None, timeout: float = PATIENCE) -> object:
    """Return the JSON of Ray's dashboard; None for an empty answer."""
    port, secret = target.dashboard, "RAY_AUTH_TOKEN"
    with request("127.0.0.1", port, path, secret, body, timeout) as answer:
        text = answer.read().decode()
        return json.loads(text) if text else None


def rows(
    target: Where, table: str, timeout: float = PATIENCE, **filters: str
) -> list[dict[str, Any]]:
    """Return the rows of one of Ray's tables; raises ValueError for any other answer."""
    query_filters = "".join(
        f"&filter_keys={key}&filter_predicates=%3D&filter_values={value}"
        for key, value in filters.items()
    )
    answer: Any = ray(
        target, f"/api/v0/{table}?detail=1&limit=10000{query_filters}", timeout=timeout
    )
    try:
        listed: list[dict[str, Any]] = answer["data"]["result"]["result"]
    except (KeyError, TypeError):
        raise ValueError(f"Ray's list of {table} cannot be read: {str(answer)[:200]}") from None
    return listed


def api(
    target: Where, path: str, body: object = None, timeout: float = 10.0, engine: int | None = None
) -> tuple[int, str]:
    """Return status and text of vLLM's answer; 0 when nothing listens or it takes too long."""
    host, port, secret = target.api_host, target.api, "VLLM_API_KEY"
    try:
        with request(host, port, path, secret, body, timeout, engine) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except Refused as error:
        return error.code, error.text
    except OSError as error:
        return 0, str(error)


def reachable(host: str, port: int) -> bool:
    """True when a port accepts a connection."""
    try:
        with socket.create_connection((host, port), timeout=3):
            return True
    except OSError:
        return False


def until(condition: Callable[[], object], seconds: float) -> None:
    """Wait until a condition holds, or for so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.3)


@dataclass(frozen=True)
class Counters:
    """vLLM's counters.

    `progress` is equal exactly when nothing has moved; aborted requests, as of canaries, are no
    progress. `tokens` were generated, and `failed` requests were answered with 5xx, since the
    engine started. `held` is what its KV cache holds, as `capacity` reads it.
    """

    progress: tuple[str, ...]
    running: Count
    waiting: Count
    tokens: Amount
    failed: Amount
    held: Mapping[str, str] = field(default_factory=dict)

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


def counters(target: Where, timeout: float = 5.0) -> Counters | None:
    """Return vLLM's counters; None when they do not come in time, or there are none
    (`--disable-log-stats`).
    """
    status, text = api(target, "/metrics", timeout=timeout)
    return read_counters(text) if status == 200 else None


def read_counters(text: str) -> Counters | None:
    """Read the text of `/metrics`."""
    lines = [line for line in _PROGRESS.findall(text) if 'finished_reason="abort"' not in line]
    if not lines:
        return None

    def total(name: str) -> float:
        return sum(number for _, number in samples(text, name))

    try:
        parsed = Counters(
            progress=tuple(lines),
            running=int(total("vllm:num_requests_running")),
            waiting=int(total("vllm:num_requests_waiting")),
            tokens=total("vllm:generation_tokens_total"),
            failed=sum(
                number
                for labels, number in samples(text, "http_requests_total")
                if labels.get("status") == "5xx"
            ),
            held=capacity(text),
        )
        return records.read(Counters, asdict(parsed), "answer of vLLM")
    except (ValueError, OverflowError):
        return None


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of each sample of a metric; raises ValueError for no number."""
    rows = re.findall(rf"^{name}(?:\{{([^\n]*)\}})? (\S+)$", text, re.M)
    return [(dict(re.findall(r'(\w+)="([^"]*)"', row)), float(number)) for row, number in rows]


def capacity(text: str) -> dict[str, str]:
    """Return what the KV caches hold, of the labels of `vllm:cache_config_info`; tokens and
    concurrency are a replica's and added up.
    """
    replicas = [labels for labels, _ in samples(text, "vllm:cache_config_info")]
    names = ("kv_cache_size_tokens", "kv_cache_max_concurrency", "num_gpu_blocks", "block_size")
    sizes = {name: labels[name] for labels in replicas[:1] for name in names if name in labels}
    for name, number in (("kv_cache_size_tokens", int), ("kv_cache_max_concurrency", float)):
        with contextlib.suppress(KeyError, ValueError):
            if len(replicas) > 1:
                sizes[name] = str(sum(number(labels[name]) for labels in replicas))
    return sizes
