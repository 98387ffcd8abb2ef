"""A local HTTP server that streams completions like vLLM."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.agent.web import Quiet

MODEL = {"data": [{"id": "served-name"}]}
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
TOKEN = {"choices": [{"text": "x"}]}
USAGE: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": 3}}
DONE = "[DONE]"


class Endpoint:
    """Answers every request with `events`: `None` waits for `go`, and `[DONE]` follows the last one
    unless `complete` is false.
    """

    def __init__(self, *events: Any, status: int = 200, complete: bool = True) -> None:
        self.events, self.status, self.complete = events, status, complete
        self.go = threading.Event()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.open = self.most_open = self.finished = 0
        self._changed = threading.Condition()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = json.dumps(MODEL).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner._count(1, request, self.headers.get("Authorization") or "")
                try:
                    self.send_response(owner.status)
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    for event in owner.events:
                        if event is None:
                            owner.go.wait(60)
                        else:
                            self._send(event if isinstance(event, str) else json.dumps(event))
                finally:
                    owner._count(
                        -1
                    )  # before the end of the answer, which triggers the next request
                if owner.complete:
                    self._send(DONE)
                self.wfile.write(b"0\r\n\r\n")

            def _send(self, text: str) -> None:
                data = f"data: {text}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

            def log_message(self, *_: object) -> None:
                return

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}
        )

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _count(self, change: int, request: Any = None, key: str = "") -> None:
        with self._changed:
            if request is not None:
                self.requests.append(request)
                self.keys.append(key)
            self.open += change
            self.most_open = max(self.most_open, self.open)
            self.finished += change < 0
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; check it when requests start or end, and periodically."""
        deadline = time.monotonic() + 120
        with self._changed:
            while not condition():
                assert time.monotonic() < deadline, "timed out"
                self._changed.wait(0.01)
