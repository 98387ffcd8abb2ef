"""Protocol between two nodes of a copy, inside of mutual TLS (`secure.py`).

```text
client → server   what follows: PULL or GIVE
server → client   the same: the client's certificate is right
puller → giver    which of how many streams, the identity of the copy, one byte a chunk
giver → puller    a head per chunk, and its bytes
```
"""

from __future__ import annotations

import socket
import struct

from .secure import Connection

PULL, GIVE = b"P", b"G"
# What a puller says of a chunk: it has it, it wants it, or it has bytes that may be it.
HAVE, WANT, PROVE = 0, 1, 2
# What a head announces: nothing but that the giver lives, a chunk's bytes, its digest alone.
ALIVE, BYTES, DIGEST = 0, 1, 2
HEAD = struct.Struct(">BI32s")
_REQUEST = struct.Struct(">HH32sI")
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE (asm-generic/socket.h)


class Refused(OSError):
    """The other side is part of another copy, or does not speak as one of this does."""


def patient(connection: Connection, receive: float, send: float, rate: int = 0) -> None:
    """Set how many seconds of silence end a call, and bytes a second (0: as many as go)."""
    sock = connection.socket
    sock.settimeout(None)  # the kernel's own deadlines, which need no poll() before each call
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        whole = int(seconds)
        value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if rate:
        sock.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)


def greet(connection: Connection) -> bytes:
    """Return what the node that connected wants, and confirm it; raises OSError."""
    want = connection.exactly(1)
    connection.sendall(want)
    return want


def introduce(connection: Connection, want: bytes) -> None:
    """Say what is wanted of the node that was connected to; raises OSError."""
    connection.sendall(want)
    if connection.exactly(1) != want:
        raise Refused("it does not do what was asked")


def ask(connection: Connection, stream: int, streams: int, identity: str, states: bytes) -> None:
    """Say which chunks are wanted; raises OSError."""
    head = _REQUEST.pack(stream, streams, bytes.fromhex(identity), len(states))
    connection.sendall(head + states)


def asked(connection: Connection, identity: str, chunks: int) -> tuple[int, int, bytes]:
    """Return stream, number of streams, and what is wanted; raises OSError."""
    stream, streams, theirs, count = _REQUEST.unpack(connection.exactly(_REQUEST.size))
    if theirs.hex() != identity or count != chunks or not stream < streams:
        raise Refused("it is part of another copy")
    return stream, streams, connection.exactly(count)


def together(connection: Connection, on: bool) -> None:
    """Have what is sent from now on wait for more, so that packets are full ones; or send it."""
    connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)
