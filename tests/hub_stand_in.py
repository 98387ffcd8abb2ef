"""A fake Hugging Face Hub with one model, for the client huggingface_hub 2.4.

It serves ranges, a commit and digests as ETags, redirects large files, requires a token for a gated
model, and can answer the first requests with 429 or truncated bodies.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """Content and behaviour: a required `token`, counts of `busy` (429) answers and `broken`
    downloads, `rate` in bytes per second, and `elsewhere`, the address for redirects of large
    files. `requests` and `by` record requests and clients.
    """

    files: dict[str, bytes]
    name: str = "org/m"
    token: str = ""
    busy: int = 0
    broken: int = 0
    rate: float = 0.0
    elsewhere: str = ""
    requests: list[str] = field(default_factory=list)
    by: set[str] = field(default_factory=set)

    def large(self, name: str) -> bool:
        """True for LFS files; their digest is SHA-256."""
        return name.endswith((".safetensors", ".bin"))

    def digest(self, name: str) -> str:
        data = self.files[name]
        if self.large(name):
            return hashlib.sha256(data).hexdigest()
        return hashlib.new("sha1", b"blob %d\0" % len(data) + data).hexdigest()

    def listed(self) -> list[dict[str, Any]]:
        return [
            {
                "rfilename": name,
                "path": name,
                "type": "file",
                "size": len(data),
                "oid": self.digest(name) if not self.large(name) else "0" * 40,
                "blobId": self.digest(name) if not self.large(name) else "0" * 40,
                **(
                    {
                        "lfs": {
                            "oid": self.digest(name),
                            "sha256": self.digest(name),
                            "size": len(data),
                            "pointerSize": 134,
                        }
                    }
                    if self.large(name)
                    else {}
                ),
            }
            for name, data in self.files.items()
        ]

    def start(self, host: str = "127.0.0.1") -> str:
        """Listen; return the address for HF_ENDPOINT."""
        hub = self

        class Handler(_Handler):
            of = hub

        server = ThreadingHTTPServer((host, 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://{host}:{server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Do not log."""

    def _answer(self, *, body: bool) -> None:
        hub, path = self.of, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        hub.by.add(self.client_address[0])
        if hub.busy:
            hub.busy -= 1
            self._send(429, b"slow down", {"Retry-After": "1"}, body=body)
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
            self._send(401, b"{}", headers, body=body)
        elif path.startswith(f"/api/models/{hub.name}/tree/"):
            self._send(200, json.dumps(hub.listed()).encode(), {}, body=body)
        elif path.startswith(f"/api/models/{hub.name}"):
            info = {"id": hub.name, "modelId": hub.name, "sha": COMMIT, "siblings": hub.listed()}
            self._send(200, json.dumps(info).encode(), {}, body=body)
        elif path.startswith("/elsewhere/"):
            self._file(path.removeprefix("/elsewhere/"), body=body)
        elif path.startswith(f"/{hub.name}/resolve/"):
            self._file(path.split("/", 5)[5], body=body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _file(self, name: str, *, body: bool) -> None:
        hub = self.of
        if name not in hub.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
            return
        data, digest = hub.files[name], hub.digest(name)
        headers = {
            "ETag": f'"{digest}"',
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(data)),
            "Accept-Ranges": "bytes",
        }
        if hub.large(name):
            headers["X-Linked-Etag"] = f'"{digest}"'
        if hub.elsewhere and hub.large(name) and not self.path.startswith("/elsewhere/"):
            headers["Location"] = f"{hub.elsewhere}/elsewhere/{name}"
            self._send(302, b"", headers, body=body)
            return
        start = 0
        if (byte_range := self.headers.get("Range", "")).startswith("bytes="):
            start = int(byte_range[6:].partition("-")[0])
        code = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(code, data[start:], headers, body=body)

    def _send(self, code: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        if self.of.broken and len(data) > 100_000:
            self.of.broken -= 1
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        step = 65536
        for at in range(0, len(data), step):
            self.wfile.write(data[at : at + step])
            if self.of.rate:
                time.sleep(step / self.of.rate)
