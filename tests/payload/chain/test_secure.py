"""Encrypted connections between nodes, over loopback."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest

from launcher.payload.chain.secure import Cipher
from launcher.remote import certificate

OURS, OTHER = certificate.make(), certificate.make()
PATIENCE = 5.0


def both(server: Cipher, client: Callable[[socket.socket], object]) -> list[object]:
    """Let both sides greet; what each has then, or the name of its error."""
    said: list[object] = [None, None]

    def run(at: int, talk: Callable[[], object]) -> None:
        try:
            said[at] = talk()
        except OSError as error:
            said[at] = type(error).__name__

    ends = socket.socketpair()
    with ends[0], ends[1]:

        def serve() -> object:
            sock = server.accepted(ends[0], PATIENCE)
            sock.sendall(b"secret")
            return type(sock).__name__

        threads = [
            threading.Thread(target=run, args=(0, serve)),
            threading.Thread(target=run, args=(1, lambda: client(ends[1]))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
    return said


def reading(cipher: Cipher) -> Callable[[socket.socket], object]:
    def client(sock: socket.socket) -> object:
        return cipher.made(sock, PATIENCE).recv(100)

    return client


def test_both_have_the_certificate_of_the_copy() -> None:
    """And talk through TLS 1.3."""
    assert both(Cipher(OURS), reading(Cipher(OURS))) == ["Encrypted", b"secret"]


def test_without_one_nothing_is_wrapped() -> None:
    """As in a private network."""
    assert both(Cipher(None), reading(Cipher(None))) == ["socket", b"secret"]
    assert both(Cipher({}), reading(Cipher(None)))[1] == b"secret"


def test_another_certificate_is_refused() -> None:
    """By whoever sees it first; no byte comes through."""
    said = both(Cipher(OURS), reading(Cipher(OTHER)))

    assert b"secret" not in said
    assert said[1] == "SSLCertVerificationError"


def test_who_has_none_is_refused() -> None:
    """Though it trusts the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=OURS["certificate"])

    def client(sock: socket.socket) -> object:
        with context.wrap_socket(sock) as made:
            return made.recv(100)

    said = both(Cipher(OURS), client)

    assert b"secret" not in said
    assert "Error" in str(said[0])


def test_a_silent_stranger_is_not_waited_for() -> None:
    """Longer than it may take."""
    ends = socket.socketpair()
    began = time.monotonic()
    with ends[0], ends[1], pytest.raises(OSError):
        Cipher(OURS).accepted(ends[0], 0.2)

    assert time.monotonic() - began < PATIENCE
