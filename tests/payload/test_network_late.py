"""How a gate sees that it comes late: on loopback, with real sockets. Gates and agents as programs
are in `agent/test_main.py`.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.payload.conftest import FOLDER


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program, as it stands in a container, with less patience."""
    sys.path.insert(0, str(FOLDER))
    try:
        import network_late

        monkeypatch.setattr(network_late, "EVERY", 0.05)
        monkeypatch.setattr(network_late, "ASKED", 0.1)
        monkeypatch.setattr(network_late, "HEARD", 1.0)
        yield network_late
    finally:
        sys.path.remove(str(FOLDER))


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Let somebody listen, and do something with each caller, who stays; yield the port."""
    with contextlib.ExitStack() as callers:
        server = callers.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    answer(callers.enter_context(server.accept()[0]))

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def looking(late: ModuleType, rank: int, port: int, ending: float = 0.0, **other: Any) -> Any:
    """Return what a gate looks with."""
    told = {"name": "127.0.0.1", "address": "127.0.0.1", **other}
    return late.Look(rank, told["name"], told["address"], [port], ending)


@pytest.mark.parametrize(
    ("answer", "who"),
    [
        (lambda caller: caller.sendall(b'{"challenge": "5eed"}\n'), "past"),
        (lambda _: None, "past"),
        (lambda caller: caller.sendall(b"\xff\x00\x7f"), "past"),
        (lambda caller: caller.sendall(b'{"challenge": "gate"}\n'), "gate"),
        (lambda caller: caller.close(), ""),
    ],
    ids=["agent", "ranks", "replicas", "gate", "nobody"],
)
def test_who_listens_is_past_his_gate(
    late: ModuleType, answer: Callable[[socket.socket], object], who: str
) -> None:
    """Unless he says that he is a gate himself, or says nothing and goes."""
    with listening(answer) as port:
        assert late.listens("127.0.0.1", port) == who
    assert late.listens("127.0.0.1", port) == ""


def test_a_gate_takes_no_gate_for_late(late: ModuleType) -> None:
    """The first one listens where others look; who only looks is a gate, too."""
    port = free_port()
    first, other = looking(late, 0, port), looking(late, 1, port)
    ended: list[str] = []
    first.start(lambda: ended.append("first"))
    with until_listens(port):
        other.turn()
    first.stop()

    assert (first.found, other.found, ended) == (False, False, [])
    socket.create_server(("127.0.0.1", port)).close()  # it is left to what starts behind the gate


def test_who_comes_is_past_his_gate(late: ModuleType) -> None:
    """Whatever he says: an agent answers a challenge, a rank speaks first."""
    port = free_port()
    first, ended = looking(late, 0, port), threading.Event()
    first.start(ended.set)
    with until_listens(port) as caller:
        caller.sendall(b"hello")
        assert ended.wait(10)
    first.stop()

    assert (
        first.late == f"127.0.0.1 looks for the server on port {port} already, and did so 0 s ago"
    )


def test_who_is_being_ended_does_not_count(
    late: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is past his gate must be seen for as long as a pod may take to end."""
    now = 100.0
    who = "past"
    monkeypatch.setattr(late.time, "monotonic", lambda: now)
    monkeypatch.setattr(late, "listens", lambda *_: who)
    other = looking(late, 1, 29560, ending=90.0)
    other.turn()
    now, who = now + 60.0, "gate"  # the pod is gone, and its successor at the gate
    other.turn()
    now, who = now + 60.0, "past"
    other.turn()
    now += 89.0
    other.turn()
    assert not other.found
    now += 1.0
    other.turn()

    assert other.late == "rank 0 serves on port 29560 already, and did so 90 s ago"


def test_a_first_node_that_comes_back_has_another_address(
    late: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pods do: who waits at the old one waits in vain. A name that nobody knows for a moment
    says nothing.
    """
    other = looking(late, 1, free_port(), name="pair-0.pair-ranks", address="10.0.0.7")
    answers: list[Any] = [socket.gaierror("no"), ["10.0.0.7"], ["10.0.0.8", "10.0.0.9"]]

    real = socket.getaddrinfo

    def asked(name: str, *more: Any, **others: Any) -> Any:
        if name != other.name:  # threads of other tests look up names, too
            return real(name, *more, **others)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [(0, 0, 0, "", (each, 0)) for each in answer]

    monkeypatch.setattr(late.socket, "getaddrinfo", asked)
    monkeypatch.setattr(late, "listens", lambda *_: "")
    found = []
    for _ in range(3):
        other.turn()
        found.append(other.moved)

    assert found == [False, False, True]


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def until_listens(port: int) -> Iterator[socket.socket]:
    """Come to a port as soon as somebody listens there."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            with socket.create_connection(("127.0.0.1", port), 10) as caller:
                yield caller
            return
        threading.Event().wait(0.05)
    pytest.fail(f"nobody listens on {port}")
