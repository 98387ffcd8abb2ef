"""How the probes of several nodes begin together: on loopback, with real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.processes


class Head:
    """The head's side, in a thread: which nodes it waits for, and what came of that."""

    def __init__(self, payload: SimpleNamespace, *others: str, **limits: Any) -> None:
        self.payload, self.limits = payload, {"reach": 10.0, "torch": 10.0, **limits}
        self.held = payload.node.reserve("127.0.0.1", 0)
        self.port = self.held.getsockname()[1]
        self.has_torch, self.gone = threading.Event(), list[str]()
        self.gathering = payload.start.Gathering(self.held, "word", list(others))
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        self.gone = self.gathering.wait(self.has_torch.is_set, **self.limits)

    def follow(self, node: str, own: Callable[[], bool] = lambda: True, **more: Any) -> None:
        """Do what the probe of another node does."""
        words: dict[str, Any] = {"nonce": "word", "reach": 5.0, "torch": 5.0, **more}
        self.payload.start.follow("127.0.0.1", self.port, node=node, own=own, **words)


@pytest.fixture
def head(payload: SimpleNamespace) -> Iterator[Callable[..., Head]]:
    """A head that waits for nodes; it ends with the test."""
    made = list[Head]()

    def make(*others: str, **limits: Any) -> Head:
        made.append(Head(payload, *others, **limits))
        made[-1].thread.start()
        return made[-1]

    yield make
    for each in made:
        each.has_torch.set()
        each.thread.join(20)
        each.held.close()


def test_nobody_goes_before_all_have_torch(head: Callable[..., Head]) -> None:
    """Neither those that have it, nor the head itself; then all at once."""
    one = head("b", "c")
    late, went = threading.Event(), list[str]()

    def follow(node: str, own: Callable[[], bool]) -> None:
        one.follow(node, own)
        went.append(node)

    threads = [
        threading.Thread(target=follow, args=("b", lambda: True)),
        threading.Thread(target=follow, args=("c", late.is_set)),
    ]
    for thread in threads:
        thread.start()
    one.has_torch.set()
    threads[0].join(0.5)
    before = list(went)
    late.set()
    for thread in (*threads, one.thread):
        thread.join(10)

    assert before == []
    assert (sorted(went), one.gone) == (["b", "c"], [])


def test_who_does_not_come_is_not_waited_for_longer_than_it_takes_to_come(
    head: Callable[..., Head],
) -> None:
    """The others go on without it."""
    one = head("b", "c", reach=0.5, torch=60.0)
    one.has_torch.set()
    one.follow("b")
    one.thread.join(10)

    assert one.gone == ["c"]


def test_who_is_slow_is_waited_for_until_its_time_is_over(head: Callable[..., Head]) -> None:
    """Then it is let go with the others: it may still be in time to meet them."""
    one = head("b", torch=0.5)
    one.has_torch.set()
    never = threading.Event()
    said = socket.create_connection(("127.0.0.1", one.port))
    said.settimeout(10)
    with said, said.makefile("rw") as slow:
        slow.write("word b\n")
        slow.flush()
        lines = [slow.readline(), slow.readline()]
    one.thread.join(10)

    assert lines == ["word here\n", "go\n"]
    assert (one.gone, never.is_set()) == ([], False)


def test_a_probe_that_ends_is_not_waited_for(head: Callable[..., Head]) -> None:
    """Its ranks could not import torch, for one."""
    one = head("b", torch=60.0)
    with socket.create_connection(("127.0.0.1", one.port)) as said:
        said.sendall(b"word b\n")
        assert said.recv(100) == b"word here\n"
    one.has_torch.set()
    one.thread.join(10)

    assert one.gone == ["b"]


@pytest.mark.parametrize(
    "line", [b"word c\n", b"other b\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 1000, b""]
)
def test_strangers_are_let_in_by_nobody(head: Callable[..., Head], line: bytes) -> None:
    """Another run's probe, another program, a scanner: the connection ends, and the right one still
    counts.
    """
    one = head("b")
    with socket.create_connection(("127.0.0.1", one.port)) as stranger:
        stranger.settimeout(10)
        told = b""
        with contextlib.suppress(OSError):  # the head may have hung up already
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            told = stranger.recv(100)
    one.has_torch.set()
    one.follow("b")
    one.thread.join(10)

    assert (told, one.gone) == (b"", [])


def test_a_stranger_at_the_heads_port_is_told_from_a_slow_head(payload: SimpleNamespace) -> None:
    """It does not know this run's word."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]

        def answer() -> None:
            said, _ = stranger.accept()
            said.recv(100)
            said.sendall(b"another here\n")
            said.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            payload.start.Unmet, match=f"something else answers at 127.0.0.1:{port}"
        ):
            payload.start.follow("127.0.0.1", port, "word", "b", lambda: True, 5.0, 5.0)
        thread.join(10)


def test_a_head_that_ends_meanwhile_is_said(payload: SimpleNamespace) -> None:
    """Its own report says why."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]

        def greet() -> None:
            said, _ = held.accept()
            said.recv(100)
            said.sendall(b"word here\n")
            said.close()

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(payload.start.Unmet, match="ended before all ranks had torch"):
            payload.start.follow("127.0.0.1", port, "word", "b", lambda: True, 5.0, 5.0)
        thread.join(10)


def test_a_port_that_nobody_opens_is_said_with_the_systems_words(payload: SimpleNamespace) -> None:
    """After its time, and not before."""
    with payload.node.reserve("127.0.0.1", 0) as held:
        port = held.getsockname()[1]

        with pytest.raises(
            payload.start.Unmet,
            match=f"did not open 127.0.0.1:{port} within 0 s: connection refused",
        ):
            payload.start.knock("127.0.0.1", port, 0.3)
