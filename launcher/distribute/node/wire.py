"""Protocol between two nodes of a copy, inside mutual TLS (`secure.py`).

```text
client → server   its purpose: PULL or GIVE
server → client   the same byte: the client's certificate is accepted
puller → giver    number of the stream, number of streams, identity of the copy, a state per chunk
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


class ProtocolError(OSError):
    """The other side belongs to another copy, or breaks the protocol."""


def set_timeouts(connection: Connection, receive: float, send: float, rate: int = 0) -> None:
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


def confirm_purpose(connection: Connection) -> bytes:
    """Receive and confirm the client's purpose; raises OSError."""
    purpose = connection.receive_exactly(1)
    connection.sendall(purpose)
    return purpose


def send_purpose(connection: Connection, purpose: bytes) -> None:
    """Send this client's purpose and await the confirmation; raises OSError."""
    connection.sendall(purpose)
    if connection.receive_exactly(1) != purpose:
        raise ProtocolError("it did not confirm the request")


def send_request(
    connection: Connection, stream: int, streams: int, identity: str, states: bytes
) -> None:
    """Request the chunks that `states` marks; raises OSError."""
    head = _REQUEST.pack(stream, streams, bytes.fromhex(identity), len(states))
    connection.sendall(head + states)


def receive_request(connection: Connection, identity: str, chunks: int) -> tuple[int, int, bytes]:
    """Return the stream, the number of streams, and the states of the chunks; raises OSError."""
    stream, streams, theirs, count = _REQUEST.unpack(connection.receive_exactly(_REQUEST.size))
    if theirs.hex() != identity or count != chunks or not stream < streams:
        raise ProtocolError("it belongs to another copy")
    return stream, streams, connection.receive_exactly(count)


def set_cork(connection: Connection, on: bool) -> None:
    """Have what is sent from now on wait for more, so that packets are full ones; or send it."""
    connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)
