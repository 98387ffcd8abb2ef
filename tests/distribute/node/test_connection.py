"""Connections between nodes of a copy, over loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from launcher.app import certificates
from launcher.distribute.node.connection import Connection, Tls

OURS = certificates.make_certificate("copy")
DATA = os.urandom(300_000)


class Spy:
    """A pair of connections, with a record of the bytes from the server to the client."""

    def __init__(self, tls: Tls) -> None:
        self.bytes = bytearray()
        server_pair, client_pair = socket.socketpair(), socket.socketpair()
        self._sockets = (*server_pair, *client_pair)
        for sock in self._sockets:
            sock.settimeout(60)
        for arguments in (
            (server_pair[1], client_pair[0], True),
            (client_pair[0], server_pair[1], False),
        ):
            threading.Thread(target=self._forward, args=arguments, daemon=True).start()
        accepted: list[Connection] = []
        server = threading.Thread(target=lambda: accepted.append(tls.accept(server_pair[0], 5.0)))
        server.start()
        self.client = tls.connect(client_pair[1], 5.0)
        server.join(60)
        self.server = accepted[0]

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _forward(self, source: socket.socket, target: socket.socket, record: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if record:
                    self.bytes += data
                target.sendall(data)


def test_data_are_encrypted() -> None:
    """The receiver gets them in pieces of any size."""
    with Spy(Tls(OURS)) as spy:
        sender = threading.Thread(target=lambda: spy.server.sendall(b"secret" + DATA))
        sender.start()
        received = memoryview(bytearray(len(DATA)))

        assert spy.client.receive_exactly(6) == b"secret"
        spy.client.receive(received)
        sender.join(60)
        assert received == DATA
        assert DATA[:50] not in spy.bytes


def test_plain_and_encrypted_data_alternate() -> None:
    """Only the plain data are readable on the wire."""
    with Spy(Tls(OURS, plain=True)) as spy:

        def send() -> None:
            for size in (1, 100, len(DATA)):
                spy.server.sendall(b"secret words")
                spy.server.socket.sendall(DATA[:size])
            spy.server.sendall(b"end")

        sender = threading.Thread(target=send)
        sender.start()
        for size in (1, 100, len(DATA)):
            received = memoryview(bytearray(size))
            assert spy.client.receive_exactly(12) == b"secret words"
            spy.client.receive_plain(received)
            assert received == DATA[:size]
        assert spy.client.receive_exactly(3) == b"end"
        sender.join(60)
        assert DATA in spy.bytes
        assert b"secret" not in spy.bytes


def test_the_handshake_has_a_time_limit() -> None:
    """A silent client does not block the server."""
    server, client = socket.socketpair()
    began = time.monotonic()
    with server, client, pytest.raises(OSError):
        Tls(OURS).accept(server, 0.2)

    assert time.monotonic() - began < 60
