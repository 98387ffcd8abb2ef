"""Client of Ray's dashboard and vLLM's API on this node, and vLLM's counters.

Standard library only, for `chat.py`, which must start fast. Secrets are read from the mounted files
and sent in headers.
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

from ... import upstream
from .. import records
from ..records import Amount, Count
from .task import Form

# seconds for Ray's dashboard, which is slow on a head with engines on every core
PATIENCE = 25.0
SECRETS = os.environ.get("VLAUNCH_SECRETS", "/run/vlaunch/secrets")


class HttpError(OSError):
    """An error response: its HTTP status and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"HTTP {code}: {text}")
        self.code, self.text = code, text


@dataclass(frozen=True)
class QueryTarget:
    """Address of a server's API, the port of Ray's dashboard, and the parameters of a query.

    `api_host` may be the path of a UNIX socket, such as the front's; `headers` are sent with
    requests to the API. `engines` is the number of replicas behind the API, `first` the number of
    the first one among all of the server's, as vLLM counts them.
    """

    api_host: str = "127.0.0.1"
    api: int = 8000
    dashboard: int = 8265
    engines: int = 1
    first: int = 0
    prompt: str = "Say hello."
    max_tokens: int = 1
    timeout: float = 60.0
    headers: Mapping[str, str] = field(default_factory=dict)


def send_request(
    host: str,
    port: int,
    path: str,
    secret: str,
    body: object = None,
    timeout: float = 10.0,
    extra_headers: Mapping[str, str] | None = None,
) -> http.client.HTTPResponse:
    """Send a GET, or a POST of a body, to a server on this node, at a host and port or the path of
    a UNIX socket; the secret travels in a header.

    urllib.request takes longer to import than everything else, and sends requests to a proxy.
    Raises HttpError.
    """
    form = body if isinstance(body, Form) else Form(json.dumps(body).encode(), "application/json")
    headers = {"Content-Type": form.content_type, "Connection": "close", **(extra_headers or {})}
    with (
        contextlib.suppress(OSError),
        open(os.path.join(SECRETS, secret), encoding="utf-8") as file,
    ):
        if token := file.read().strip():
            headers["Authorization"] = f"Bearer {token}"
    is_socket = host.startswith("/")
    # HAProxy 3.2 rejects a path in the header Host.
    connection = http.client.HTTPConnection(
        "localhost" if is_socket else host, port, timeout=timeout
    )
    try:
        if is_socket:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(timeout)
            connection.sock.connect(host)
        method, data = ("GET", None) if body is None else ("POST", form.data)
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        if answer.status >= 300:
            raise HttpError(answer.status, answer.read().decode(errors="replace"))
    except BaseException:
        connection.close()
        raise
    return answer


def query_ray(
    target: QueryTarget, path: str, body: object = None, timeout: float = PATIENCE
) -> object:
    """Return the JSON of Ray's dashboard; None for an empty answer."""
    port, secret = target.dashboard, "RAY_AUTH_TOKEN"
    with send_request("127.0.0.1", port, path, secret, body, timeout) as answer:
        text = answer.read().decode()
        return json.loads(text) if text else None


def query_ray_table(
    target: QueryTarget, table: str, timeout: float = PATIENCE, **filters: str
) -> list[dict[str, Any]]:
    """Return the rows of one of Ray's tables; raise ValueError for any other answer."""
    query_filters = "".join(
        f"&filter_keys={key}&filter_predicates=%3D&filter_values={value}"
        for key, value in filters.items()
    )
    answer: Any = query_ray(
        target, f"/api/v0/{table}?detail=1&limit=10000{query_filters}", timeout=timeout
    )
    try:
        listed: list[dict[str, Any]] = answer["data"]["result"]["result"]
    except (KeyError, TypeError):
        raise ValueError(f"Ray's list of {table} cannot be read: {str(answer)[:200]}") from None
    return listed


def request_api(
    target: QueryTarget, path: str, body: object, timeout: float, **headers: str
) -> http.client.HTTPResponse:
    """Send a request to a server's API; raises HttpError."""
    host, port, secret = target.api_host, target.api, "VLLM_API_KEY"
    return send_request(host, port, path, secret, body, timeout, {**target.headers, **headers})


