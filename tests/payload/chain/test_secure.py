"""Connections between nodes of a copy, over loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from launcher.payload.chain.secure import Connection, Tls
from launcher.remote import certificate

OURS = certificate.make("copy")
DATA = os.urandom(300_000)


class Spy:
    """A pair of connections, and the bytes that passed from the server to the client."""

    def __init__(self, tls: Tls) -> None:
        self.seen = bytearray()
        ends, middle = socket.socketpair(), socket.socketpair()
        self._ends = (*ends, *middle)
        for each in self._ends:
            each.settimeout(10)
        threading.Thread(target=self._pass, args=(ends[1], middle[0], True), daemon=True).start()
        threading.Thread(target=self._pass, args=(middle[0], ends[1], False), daemon=True).start()
        accepted: list[Connection] = []
        server = threading.Thread(target=lambda: accepted.append(tls.accepted(ends[0], 5.0)))
        server.start()
        self.client = tls.made(middle[1], 5.0)
        server.join(10)
        self.server = accepted[0]

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._ends:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _pass(self, source: socket.socket, target: socket.socket, note: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if note:
                    self.seen += data
                target.sendall(data)


def test_what_is_sent_is_received_and_cannot_be_read_on_the_way() -> None:
    """In as many pieces as the receiver likes."""
    with Spy(Tls(OURS)) as spy:
        sender = threading.Thread(target=lambda: spy.server.sendall(b"secret" + DATA))
        sender.start()
        received = memoryview(bytearray(len(DATA)))

        assert spy.client.exactly(6) == b"secret"
        spy.client.receive(received)
        sender.join(10)
        assert received == DATA
        assert DATA[:50] not in spy.seen


def test_plain_bytes_follow_what_is_encrypted() -> None:
    """Alternately; only they can be read on the way."""
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
            assert spy.client.exactly(12) == b"secret words"
            spy.client.receive_plain(received)
            assert received == DATA[:size]
        assert spy.client.exactly(3) == b"end"
        sender.join(10)
        assert DATA in spy.seen
        assert b"secret" not in spy.seen


def test_a_silent_stranger_is_not_waited_for() -> None:
    """Longer than it may take."""
    ends = socket.socketpair()
    began = time.monotonic()
    with ends[0], ends[1], pytest.raises(OSError):
        Tls(OURS).accepted(ends[0], 0.2)

    assert time.monotonic() - began < 5.0
