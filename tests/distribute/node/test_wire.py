"""The protocol between two nodes of a copy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from launcher.app import certificates
from launcher.distribute.node import wire
from launcher.distribute.node.connection import Connection, Tls

TLS = Tls(certificates.make_certificate("copy"))
Side = Callable[[Connection], object]


def run_both(server: Side, client: Side) -> list[object]:
    """Run both sides of a connection; return their results, or the names of their errors."""
    results: list[object] = [None, None]

    def run(number: int, sock: socket.socket, side: Side) -> None:
        try:
            with sock:
                connection = (TLS.connect if number else TLS.accept)(sock, 5.0)
                results[number] = side(connection)
        except OSError as error:
            results[number] = type(error).__name__

    sockets = socket.socketpair()
    threads = [
        threading.Thread(target=run, args=(number, sockets[number], side))
        for number, side in enumerate((server, client))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("purpose", [wire.PULL, wire.GIVE])
def test_the_server_confirms_the_purpose(purpose: bytes) -> None:
    """Both sides agree on the direction of the copy."""
    results = run_both(wire.confirm_purpose, lambda client: wire.send_purpose(client, purpose))

    assert results == [purpose, None]


def test_a_request_of_another_copy_is_rejected() -> None:
    """So is one for an invalid stream."""
    own, other = "ab" * 32, "cd" * 32
    requests = [(0, 2, own, bytes(3)), (0, 2, other, bytes(3)), (2, 2, own, bytes(3))]
    results = [
        run_both(
            lambda server: wire.receive_request(server, own, 3),
            lambda client, request=request: wire.send_request(client, *request),  # type: ignore[misc]
        )[0]
        for request in requests
    ]

    assert results == [(0, 2, bytes(3)), "ProtocolError", "ProtocolError"]
