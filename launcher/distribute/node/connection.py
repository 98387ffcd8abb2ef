"""Connections between the nodes of a copy: mutual TLS 1.3 with the copy's certificate.

Requests and heads, which contain the digests, are always encrypted. The bytes of files are too,
unless the copy is `plain`: then they are sent without encryption, protected by their digests.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from ...core.tls import contexts

_BLOCK = 2**18  # bytes per call of the kernel
_PLAIN_BLOCK = 2**14  # the same for plain copies, where plain bytes may follow a record


class Tls:
    """The TLS contexts of a copy. Raises OSError (ssl.SSLError) for an invalid certificate."""

    def __init__(self, certificate: str, *, plain: bool = False) -> None:
        self._server, self._client = contexts(certificate)
        self._plain = plain

    def accept(self, sock: socket.socket, timeout: float) -> Connection:
        """Return an accepted connection after the handshake; raises OSError."""
        return self._handshake(sock, self._server, timeout)

    def connect(self, sock: socket.socket, timeout: float) -> Connection:
        """Return a client's connection after the handshake; raises OSError.

        The server may still refuse this side's certificate.
        """
        return self._handshake(sock, self._client, timeout)

    def _handshake(
        self, sock: socket.socket, context: ssl.SSLContext, timeout: float
    ) -> Connection:
        server = context is self._server
        connection = Connection(sock, context, server=server, plain=self._plain)
        connection.handshake(timeout)
        return connection


class Connection:
    """A connection over `socket`, of a `plain` or an encrypted copy. Raises OSError.

    TLS works in memory here. On the socket itself, it would make two calls per received record, and
    send records of 16 KiB one by one: a quarter of what the kernel takes for one packet.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, plain: bool
    ) -> None:
        self.socket, self.plain = sock, plain
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._block = memoryview(bytearray(_PLAIN_BLOCK if plain else _BLOCK))

    def handshake(self, timeout: float) -> None:
        """Complete the handshake; `timeout` is in seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
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
        """Send all data, encrypted."""
        view, sent = memoryview(data), 0
        while sent < len(view):
            sent += self._tls.write(view[sent:])  # a record
        self._flush()

    def receive_exactly(self, count: int) -> bytes:
        """Receive `count` encrypted bytes."""
        data = bytearray(count)
        self.receive(memoryview(data))
        return bytes(data)

    def receive(self, view: memoryview) -> None:
        """Fill a buffer with encrypted data."""
        received = 0
        while received < len(view):
            try:
                # read() returns a count when it has a buffer
                received += int(self._tls.read(len(view) - received, view[received:]))
            except ssl.SSLWantReadError:
                self._fill()

    def receive_plain(self, view: memoryview) -> None:
        """Fill a buffer with plain data, which follow the last received record."""
        # OpenSSL leaves bytes after a record in memory (SSL_CTX_set_read_ahead is off).
        buffered = self._in.read(len(view))
        received = len(buffered)
        view[:received] = buffered
        while received < len(view):
            received += self._receive(view[received:])

    def _flush(self) -> None:
        if data := self._out.read():
            self.socket.sendall(data)

    def _fill(self) -> None:
        self._in.write(self._block[: self._receive(self._block)])

    def _receive(self, view: memoryview) -> int:
        count = self.socket.recv_into(view)
        if not count:
            raise ConnectionResetError("it closed the connection")
        return count
