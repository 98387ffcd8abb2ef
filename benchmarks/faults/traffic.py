"""A small client: a steady stream of requests to one endpoint, each written down with its times and
what became of it.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from types import TracebackType

from benchmarks.faults.judge import Sample


class Traffic:
    """Requests from a few threads, each with a pause between two, while the block is entered."""

    def __init__(
        self,
        url: str,
        key: str,
        model: str,
        *,
        clients: int = 2,
        pause: float = 0.5,
        timeout: float = 8.0,
    ) -> None:
        self.url, self.key, self.model = url, key, model
        self.pause, self.timeout = pause, timeout
        self.samples: list[Sample] = []
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Traffic:
        """Begin."""
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop asking; a request that is under way is waited for."""
        self.over.set()
        for thread in self.threads:
            thread.join(self.timeout + 2)

    def _ask(self) -> None:
        while not self.over.is_set():
            self.samples.append(ask(self.url, self.key, self.model, self.timeout))
            self.over.wait(self.pause)


def ask(url: str, key: str, model: str, timeout: float) -> Sample:
    """Send one request and say what became of it; an answer without words is none."""
    began = time.time()
    body = json.dumps(
        {"model": model, "prompt": "Say hello.", "max_tokens": 2, "temperature": 0}
    ).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(
            urllib.request.Request(f"{url}/completions", body, headers), timeout=timeout
        ) as answer:
            ok = bool(json.loads(answer.read())["usage"]["completion_tokens"])
        return Sample(began=began, ended=time.time(), ok=ok)
    except (OSError, ValueError, KeyError) as error:
        return Sample(began=began, ended=time.time(), ok=False, said=str(error)[:200])
