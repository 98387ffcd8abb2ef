"""Serves the agent's metrics on the head, for Prometheus: `GET /metrics`, and nothing else.

Whoever reaches the port may read them, as with vLLM's and Ray's. So that nobody can do more than
read: few are served at once, each within seconds, and the text is made anew only once a second.
Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from .wire import say

KIND = "text/plain; version=0.0.4; charset=utf-8"
_MOST = 8  # readers at once; others are turned away
_DEADLINE = 5.0  # seconds for one reader, all in all
_AGAIN = 5.0  # seconds until an address that was not there, or was taken, is tried again
_HOLDS = 1.0  # seconds for which a text is good


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "vlaunch", ""

    def do_GET(self) -> None:
        """Answer with the text."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.text().encode(errors="replace")
        self.send_response(200)
        self.send_header("Content-Type", KIND)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: a line each scrape would fill the container's log."""


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 16

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.text = text
        self._free = threading.BoundedSemaphore(_MOST)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread of its own, if one is left."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one reader, who loses the connection at the deadline."""
        request.settimeout(_DEADLINE)
        end = threading.Timer(_DEADLINE, _end, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, *_: object) -> None:
        """Say nothing: readers come and go as they like."""


def _end(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class Exporter:
    """Listens on one address, as soon as that is there; what cannot be served harms nobody."""

    def __init__(self, host: str, port: int, make: Callable[[float], str]) -> None:
        self.host, self.port, self._make = host, port, make
        self._server: _Server | None = None
        self._again, self._trouble = 0.0, ""
        self._lock = threading.Lock()
        self._text, self._made = "", -_HOLDS

    def turn(self) -> None:
        """Listen, where nobody does yet."""
        now = time.monotonic()
        if self._server is not None or now < self._again:
            return
        self._again = now + _AGAIN
        try:
            self._server = _Server(self.host, self.port, self.text)
        except (OSError, OverflowError) as error:
            why = f"no metrics on {self.host} port {self.port}: {error}"
            if why != self._trouble:
                self._trouble = why
                say(why)
            return
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def text(self) -> str:
        """Return the text, at most a second old."""
        with self._lock:
            now = time.monotonic()
            if now - self._made >= _HOLDS:
                self._text, self._made = self._make(time.time()), now
            return self._text

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
