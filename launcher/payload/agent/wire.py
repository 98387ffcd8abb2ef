"""What the agents of a cluster share: a connection with JSON, a line a message, and the proof that
both know its secret.

Standard library only. Nothing here trusts the other side: lines are bounded, garbage ends the
connection, and nobody is waited for: sockets never block.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import sys
import time
from typing import Any

_SECRETS = os.environ.get("VLAUNCH_SECRETS", "/run/vlaunch/secrets")
LINE = 1 << 18  # bytes of a message; orders or reports of several servers have a tenth of it
_FIRST_LINE = 1 << 12  # bytes of a message from a peer that has not proven yet who it is
_UNREAD = 1 << 20  # bytes that may wait for somebody who does not read


class Lost(Exception):
    """The connection is of no use any more; the text says why."""


class Peer:
    """The other end of a connection.

    `heard` is when it last said something, on the monotonic clock, and `most` the bytes that a
    message of it may have: `LINE` from when it has proven who it is.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.heard, self.most = sock, time.monotonic(), _FIRST_LINE
        self._half, self._unsent = b"", b""

    def fileno(self) -> int:
        """Let a selector wait for it."""
        return self.sock.fileno()

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come whole; raises Lost."""
        try:
            data = self.sock.recv(self.most)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise Lost(f"its connection broke: {error.strerror or error}") from None
        if not data:
            raise Lost("its connection was closed")
        self.heard = time.monotonic()
        *lines, self._half = (self._half + data).split(b"\n")
        if max(map(len, [*lines, self._half])) > self.most:
            raise Lost("it says more than an agent would")
        return [_message(line) for line in lines]

    def say(self, **message: object) -> None:
        """Send a message, now or as soon as the other side reads; raises Lost."""
        self._unsent += json.dumps(message).encode() + b"\n"
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise Lost(f"its connection broke: {error.strerror or error}") from None
        if len(self._unsent) > _UNREAD:
            raise Lost("it does not read")

    def close(self) -> None:
        """Close the connection; the other side sees its end."""
        self.sock.close()


def _message(line: bytes) -> dict[str, Any]:
    """Read a message; raises Lost. Whoever uses a part of it looks at its type."""
    try:
        said = json.loads(line)
        # JSON can name halves of letters, which cannot be hashed or sent on
        json.dumps(said, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Lost("it says no JSON") from None
    if not isinstance(said, dict):
        raise Lost("it says no message")
    return said


def secret() -> str:
    """Return the cluster's secret; empty where there is none.

    It is read each time, for it may be rotated.
    """
    try:
        with open(os.path.join(_SECRETS, "RAY_AUTH_TOKEN"), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def proof(key: str, *words: object) -> str:
    """Return what only somebody with the key can say about these words; empty where the cluster has
    no key.
    """
    if not key:
        return ""
    text = "\n".join(["vlaunch agent", *map(str, words)])
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def proven(said: object, key: str, *words: object) -> bool:
    """True when `said` is that proof.

    Without a key nobody is believed: whoever leads can start programs.
    """
    return (
        bool(key)
        and isinstance(said, str)
        and hmac.compare_digest(said.encode(), proof(key, *words).encode())
    )


def listen(ip: str, port: int) -> socket.socket:
    """Listen on one address; raises OSError while it is not there yet, as after a reboot."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    server = socket.create_server((ip, port), family=family, backlog=64)
    server.setblocking(False)
    return server


def say(text: str) -> None:
    """Print a line between vLLM's own; parts of it may be a stranger's, in letters that this output
    cannot show.
    """
    shown = "".join(each if each.isprintable() else "?" for each in text)
    encoding = sys.stdout.encoding or "utf-8"
    with contextlib.suppress(OSError):
        print("vlaunch agent: " + shown.encode(encoding, "replace").decode(encoding), flush=True)
