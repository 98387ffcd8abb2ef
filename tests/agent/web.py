"""A server that answers by path: a fake of Ray's dashboard and of vLLM's API."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHAT = {
    "choices": [{"message": {"content": "Hi"}}],
    "usage": {"completion_tokens": 1},
    "system_fingerprint": "vllm-0.32.0-pp2-x",
}


@dataclass
class Replicas:
    """Replicas behind one API: they count completed requests; the named one answers, if names are
    `obeyed`. `first` is the number of the first one among the server's.
    """

    finished: list[int] = field(default_factory=lambda: [7, 7])
    refusing: dict[int, tuple[int, str]] = field(default_factory=dict)
    obeyed: bool = True
    counting: bool = True
    first: int = 0

    def answer(self, number: int | None) -> Any:
        """Answer as the named replica; as the first one without a name, or if names are ignored."""
        chosen = number if number is not None and self.obeyed else 0
        if chosen in self.refusing:
            return self.refusing[chosen]
        self.finished[chosen] += 1
        return CHAT

    def metrics(self) -> str:
        """Return vLLM's metrics: a counter per replica and reason, and the capacity per replica."""
        lines = [
            f'vllm:request_success_total{{engine="{number}",finished_reason="{reason}",model_name="m"}}'
            f" {count}"
            for number, finished in enumerate(self.finished, start=self.first)
            for reason, count in (("stop", "2.0"), ("length", f"{finished - 2}.0"))
        ]
        labels = 'kv_cache_max_concurrency="64.0",kv_cache_size_tokens="32768",num_gpu_blocks="512"'
        capacity = [
            f'vllm:cache_config_info{{engine="{number}",{labels}}} 1.0'
            for number in range(len(self.finished))
        ]
        return "\n".join([*capacity, *(lines if self.counting else [])]) + "\n"


class Quiet(ThreadingHTTPServer):
    """A server that does not log clients that disconnect early."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Do not log."""


class Server:
    """Answers by path: a value, or a function of the request's body; (status, value) for other
    statuses than 200. `tables` are Ray's, filtered by the query as in its dashboard.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.requests: list[tuple[str, str, str, Any]] = []
        self.replicas: Replicas | None = None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                kind = self.headers.get("Content-Type") or ""
                payload = json.loads(body) if body and kind.endswith("json") else body or None
                path, _, query = self.path.partition("?")
                owner.requests.append(
                    (self.command, path, self.headers.get("Authorization") or "", payload)
                )
                rank = self.headers.get("X-data-parallel-rank")
                status, text = owner.find(
                    self.command, path, query, payload, None if rank is None else int(rank)
                )
                self.send_response(status)
                self.end_headers()
                self.wfile.write(
                    text.encode() if isinstance(text, str) else json.dumps(text).encode()
                )

            do_GET = do_POST = _answer

            def log_message(self, *_: object) -> None:
                return

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.01}
        )

    def find(
        self, verb: str, path: str, query: str, requests: object, replica: int | None
    ) -> tuple[int, Any]:
        """Return the answer to a request."""
        result = self.answers.get(path, (404, "no such path"))
        if path in self.tables:
            argv = dict(part.partition("=")[::2] for part in query.split("&"))
            key, value = argv.get("filter_keys"), argv.get("filter_values")
            result = rows(
                *(row for row in self.tables[path] if key is None or row.get(key) == value)
            )
        elif self.replicas and verb == "POST":
            result = self.replicas.answer(replica)
        elif self.replicas and path == "/metrics":
            result = self.replicas.metrics()
        result = result(requests) if callable(result) else result
        return result if isinstance(result, tuple) else (200, result)

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def rows(*args: dict[str, Any]) -> dict[str, Any]:
    """Return a table in the format of Ray's dashboard."""
    return {"data": {"result": {"result": list(args)}}}