def query_api(
    target: QueryTarget,
    path: str,
    body: object = None,
    timeout: float = 10.0,
    engine: int | None = None,
) -> tuple[int, str]:
    """Return the status and text of vLLM's answer, by the replica `engine` behind this API; 0 if
    nothing listens or it takes too long.
    """
    replica = {} if engine is None else {upstream.text("vllm.header-replica"): str(engine)}
    try:
        with request_api(target, path, body, timeout, **replica) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except HttpError as error:
        return error.code, error.text
    except OSError as error:
        return 0, str(error)


def is_reachable(host: str, port: int) -> bool:
    """True if a port accepts a connection."""
    try:
        with socket.create_connection((host, port), timeout=3):
            return True
    except OSError:
        return False


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Wait until a condition holds, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.3)


@dataclass(frozen=True)
class Counters:
    """vLLM's counters.

    `progress` is equal exactly if nothing has moved; aborted requests, such as canaries, are no
    progress. `tokens` were generated, and `failed` requests were answered with 5xx, since the
    engine started. `held` is the capacity of its KV cache, from `parse_capacity`.
    """

    progress: tuple[str, ...]
    running: Count
    waiting: Count
    tokens: Amount
    failed: Amount
    held: Mapping[str, str] = field(default_factory=dict)

    def progress_of(self, replica: int | None) -> tuple[str, ...]:
        """Return the progress of one replica; of all replicas for None."""
        return tuple(
            line for line in self.progress if replica is None or f'engine="{replica}"' in line
        )


_MOVING = (
    *("vllm.generation-tokens", "vllm.prompt-tokens", "vllm.preemptions"),
    *("vllm.kv-cache-usage", "vllm.requests-finished"),
)
_PROGRESS = re.compile(
    rf"^(?:{upstream.any_of(*_MOVING)}|{upstream.text('vllm.iteration-tokens')}_(?:count|sum))"
    r"(?:\{[^\n]*\})? \S+$",
    re.M,
)


def query_counters(target: QueryTarget, timeout: float = 5.0) -> Counters | None:
    """Return vLLM's counters; None if they do not come in time, or with `--disable-log-stats`."""
    status, text = query_api(target, upstream.text("vllm.route-metrics"), timeout=timeout)
    return parse_counters(text) if status == 200 else None


def parse_counters(text: str) -> Counters | None:
    """Parse the text of `/metrics`."""
    lines = [line for line in _PROGRESS.findall(text) if 'finished_reason="abort"' not in line]
    if not lines:
        return None

    def total(name: str) -> float:
        return sum(number for _, number in parse_samples(text, name))

    try:
        parsed = Counters(
            progress=tuple(lines),
            running=int(total(upstream.text("vllm.requests-running"))),
            waiting=int(total(upstream.text("vllm.requests-waiting"))),
            tokens=total(upstream.text("vllm.generation-tokens")),
            failed=sum(
                number
                for labels, number in parse_samples(text, upstream.text("vllm.http-requests"))
                if labels.get("status") == "5xx"
            ),
            held=parse_capacity(text),
        )
        return records.parse_record(Counters, asdict(parsed), "answer of vLLM")
    except (ValueError, OverflowError):
        return None


def parse_samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of each sample of a metric; raise ValueError for a bad number."""
    rows = re.findall(rf"^{name}(?:\{{([^\n]*)\}})? (\S+)$", text, re.M)
    return [(dict(re.findall(r'(\w+)="([^"]*)"', row)), float(number)) for row, number in rows]


def parse_capacity(text: str) -> dict[str, str]:
    """Return the capacity of the KV caches from the labels of `vllm:cache_config_info`; tokens and
    concurrency are sums over replicas.
    """
    replicas = [labels for labels, _ in parse_samples(text, upstream.text("vllm.cache-config"))]
    names = ("kv_cache_size_tokens", "kv_cache_max_concurrency", "num_gpu_blocks", "block_size")
    sizes = {name: labels[name] for labels in replicas[:1] for name in names if name in labels}
    for name, number in (("kv_cache_size_tokens", int), ("kv_cache_max_concurrency", float)):
        with contextlib.suppress(KeyError, ValueError):
            if len(replicas) > 1:
                sizes[name] = str(sum(number(labels[name]) for labels in replicas))
    return sizes
