"""Encryption of what nodes send each other: TLS 1.3, with one certificate a copy that both sides
present and neither takes another for. Who is who, the key of the copy proves besides (`wire.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias

    Connection: TypeAlias = "socket.socket | Encrypted"

_BLOCK = 2**18  # bytes that go to and come from the kernel at once


class Cipher:
    """TLS for the connections of a copy; without a certificate, they stay as they are.

    Raises OSError (ssl.SSLError) for a certificate that is none.
    """

    def __init__(self, said: Mapping[str, Any] | None) -> None:
        self._as_server = _context(ssl.PROTOCOL_TLS_SERVER, said) if said else None
        self._as_client = _context(ssl.PROTOCOL_TLS_CLIENT, said) if said else None

    def accepted(self, sock: socket.socket, patience: float) -> Connection:
        """Return a connection that was accepted, after the greeting; raises OSError."""
        return _greeted(self._as_server, sock, patience, server=True)

    def made(self, sock: socket.socket, patience: float) -> Connection:
        """Return a connection that was made, after the greeting; raises OSError."""
        return _greeted(self._as_client, sock, patience, server=False)


def _greeted(
    context: ssl.SSLContext | None, sock: socket.socket, patience: float, *, server: bool
) -> Connection:
    if context is None:
        return sock
    encrypted = Encrypted(sock, context, server=server)
    encrypted.greet(patience)
    return encrypted


class Encrypted:
    """A connection over `socket` whose bytes are encrypted. Raises OSError.

    TLS works in memory here. On the socket itself it would make two calls for each record that
    comes, and send each by itself: of 16 KiB, a quarter of what the kernel takes for one packet.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self.socket = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._block = memoryview(bytearray(_BLOCK))

    def greet(self, patience: float) -> None:
        """Agree on keys within so many seconds."""
        until = time.monotonic() + patience
        while True:
            self.socket.settimeout(max(0.001, until - time.monotonic()))
            try:
                self._tls.do_handshake()
                self._flush()
                return
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # tells the other side why
                raise

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        view, at = memoryview(data), 0
        while at < len(view):
            at += self._tls.write(view[at:])  # a record
        self._flush()

    def recv(self, count: int) -> bytes:
        """Receive at most so many bytes."""
        while True:
            try:
                return self._tls.read(count)
            except ssl.SSLWantReadError:
                self._fill()

    def recv_into(self, view: memoryview) -> int:
        """Receive into a buffer; returns how many bytes."""
        while True:
            try:
                # it is a number, where there is a buffer
                return int(self._tls.read(len(view), view))
            except ssl.SSLWantReadError:
                self._fill()

    def _flush(self) -> None:
        if data := self._out.read():
            self.socket.sendall(data)

    def _fill(self) -> None:
        count = self.socket.recv_into(self._block)
        if not count:
            raise ConnectionResetError("it ended the connection")
        self._in.write(self._block[:count])


def _context(kind: Any, said: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the copy's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=said["certificate"])
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody comes back with one
    # The only way in is a file: one that has no name, and is nowhere but in memory.
    with os.fdopen(os.memfd_create("copy"), "w") as file:
        file.write(said["certificate"] + said["key"])
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
