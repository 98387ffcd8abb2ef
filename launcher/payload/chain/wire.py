"""Protocol between two nodes: a proof by both that they know the copy's key, then chunks.

```text
server → client   32 random bytes
client → server   HMAC(key, them, "client"), 32 random bytes, what follows: PULL or GIVE
server → client   HMAC(key, them, "server")
puller → giver    which of how many streams, the identity of the copy, one byte a chunk
giver → puller    a head per chunk, and its bytes
```

Who has no proof gets random bytes and a closed connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from typing import TYPE_CHECKING

from .secure import Encrypted

if TYPE_CHECKING:
    from .secure import Connection

PULL, GIVE = b"P", b"G"
# What a puller says of a chunk: it has it, it wants it, or it has bytes that may be it.
HAVE, WANT, PROVE = 0, 1, 2
# What a head announces: nothing but that the giver lives, a chunk's bytes, its digest alone.
ALIVE, BYTES, DIGEST = 0, 1, 2
HEAD = struct.Struct(">BI32s16s")
_REQUEST = struct.Struct(">HH32sI")
_RANDOM = 32
_AHEAD = 16384  # bytes received at a time, while heads are what is waited for
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE (asm-generic/socket.h)


class Refused(OSError):
    """The other side has no proof, or is part of another copy."""


def below(sock: Connection) -> socket.socket:
    """Return the kernel's own part of a connection."""
    return sock.socket if isinstance(sock, Encrypted) else sock


def patient(connection: Connection, receive: float, send: float, rate: int = 0) -> None:
    """Set how many seconds of silence end a call, and bytes a second (0: as many as go)."""
    sock = below(connection)
    sock.settimeout(None)  # the kernel's own deadlines, which need no poll() before each call
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        whole = int(seconds)
        value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if rate:
        sock.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)


def receive(sock: Connection, view: memoryview) -> None:
    """Fill a buffer; raises OSError (BlockingIOError when nothing came for too long)."""
    at = 0
    while at < len(view):
        count = sock.recv_into(view[at:])
        if not count:
            raise ConnectionResetError("it ended the connection")
        at += count


class Incoming:
    """Buffered reader of a connection: heads are small, so many are read from the kernel at a time.
    Raises OSError.
    """

    def __init__(self, sock: Connection) -> None:
        self._sock = sock
        self._data = b""
        self._at = 0

    def exactly(self, count: int) -> bytes:
        """Receive so many bytes."""
        while len(self._data) - self._at < count:
            more = self._sock.recv(_AHEAD)
            if not more:
                raise ConnectionResetError("it ended the connection")
            self._data, self._at = self._data[self._at :] + more, 0
        self._at += count
        return self._data[self._at - count : self._at]

    def receive(self, view: memoryview) -> None:
        """Fill a buffer."""
        there = min(len(view), len(self._data) - self._at)
        view[:there] = self._data[self._at : self._at + there]
        self._at += there
        receive(self._sock, view[there:])


def exactly(sock: Connection, count: int) -> bytes:
    """Receive so many bytes; raises OSError."""
    data = bytearray(count)
    receive(sock, memoryview(data))
    return bytes(data)


def _proof(key: bytes, nonce: bytes, who: bytes) -> bytes:
    return hmac.new(key, nonce + who, hashlib.sha256).digest()


def greet(sock: Connection, key: bytes) -> bytes:
    """Prove, as who was connected to, and return what the other side wants; raises OSError."""
    nonce = os.urandom(_RANDOM)
    sock.sendall(nonce)
    said = exactly(sock, 32 + _RANDOM + 1)
    want = said[-1:]
    if not hmac.compare_digest(said[:32], _proof(key, nonce, b"client" + want)):
        raise Refused("a stranger")
    sock.sendall(_proof(key, said[32:-1], b"server"))
    return want


def introduce(sock: Connection, key: bytes, want: bytes) -> None:
    """Prove, as who connects; raises OSError."""
    nonce = os.urandom(_RANDOM)
    sock.sendall(_proof(key, exactly(sock, _RANDOM), b"client" + want) + nonce + want)
    if not hmac.compare_digest(exactly(sock, 32), _proof(key, nonce, b"server")):
        raise Refused("it does not know the key of this copy")


def ask(sock: Connection, stream: int, streams: int, identity: str, states: bytes) -> None:
    """Say what is wanted; raises OSError."""
    head = _REQUEST.pack(stream, streams, bytes.fromhex(identity), len(states))
    sock.sendall(head + states)


def asked(sock: Connection, identity: str, chunks: int) -> tuple[int, int, bytes]:
    """Return stream, number of streams, and what is wanted; raises OSError."""
    stream, streams, theirs, count = _REQUEST.unpack(exactly(sock, _REQUEST.size))
    if theirs.hex() != identity or count != chunks or not stream < streams:
        raise Refused("it is part of another copy")
    return stream, streams, exactly(sock, count)


def head(key: bytes, identity: bytes, kind: int, number: int, digest: bytes) -> bytes:
    """Return what goes before a chunk: nobody on the way can put another digest in its place."""
    return HEAD.pack(kind, number, digest, _mac(key, identity, number, digest))


def read_head(key: bytes, identity: bytes, data: bytes) -> tuple[int, int, bytes]:
    """Return kind, number and digest; raises Refused for a head that was not made with the key."""
    kind, number, digest, mac = HEAD.unpack(data)
    if kind != ALIVE and not hmac.compare_digest(mac, _mac(key, identity, number, digest)):
        raise Refused("what it sends was changed on the way")
    return kind, number, digest


def _mac(key: bytes, identity: bytes, number: int, digest: bytes) -> bytes:
    said = identity + number.to_bytes(4, "big") + digest
    return hmac.digest(key, said, "sha256")[:16]


def together(sock: Connection, on: bool) -> None:
    """Have what is sent from now on wait for more, so that packets are full ones; or send it."""
    below(sock).setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)


def close(sock: Connection) -> None:
    """Close, also under whoever waits for it in another thread."""
    with contextlib.suppress(OSError):
        below(sock).shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        below(sock).close()
