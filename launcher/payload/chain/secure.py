"""Connections between the nodes of a copy: mutual TLS 1.3 with the copy's certificate.

What is asked and announced, digests included, always passes through TLS. The bytes of files do so
too, unless the copy is `plain`: then they follow in the clear, and their digests protect them.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from ..tls import contexts

_BLOCK = 2**18  # bytes that go to and come from the kernel at once
_SMALL = 2**14  # … where what follows is not for TLS


class Tls:
    """TLS of one copy. Raises OSError (ssl.SSLError) for a certificate that is none."""

    def __init__(self, certificate: str, *, plain: bool = False) -> None:
        self._server, self._client = contexts(certificate)
        self._plain = plain

    def accepted(self, sock: socket.socket, patience: float) -> Connection:
        """Return a connection that was accepted, after the handshake; raises OSError."""
        return self._greeted(sock, self._server, patience)

    def made(self, sock: socket.socket, patience: float) -> Connection:
        """Return a connection that was made, after the handshake; raises OSError.

        The other side has not judged this one's certificate yet.
        """
        return self._greeted(sock, self._client, patience)

    def _greeted(self, sock: socket.socket, context: ssl.SSLContext, patience: float) -> Connection:
        server = context is self._server
        connection = Connection(sock, context, server=server, plain=self._plain)
        connection.greet(patience)
        return connection


class Connection:
    """A connection over `socket`; `plain` as its copy is. Raises OSError.

    TLS works in memory here. On the socket itself it would make two calls for each record that
    comes, and send each by itself: of 16 KiB, a quarter of what the kernel takes for one packet.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, plain: bool
    ) -> None:
        self.socket, self.plain = sock, plain
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._block = memoryview(bytearray(_SMALL if plain else _BLOCK))

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
        """Send all of it, through TLS."""
        view, at = memoryview(data), 0
        while at < len(view):
            at += self._tls.write(view[at:])  # a record
        self._flush()

    def exactly(self, count: int) -> bytes:
        """Receive so many bytes."""
        data = bytearray(count)
        self.receive(memoryview(data))
        return bytes(data)

    def receive(self, view: memoryview) -> None:
        """Fill a buffer with what was sent through TLS."""
        at = 0
        while at < len(view):
            try:
                # it is a number, where there is a buffer
                at += int(self._tls.read(len(view) - at, view[at:]))
            except ssl.SSLWantReadError:
                self._fill()

    def receive_plain(self, view: memoryview) -> None:
        """Fill a buffer with what was sent past TLS, after the last record that was received."""
        # OpenSSL leaves in memory what follows a record (SSL_CTX_set_read_ahead is off).
        there = self._in.read(len(view))
        at = len(there)
        view[:at] = there
        while at < len(view):
            at += self._came(self.socket.recv_into(view[at:]))

    def _flush(self) -> None:
        if data := self._out.read():
            self.socket.sendall(data)

    def _fill(self) -> None:
        self._in.write(self._block[: self._came(self.socket.recv_into(self._block))])

    @staticmethod
    def _came(count: int) -> int:
        if not count:
            raise ConnectionResetError("it ended the connection")
        return count
