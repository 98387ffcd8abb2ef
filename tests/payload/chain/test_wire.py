"""What two nodes say to each other, and who is believed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from launcher.payload.chain import wire

KEY = bytes(range(32))


def both(
    server: Callable[[socket.socket], object], client: Callable[[socket.socket], object]
) -> list[object]:
    """Let both sides talk; what each returns, or the name of its error."""
    said: list[object] = [None, None]

    def run(at: int, sock: socket.socket, talk: Callable[[socket.socket], object]) -> None:
        try:
            sock.settimeout(5)
            said[at] = talk(sock)
        except OSError as error:
            said[at] = type(error).__name__
        finally:
            wire.close(sock)

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
def test_who_knows_the_key_is_believed(want: bytes) -> None:
    """By both sides."""
    said = both(lambda sock: wire.greet(sock, KEY), lambda sock: wire.introduce(sock, KEY, want))

    assert said == [want, None]


def test_a_stranger_is_not() -> None:
    """Neither who connects nor who is connected to."""
    other = bytes(32)

    assert both(
        lambda sock: wire.greet(sock, KEY), lambda sock: wire.introduce(sock, other, wire.PULL)
    ) == ["Refused", "ConnectionResetError"]
    assert (
        both(
            lambda sock: wire.greet(sock, other), lambda sock: wire.introduce(sock, KEY, wire.PULL)
        )[0]
        == "Refused"
    )


def test_a_server_without_the_key_is_found_out() -> None:
    """It cannot answer, whatever it lets pass; nor can an answer be turned back on who sent it."""

    def pretend(sock: socket.socket) -> None:
        sock.sendall(bytes(32))
        said = wire.exactly(sock, 65)
        sock.sendall(said[:32])

    said = both(pretend, lambda sock: wire.introduce(sock, KEY, wire.PULL))
    assert said[1] == "Refused"


def test_what_is_wanted_may_not_be_changed() -> None:
    """It is part of the proof."""

    def change(sock: socket.socket) -> None:
        wire.introduce(_Changed(sock), KEY, wire.PULL)  # type: ignore[arg-type]

    assert both(lambda sock: wire.greet(sock, KEY), change)[0] == "Refused"


class _Changed:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def recv_into(self, view: memoryview) -> int:
        return self._sock.recv_into(view)

    def sendall(self, data: bytes) -> None:
        self._sock.sendall(data[:-1] + wire.GIVE)


def test_a_head_is_what_was_sent() -> None:
    """Another digest, number or copy does not pass."""
    identity, digest = bytes(32), bytes([7]) * 32
    head = wire.head(KEY, identity, wire.BYTES, 12, digest)

    assert wire.read_head(KEY, identity, head) == (wire.BYTES, 12, digest)
    for at in (2, 10, 40):
        changed = bytearray(head)
        changed[at] ^= 1
        with pytest.raises(wire.Refused):
            wire.read_head(KEY, identity, bytes(changed))
    with pytest.raises(wire.Refused):
        wire.read_head(KEY, bytes([1]) * 32, head)


def test_a_request_of_another_copy_is_refused() -> None:
    """And one with a stream that is none."""
    identity = "ab" * 32
    asked = [(0, 2, identity, bytes(3)), (0, 2, "cd" * 32, bytes(3)), (2, 2, identity, bytes(3))]
    said = [
        both(
            lambda sock: wire.asked(sock, identity, 3),
            lambda sock, each=each: wire.ask(sock, *each),  # type: ignore[misc]
        )[0]
        for each in asked
    ]

    assert said == [(0, 2, bytes(3)), "Refused", "Refused"]
