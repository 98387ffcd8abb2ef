"""The common start of the probes of several nodes, with real sockets on loopback."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.app import certificates
from tests.relay import Relay

pytestmark = pytest.mark.processes
OURS, FOREIGN = (
    certificates.make_certificate("run"),
    certificates.make_certificate("run"),
)


class Ranks:
    """The ranks of a node, with scripted progress. They are released without the `absent` nodes;
    `lost` ones failed after the release.
    """

    def __init__(self, payload: SimpleNamespace, *, ready: bool = True, met: bool = True) -> None:
        self.payload, self.ready, self.met = payload, threading.Event(), threading.Event()
        self.dead, self.released = threading.Event(), threading.Event()
        self.absent, self.lost = list[str](), list[str]()
        for event, now in ((self.ready, ready), (self.met, met)):
            if now:
                event.set()

    def have_torch(self) -> bool:
        return self.progress(self.ready)

    def have_met(self) -> bool:
        return self.progress(self.met)

    def progress(self, event: threading.Event) -> bool:
        if self.dead.is_set():
            raise self.payload.start.RendezvousError("stopped: rank 7 ended")
        return event.is_set()

    def release(self, absent: Sequence[str]) -> None:
        self.absent = list(absent)
        self.released.set()

    def lose(self, node: str) -> None:
        self.lost.append(node)
        self.met.set()


class Head:
    """The head's part, in a thread."""

    def __init__(
        self, payload: SimpleNamespace, *others: str, met: bool = True, **limits: Any
    ) -> None:
        self.payload, self.limits = payload, {"reach": 10.0, "torch": 10.0, **limits}
        self.listener = payload.node.reserve_port("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.ranks = Ranks(payload, ready=False, met=met)
        self.has_torch, self.error = self.ranks.ready, ""
        self.certificate = self.limits.pop("certificate", OURS)
        self.gathering = payload.start.Gathering(
            self.listener, "word", list(others), self.ranks, self.certificate
        )
        self.thread = threading.Thread(target=self.run)

    @property
    def absent(self) -> list[str]:
        """Return the nodes that it gave up."""
        return self.ranks.absent

    def run(self) -> None:
        try:
            self.gathering.meet(**self.limits)
        except self.payload.start.RendezvousError as error:
            self.error = str(error)

    def connect(self) -> socket.socket:
        """Connect like the probe of another node."""
        sock = socket.create_connection(("127.0.0.1", self.port), 10)
        if not self.certificate:
            return sock
        return self.payload.tls.contexts(self.certificate)[1].wrap_socket(sock)

    def follow(self, node: str, ranks: Ranks | None = None, **options: Any) -> None:
        """Act as the probe of another node."""
        arguments: dict[str, Any] = {
            "nonce": "word",
            "reach": 5.0,
            "torch": 5.0,
            "certificate": self.certificate,
            **options,
        }
        ranks = ranks or Ranks(self.payload)
        self.payload.start.follow(ranks, "127.0.0.1", self.port, node=node, **arguments)


@pytest.fixture
def start_head(payload: SimpleNamespace) -> Iterator[Callable[..., Head]]:
    """A function that starts a head; all stop with the test."""
    heads = list[Head]()

    def start(*others: str, **limits: Any) -> Head:
        heads.append(Head(payload, *others, **limits))
        heads[-1].thread.start()
        return heads[-1]

    yield start
    for head in heads:
        head.has_torch.set()
        head.ranks.met.set()
        head.thread.join(60)
        head.listener.close()


def test_no_node_is_released_before_all_have_torch(start_head: Callable[..., Head]) -> None:
    """Then all are released at once."""
    head = start_head("b", "c")
    early, late = Ranks(head.payload), Ranks(head.payload, ready=False)
    threads = [
        threading.Thread(target=head.follow, args=("b", early)),
        threading.Thread(target=head.follow, args=("c", late)),
    ]
    for thread in threads:
        thread.start()
    head.has_torch.set()
    before = early.released.wait(0.5)
    late.ready.set()
    for thread in (*threads, head.thread):
        thread.join(60)

    assert not before
    assert early.released.is_set() and late.released.is_set()
    assert head.absent == []


def test_a_node_that_does_not_connect_in_time_is_absent(start_head: Callable[..., Head]) -> None:
    """The others continue without it."""
    head = start_head("b", "c", reach=0.5, torch=60.0)
    head.has_torch.set()
    head.follow("b")
    head.thread.join(60)

    assert head.absent == ["c"]


def test_a_slow_node_is_released_at_the_time_limit(start_head: Callable[..., Head]) -> None:
    """It may still be in time to meet the others."""
    head = start_head("b", torch=5.0)
    head.has_torch.set()
    connection = head.connect()
    with connection, connection.makefile("rw") as slow:
        slow.write("word b\n")
        slow.flush()
        lines = [slow.readline(), slow.readline()]
    head.thread.join(60)

    assert lines == ["word here\n", "go\n"]
    assert head.absent == []


def test_a_probe_that_exits_is_absent(start_head: Callable[..., Head]) -> None:
    """Its ranks may have failed to import torch."""
    head = start_head("b", torch=60.0)
    with head.connect() as connection:
        connection.sendall(b"word b\n")
        assert connection.recv(100) == b"word here\n"
    head.has_torch.set()
    head.thread.join(60)

    assert head.absent == ["b"]


@pytest.mark.parametrize("ready", [False, True])
def test_a_node_with_an_exited_rank_is_absent(start_head: Callable[..., Head], ready: bool) -> None:
    """Its probe disconnects at once; the others continue without it."""
    head = start_head("b", "c", reach=60.0, torch=60.0)
    broken = Ranks(head.payload, ready=ready)
    broken.dead.set()
    with pytest.raises(head.payload.start.RendezvousError, match="rank 7 ended"):
        head.follow("b", broken)
    head.has_torch.set()
    head.follow("c")
    head.thread.join(60)

    assert (head.absent, head.ranks.lost, head.error) == (["b"], [], "")


@pytest.mark.parametrize("own", ["", OURS], ids=["pods", "mutual TLS"])
def test_no_node_waits_for_a_head_with_an_exited_rank(
    start_head: Callable[..., Head], own: str
) -> None:
    """Neither a connected one nor one that connects later."""
    head = start_head("b", "c", reach=60.0, torch=60.0, certificate=own)
    head.ranks.dead.set()
    message = "^stopped: the head's probe at .* ended before all ranks had met: rank 7 ended$"
    for node in ("b", "c"):
        ranks = Ranks(head.payload, ready=False)
        with pytest.raises(head.payload.start.RendezvousError, match=message):
            head.follow(node, ranks)
        assert not ranks.released.is_set()
    head.thread.join(60)

    assert not head.thread.is_alive()
    assert head.error == "stopped: rank 7 ended"


@pytest.mark.parametrize("dead", ["head", "other"])
def test_a_rank_that_exits_after_the_release_is_lost(
    start_head: Callable[..., Head], dead: str
) -> None:
    """With its node; if it is the head's, no node waits for it."""
    head = start_head("b", met=False)
    head.has_torch.set()
    ranks = Ranks(head.payload, met=False)

    def end() -> None:
        assert ranks.released.wait(60)
        (head.ranks if dead == "head" else ranks).dead.set()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(head.payload.start.RendezvousError, match=r"^stopped: .*rank 7 ended$"):
        head.follow("b", ranks)
    thread.join(60)
    head.thread.join(60)

    assert (head.absent, head.ranks.lost) == ([], [] if dead == "head" else ["b"])
    assert head.error == ("stopped: rank 7 ended" if dead == "head" else "")


@pytest.mark.parametrize("own", ["", OURS], ids=["pods", "mutual TLS"])
@pytest.mark.parametrize(
    "line", [b"word c\n", b"other b\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 1000, b""]
)
def test_other_programs_are_rejected(
    start_head: Callable[..., Head], own: str, line: bytes
) -> None:
    """The connection of another run's probe or a port scanner is closed; the real probe can still
    connect.
    """
    head = start_head("b", certificate=own)
    with head.connect() as connection:
        answer = b""
        if line:
            with contextlib.suppress(OSError):  # the head may have closed it already
                connection.sendall(line)
                answer = connection.recv(100)
    head.has_torch.set()
    head.follow("b")
    head.thread.join(60)

    assert (answer, head.absent) == (b"", [])


def test_a_probe_of_another_run_is_rejected(start_head: Callable[..., Head]) -> None:
    """Its error has the reason, and its node is not connected."""
    head = start_head("b")
    with pytest.raises(
        head.payload.start.RendezvousError, match="its certificate is from another run"
    ):
        head.follow("b", certificate=FOREIGN)
    assert head.gathering.connected == set()
    head.has_torch.set()
    head.follow("b")
    head.thread.join(60)

    assert head.absent == []


def test_a_client_without_a_certificate_is_rejected(start_head: Callable[..., Head]) -> None:
    """Knowing the run's nonce does not help; the TLS alert names the reason."""
    head = start_head("b", reach=0.5)
    with pytest.raises(head.payload.start.RendezvousError, match="something else answers"):
        head.follow("b", certificate="")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=OURS)
    with (
        socket.create_connection(("127.0.0.1", head.port), 10) as sock,
        context.wrap_socket(sock) as client,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        client.recv(100)
    assert head.gathering.connected == set()


@pytest.mark.parametrize("offset", [0, 3, 20, -1])
def test_changed_bytes_release_no_node(start_head: Callable[..., Head], offset: int) -> None:
    """A relay changes one byte of the handshake (0, 3, 20) or of the release (-1); the node's error
    names TLS.
    """
    head = start_head("b", reach=0.5)
    changing = threading.Event()
    if offset >= 0:
        changing.set()

    class Changing(Ranks):
        def have_torch(self) -> bool:
            changing.set()
            head.has_torch.set()
            return True

    def alter(block: bytes) -> bytes:
        if not changing.is_set():
            return block
        changed = bytes([255 - block[offset]])
        return block[:offset] + changed + block[offset % len(block) + 1 :]

    with (
        Relay(head.port, alter) as relay,
        pytest.raises(head.payload.start.RendezvousError) as error,
    ):
        ranks = Changing(head.payload)
        head.payload.start.follow(ranks, "127.0.0.1", relay.port, "word", "b", 5.0, 5.0, OURS)

    assert "TLS failed: " in str(error.value)


@pytest.mark.parametrize(("own", "reason"), [("", "is not this run's probe"), (OURS, "TLS failed")])
def test_another_program_at_the_heads_port_is_not_a_slow_head(
    payload: SimpleNamespace, own: str, reason: str
) -> None:
    """Its answer does not have this run's nonce, or is not TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"another here\n")

        thread = threading.Thread(target=answer)
        thread.start()
        message = f"something else answers at 127.0.0.1:{port}: .*{reason}"
        with pytest.raises(payload.start.RendezvousError, match=message):
            payload.start.follow(Ranks(payload), "127.0.0.1", port, "word", "b", 5.0, 5.0, own)
        thread.join(60)


def test_a_head_that_exits_early_is_an_error(payload: SimpleNamespace) -> None:
    """The head's own report has the reason."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"word here\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(
            payload.start.RendezvousError, match=r"^stopped: .* ended before all ranks had met"
        ):
            payload.start.follow(Ranks(payload), "127.0.0.1", port, "word", "b", 5.0, 5.0)
        thread.join(60)


def test_a_closed_port_is_an_error_after_the_time_limit(payload: SimpleNamespace) -> None:
    """The message has the system's reason."""
    with payload.node.reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]

        with pytest.raises(
            payload.start.RendezvousError,
            match=f"did not open 127.0.0.1:{port} within 0 s: connection refused",
        ):
            payload.start.connect("127.0.0.1", port, 0.3)
