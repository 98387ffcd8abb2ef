"""Streams of completions against a server's endpoints, and the times of their tokens."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from launcher import upstream
from launcher.agent.health.task import ModelTask

_CONNECT_TIMEOUT = 5.0  # seconds for a connection, or the list of models
_READ_TIMEOUT = 300.0  # seconds without a byte after which a request has failed
_RETRY_DELAY = 1.0  # seconds between a failed request and the next
_MAX_ERROR_KINDS = 20  # different errors in the report
_STEP = math.log(1.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """Target of requests, and their headers."""

    host: str
    port: int
    headers: Mapping[str, str]

    def query_model(self) -> str:
        """Return the name of the served model; raises OSError or ValueError if none answers."""
        connection = HTTPConnection(self.host, self.port, timeout=_CONNECT_TIMEOUT)
        with contextlib.closing(connection):
            try:
                connection.request(
                    "GET", upstream.text("vllm.route-models"), headers=dict(self.headers)
                )
                answer = json.loads(connection.getresponse().read(1 << 20))
                return str(answer["data"][0]["id"])
            except (HTTPException, KeyError, IndexError, TypeError) as error:
                raise ValueError(f"no model at {self.host}:{self.port}: {error!r:.200}") from None


class DurationHistogram:
    """Durations within 2 %, in little memory."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        """Add one duration."""
        self._counts[math.ceil(math.log(max(seconds, 1e-6)) / _STEP)] += 1
        self.longest = max(self.longest, seconds)

    def percentile(self, share: float) -> float | None:
        """Return the duration that this share of them did not exceed; None if there are none."""
        remaining = share * self._counts.total()
        for step, count in sorted(self._counts.items()):
            remaining -= count
            if remaining <= 0:
                return min(math.exp(step * _STEP), self.longest)
        return None


@dataclass
class LoadGenerator:
    """Requests to endpoints in turn, and their results; `with` starts and ends it.

    `longest_wait` is the longest wait of a request for a token, including the first, and
    `waited_until` its end in seconds since the start. Requests still running at the end of the
    block are stopped: they are `open`, not errors.
    """

    endpoints: Sequence[LoadTarget]
    model: str
    task: ModelTask
    max_tokens: int
    streams: int
    done: int = 0
    open: int = 0
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: DurationHistogram = field(default_factory=DurationHistogram)
    between: DurationHistogram = field(default_factory=DurationHistogram)
    longest_wait: float = 0.0
    waited_until: float = 0.0
    seconds: float = 0.0

    def __enter__(self) -> LoadGenerator:
        self._over, self._lock = threading.Event(), threading.Lock()
        self._began = time.monotonic()
        self._waiting = dict[int, float]()  # start of each stream's present wait for a token
        self._sockets = dict[int, socket.socket]()
        self._threads = [
            threading.Thread(target=self._run_stream, args=(stream,), daemon=True)
            for stream in range(self.streams)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End every request at once."""
        with self._lock:
            now = time.monotonic()
            self._over.set()
            self.seconds = now - self._began
            self.open = len(self._waiting)
            for stream in range(self.streams):
                self._record_wait(stream, now)
            for connected in self._sockets.values():
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_CONNECT_TIMEOUT)

    def _run_stream(self, stream: int) -> None:
        for count in itertools.count(stream):
            if self._over.is_set():
                return
            endpoint, error_text = self.endpoints[count % len(self.endpoints)], ""
            try:
                self._send_request(endpoint, stream, f"{stream}.{count}")
            except (OSError, ValueError, TypeError, AttributeError, HTTPException) as error:
                error_text = f"{type(error).__name__}: {error!s:.200}"
            with self._lock:
                if self._over.is_set():
                    return
                if error_text:
                    is_listed = error_text in self.errors or len(self.errors) < _MAX_ERROR_KINDS
                    self.errors[error_text if is_listed else "others"] += 1
                    self._record_wait(stream, time.monotonic())
                self.done += not error_text
                self._waiting.pop(stream, None)
            if error_text:
                self._over.wait(_RETRY_DELAY)

    def _send_request(self, endpoint: LoadTarget, stream: int, mark: str) -> None:
        """Send one request with a unique prompt, and read its answer."""
        body: Any = self.task.body(self.model, f"Request {mark}: tell a story.", self.max_tokens)
        data = json.dumps({**body, "stream": True, "ignore_eos": True})
        connection = HTTPConnection(endpoint.host, endpoint.port, timeout=_CONNECT_TIMEOUT)
        with contextlib.closing(connection):
            times, self._waiting[stream] = self.first, time.monotonic()
            connection.connect()
            connection.sock.settimeout(_READ_TIMEOUT)
            with self._lock:
                if self._over.is_set():
                    return
                self._sockets[stream] = connection.sock
            connection.request("POST", self.task.path, data, dict(endpoint.headers))
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}: {answer.read(200)!r}")
            for event in _stream_events(answer):
                with self._lock:
                    if self._over.is_set():
                        return
                    if _has_token(event):
                        now = time.monotonic()
                        times.add(self._record_wait(stream, now))
                        times, self._waiting[stream] = self.between, now
                        self.tokens += 1

    def _record_wait(self, stream: int, now: float) -> float:
        """Return a stream's wait for a token, and update the longest one."""
        seconds = now - self._waiting.get(stream, now)
        if seconds > self.longest_wait:
            self.longest_wait, self.waited_until = seconds, now - self._began
        return seconds


def _stream_events(answer: HTTPResponse) -> Iterator[Any]:
    """Yield the events of an answer; raises ValueError if it breaks off or an event is an error."""
    for line in answer:
        text = line.strip().removeprefix(b"data:").strip()
        if text == b"[DONE]":
            return
        if text:
            event = json.loads(text)
            if "error" in event:
                raise ValueError(str(event["error"]))
            yield event
    raise ValueError("the answer was cut off")


def _has_token(event: Any) -> bool:
    """True for an event with a token: the first event of a chat only names the role."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        return not (isinstance(delta, dict) and "role" in delta and not delta.get("content"))
    return False
