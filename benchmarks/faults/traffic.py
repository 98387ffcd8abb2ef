"""A small client: steady requests to one endpoint, each recorded with its times and result."""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from types import TracebackType
from typing import Any

from benchmarks.faults.judge import Sample


class Traffic:
    """Requests from a few threads, each with a pause between two, inside the block; `streams` of
    the `clients` read streams. `context` is for an endpoint with TLS.
    """

    def __init__(
        self,
        url: str,
        key: str,
        model: str,
        *,
        clients: int = 2,
        streams: int = 0,
        context: ssl.SSLContext | None = None,
        pause: float = 0.5,
        timeout: float = 8.0,
    ) -> None:
        self.url, self.key, self.model = url, key, model
        self.pause, self.timeout, self.context = pause, timeout, context
        self.samples: list[Sample] = []
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=self._send_requests, args=(number < streams,), daemon=True)
            for number in range(clients)
        ]

    def __enter__(self) -> Traffic:
        """Start the threads."""
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the threads; wait for requests in flight."""
        self.over.set()
        for thread in self.threads:
            thread.join(self.timeout + 2)

    def _send_requests(self, stream: bool) -> None:
        send = send_stream if stream else send_request
        while not self.over.is_set():
            sample = send(self.url, self.key, self.model, self.timeout, self.context)
            self.samples.append(sample)
            self.over.wait(self.pause)


def send_request(
    url: str, key: str, model: str, timeout: float, context: ssl.SSLContext | None = None
) -> Sample:
    """Send one request and return its result; an empty answer is a failure."""
    began = time.time()
    try:
        with _post(url, key, {"model": model, "max_tokens": 2}, timeout, context) as answer:
            ok = bool(json.loads(answer.read())["usage"]["completion_tokens"])
        return Sample(began=began, ended=time.time(), ok=ok)
    except (OSError, ValueError, KeyError, HTTPException) as error:
        return Sample(began=began, ended=time.time(), ok=False, error=str(error)[:200])


def send_stream(
    url: str, key: str, model: str, timeout: float, context: ssl.SSLContext | None = None
) -> Sample:
    """Read one stream of tokens and return its result; it must end with `[DONE]`."""
    began, tokens, done, error_text = time.time(), 0, False, "the stream ended early"
    body = {"model": model, "max_tokens": 64, "ignore_eos": True, "stream": True}
    try:
        with _post(url, key, body, timeout, context) as answer:
            for line in answer:
                event = line.strip().removeprefix(b"data:").strip()
                done = done or event == b"[DONE]"
                if event and not done:
                    tokens += bool(json.loads(event)["choices"])
    except (OSError, ValueError, KeyError, HTTPException) as error:
        done, error_text = False, str(error)[:200] or repr(error)
    error_text = "" if done else error_text
    return Sample(
        began=began, ended=time.time(), ok=done, error=error_text, cut=not done and tokens > 0
    )


def _post(
    url: str, key: str, body: Mapping[str, Any], timeout: float, context: ssl.SSLContext | None
) -> Any:
    data = json.dumps({"prompt": "Say hello.", "temperature": 0, **body}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    request = urllib.request.Request(f"{url}/completions", data, headers)
    return opener.open(request, timeout=timeout)
