"""Protocol between two nodes of a copy, inside mutual TLS (`connection.py`).

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

from .connection import Connection

PULL, GIVE = b"P", b"G"
# Puller's state of a chunk: present, missing, or stored bytes to be verified.
HAVE, WANT, PROVE = 0, 1, 2
# Kind of a head: a heartbeat, a chunk's digest and bytes, or the digest alone.
ALIVE, BYTES, DIGEST = 0, 1, 2
HEAD = struct.Struct(">BI32s")
_REQUEST = struct.Struct(">HH32sI")
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE (asm-generic/socket.h)


class ProtocolError(OSError):
    """The peer belongs to another copy, or violates the protocol."""


def set_timeouts(connection: Connection, receive: float, send: float, rate: int = 0) -> None:
    """Set the timeouts of calls in seconds, and the rate in bytes per second (0: unlimited)."""
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
    stream, streams, peer_identity, count = _REQUEST.unpack(
        connection.receive_exactly(_REQUEST.size)
    )
    if peer_identity.hex() != identity or count != chunks or not stream < streams:
        raise ProtocolError("it belongs to another copy")
    return stream, streams, connection.receive_exactly(count)


def set_cork(connection: Connection, on: bool) -> None:
    """Hold back partial packets until more data follow, or (`on` false) send them."""
    connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)
