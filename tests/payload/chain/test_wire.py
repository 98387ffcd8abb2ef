"""What two nodes say to each other inside of TLS."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from launcher.payload.chain import wire
from launcher.payload.chain.secure import Connection, Tls
from launcher.remote import certificate

TLS = Tls(certificate.make("copy"))
Talk = Callable[[Connection], object]


def both(server: Talk, client: Talk) -> list[object]:
    """Let both sides talk; what each returns, or the name of its error."""
    said: list[object] = [None, None]

    def run(at: int, sock: socket.socket, talk: Talk) -> None:
        try:
            with sock:
                said[at] = talk((TLS.made if at else TLS.accepted)(sock, 5.0))
        except OSError as error:
            said[at] = type(error).__name__

    ends = socket.socketpair()
    threads = [
        threading.Thread(target=run, args=(at, ends[at], talk))
        for at, talk in enumerate((server, client))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return said


@pytest.mark.parametrize("want", [wire.PULL, wire.GIVE])
def test_what_is_wanted_is_confirmed(want: bytes) -> None:
    """By the side that was connected to."""
    assert both(wire.greet, lambda client: wire.introduce(client, want)) == [want, None]


def test_a_request_of_another_copy_is_refused() -> None:
    """And one with a stream that is none."""
    identity = "ab" * 32
    asked = [(0, 2, identity, bytes(3)), (0, 2, "cd" * 32, bytes(3)), (2, 2, identity, bytes(3))]
    said = [
        both(
            lambda server: wire.asked(server, identity, 3),
            lambda client, each=each: wire.ask(client, *each),  # type: ignore[misc]
        )[0]
        for each in asked
    ]

    assert said == [(0, 2, bytes(3)), "Refused", "Refused"]
