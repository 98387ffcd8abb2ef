"""A stand-in for vLLM's API: `python3 stand_in_server.py PORT FILE MODEL…` appends the id of each
request that it runs to FILE, and `ID:gone` when its client leaves a stream.

The body of a completion says what it does: wait `delay` seconds, then answer, or with `stream` send
`parts` events, `gap` seconds apart, and with `cut` no end; with `read`, the path of a file, each
once the file has a byte for each event before it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with what arrived; after an upgrade, echo."""
        if self.headers.get("Upgrade"):
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            # RFC 6455's answer to its sample key.
            self.send_header("Sec-WebSocket-Accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
            self.end_headers()
            self.close_connection = True
            while data := self.rfile.read1():
                self.wfile.write(data)
            return
        data = [{"id": model, "object": "model", "max_model_len": 9} for model in sys.argv[3:]]
        headers = dict(self.headers)
        self._answer({"path": self.path, "headers": headers, "object": "list", "data": data})

    def do_POST(self) -> None:
        """Run a completion."""
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw) if raw.startswith(b"{") else {}
        self._note(str(body.get("id")))
        time.sleep(body.get("delay", 0))
        if not body.get("stream"):
            if self.path.endswith("/embeddings"):
                data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
            else:
                message = {"role": "assistant", "content": "Hello"}
                data = [{"index": 0, "message": message, "finish_reason": "stop"}]
            self._answer(
                {
                    "path": self.path,
                    "port": self.server.server_address[1],
                    "digest": hashlib.sha256(raw).hexdigest(),
                    "headers": dict(self.headers),
                    "id": "x",
                    "object": "list",
                    "model": body.get("model"),
                    "choices": data,
                    "data": data,
                }
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for number in range(body["parts"]):
                while "read" in body and Path(body["read"]).stat().st_size < number:
                    time.sleep(0.01)
                text = f"{number} {time.monotonic()}"
                if self.path.endswith("/chat/completions"):
                    choice = {"index": 0, "delta": {"content": text}}
                    text = json.dumps({"id": "x", "choices": [choice]})
                self._chunk(f"data: {text}\n\n".encode())
                time.sleep(body["gap"])
        except OSError:
            self._note(f"{body.get('id')}:gone")
            raise
        if body.get("cut"):
            self.close_connection = True
            return
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _note(self, text: str) -> None:
        with Path(sys.argv[2]).open("a") as file:
            file.write(f"{text}\n")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """A server for many clients."""

    request_queue_size = 128


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
