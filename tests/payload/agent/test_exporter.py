"""Metrics over HTTP: to whom, how much, for how long."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest

from launcher.payload.agent import exporter
from launcher.payload.agent.exporter import Exporter
from tests.payload.agent.stage import Clock
from tests.payload.agent.waits import until


@pytest.fixture
def serving() -> Iterator[Exporter]:
    """One that listens on loopback, and counts how often its text is made."""
    made = Exporter("127.0.0.1", 0, lambda now: f"vlaunch_made {now > 0:d}\n")
    made.turn()
    yield made
    made.close()


def port(of: Exporter) -> int:
    """Return where it listens."""
    assert of._server is not None
    return int(of._server.server_address[1])


def free(of: Exporter) -> int:
    """Return how many more readers it would serve now."""
    assert of._server is not None
    return of._server._free._value


def ask(of: Exporter, path: str = "/metrics", verb: str = "GET") -> tuple[int, str, str]:
    """Return status, kind and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port(of), timeout=10)
    connection.request(verb, path)
    answer = connection.getresponse()
    found = answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    connection.close()
    return found


def test_metrics_are_served(serving: Exporter) -> None:
    """As Prometheus wants them."""
    assert ask(serving) == (200, exporter.KIND, "vlaunch_made 1\n")
    assert ask(serving, "/metrics?x=1")[0] == 200


@pytest.mark.parametrize(
    ("verb", "path", "status"),
    [("GET", "/", 404), ("GET", "/../etc/passwd", 404), ("POST", "/metrics", 501)],
)
def test_nothing_else_is(serving: Exporter, verb: str, path: str, status: int) -> None:
    """Neither files nor verbs."""
    assert ask(serving, path, verb)[0] == status


def test_the_text_is_made_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask."""
    made: list[float] = []
    serving = Exporter("127.0.0.1", 0, lambda now: made.append(now) or "x 1\n")  # type: ignore[func-returns-value]
    clock = Clock()
    monkeypatch.setattr(exporter, "time", clock)
    for _ in range(5):
        assert serving.text() == "x 1\n"
    assert len(made) == 1
    clock.now += 1
    serving.text()
    assert len(made) == 2


def test_who_says_nothing_is_parted_with(
    serving: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the deadline, even when a letter comes now and then."""
    monkeypatch.setattr(exporter, "_DEADLINE", 0.3)
    with socket.create_connection(("127.0.0.1", port(serving)), 10) as reader:
        reader.settimeout(0.05)

        def parted() -> bool:
            try:
                reader.sendall(b"x")
                return reader.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(parted, "the connection is closed")


def test_too_many_readers_are_turned_away(serving: Exporter) -> None:
    """Those who are there are served all the same, and later others again."""
    slow = [socket.create_connection(("127.0.0.1", port(serving)), 10) for _ in range(8)]
    for each in slow:
        each.sendall(b"GET /metrics HTTP/1.0\r\n")
    until(lambda: free(serving) == 0, "8 readers")
    with socket.create_connection(("127.0.0.1", port(serving)), 10) as late:
        assert late.recv(100) == b""
    for each in slow:
        each.sendall(b"\r\n")
        assert each.recv(12) == b"HTTP/1.0 200"
        each.close()
    until(lambda: free(serving) == 8, "there is room again")
    assert ask(serving)[0] == 200


def test_a_port_that_is_taken_is_told_once(
    serving: Exporter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent goes on without, and tries again."""
    other = Exporter("127.0.0.1", port(serving), lambda _: "x 1\n")
    clock = Clock()
    monkeypatch.setattr(exporter, "time", clock)
    for _ in range(3):
        other.turn()
        clock.now += 10
    assert capsys.readouterr().out.count("no metrics on 127.0.0.1") == 1

    serving.close()
    other.turn()
    assert ask(other)[2] == "x 1\n"
    other.close()


def test_an_address_that_comes_later(capsys: pytest.CaptureFixture[str]) -> None:
    """As after a reboot, when Docker is earlier than the network."""
    early = Exporter("192.0.2.1", 0, lambda _: "")
    early.turn()
    early.close()

    assert "no metrics on 192.0.2.1 port 0" in capsys.readouterr().out
