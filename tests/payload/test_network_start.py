"""How the probes of several nodes begin together: on loopback, with real sockets."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.remote import certificate
from tests.relay import Relay

pytestmark = pytest.mark.processes
OURS, FOREIGN = certificate.make("run"), certificate.make("run")


class Head:
    """The head's side, in a thread: which nodes it waits for, and what came of that."""

    def __init__(self, payload: SimpleNamespace, *others: str, **limits: Any) -> None:
        self.payload, self.limits = payload, {"reach": 10.0, "torch": 10.0, **limits}
        self.held = payload.node.reserve("127.0.0.1", 0)
        self.port = self.held.getsockname()[1]
        self.has_torch, self.gone = threading.Event(), list[str]()
        self.certificate = self.limits.pop("certificate", OURS)
        self.gathering = payload.start.Gathering(self.held, "word", list(others), self.certificate)
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        self.gone = self.gathering.wait(self.has_torch.is_set, **self.limits)

    def connect(self) -> socket.socket:
        """Connect as the probe of another node does."""
        sock = socket.create_connection(("127.0.0.1", self.port), 10)
        if not self.certificate:
            return sock
        return self.payload.tls.contexts(self.certificate)[1].wrap_socket(sock)

    def follow(self, node: str, own: Callable[[], bool] = lambda: True, **more: Any) -> None:
        """Do what the probe of another node does."""
        words: dict[str, Any] = {
            "nonce": "word",
            "reach": 5.0,
            "torch": 5.0,
            "certificate": self.certificate,
            **more,
        }
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
    said = one.connect()
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
    with one.connect() as said:
        said.sendall(b"word b\n")
        assert said.recv(100) == b"word here\n"
    one.has_torch.set()
    one.thread.join(10)

    assert one.gone == ["b"]


@pytest.mark.parametrize("ours", ["", OURS], ids=["pods", "mutual TLS"])
@pytest.mark.parametrize(
    "line", [b"word c\n", b"other b\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 1000, b""]
)
def test_other_programs_are_not_let_in(head: Callable[..., Head], ours: str, line: bytes) -> None:
    """Another run's probe, another program, a scanner: the connection ends, and the right one still
    counts.
    """
    one = head("b", certificate=ours)
    with one.connect() as stranger:
        told = b""
        if line:
            with contextlib.suppress(OSError):  # the head may have hung up already
                stranger.sendall(line)
                told = stranger.recv(100)
    one.has_torch.set()
    one.follow("b")
    one.thread.join(10)

    assert (told, one.gone) == (b"", [])


def test_a_probe_of_another_run_is_refused(head: Callable[..., Head]) -> None:
    """It says why; it does not count as a node that has come."""
    one = head("b")
    with pytest.raises(one.payload.start.Unmet, match="its certificate is not this run's"):
        one.follow("b", certificate=FOREIGN)
    assert one.gathering.there == set()
    one.has_torch.set()
    one.follow("b")
    one.thread.join(10)

    assert one.gone == []


def test_a_caller_without_a_certificate_is_refused(head: Callable[..., Head]) -> None:
    """Though it knows the run's word, and trusts the head: it is told that it needs one."""
    one = head("b", reach=0.5)
    with pytest.raises(one.payload.start.Unmet, match="something else answers"):
        one.follow("b", certificate="")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=OURS)
    with (
        socket.create_connection(("127.0.0.1", one.port), 10) as sock,
        context.wrap_socket(sock) as caller,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        caller.recv(100)
    assert one.gathering.there == set()


@pytest.mark.parametrize("at", [0, 3, 20, -1])
def test_what_a_relay_changes_lets_nothing_go(head: Callable[..., Head], at: int) -> None:
    """Whichever byte it is, of the handshake or of the word to go on; the node says what
    happened.
    """
    one = head("b", reach=0.5)
    changing = threading.Event()
    if at >= 0:
        changing.set()

    def has_torch() -> bool:
        changing.set()
        one.has_torch.set()
        return True

    def alter(block: bytes) -> bytes:
        if not changing.is_set():
            return block
        return block[:at] + bytes([255 - block[at]]) + block[at % len(block) + 1 :]

    with Relay(one.port, alter) as relay, pytest.raises(one.payload.start.Unmet) as caught:
        one.payload.start.follow("127.0.0.1", relay.port, "word", "b", has_torch, 5.0, 5.0, OURS)

    assert "TLS failed: " in str(caught.value)


def test_a_stranger_at_the_heads_port_is_told_from_a_slow_head(payload: SimpleNamespace) -> None:
    """It does not know this run's word, or does not speak TLS."""
    for ours, why in (("", "does not speak as this run's probe"), (OURS, "TLS failed")):
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.listen()
            port = stranger.getsockname()[1]

            def answer(stranger: socket.socket = stranger) -> None:
                said, _ = stranger.accept()
                said.recv(1000)
                said.sendall(b"another here\n")
                said.close()

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(
                payload.start.Unmet, match=f"something else answers at 127.0.0.1:{port}: .*{why}"
            ):
                payload.start.follow("127.0.0.1", port, "word", "b", lambda: True, 5.0, 5.0, ours)
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
