"""A hostile Docker API: logs end in time, in bounded memory, with lines or one of our errors."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import paramiko
import pytest

from launcher.core.errors import NodeError
from launcher.ssh import channel, docker_api
from launcher.ssh.fleet import Fleet
from launcher.ssh.output import Lines
from tests.hostile.adversary import Adversary, inventory_of, marker
from tests.hostile.conftest import Start

Respond = Callable[[str], Iterable[bytes]]


def speaking(respond: Respond) -> Callable[[paramiko.Channel, str], None]:
    """Play `docker system dial-stdio`; `respond` returns the HTTP response to a path."""

    def act(session: paramiko.Channel, line: str) -> None:
        session.sendall(marker(line))
        session.sendall_stderr(marker(line))
        received = b""
        while data := session.recv(4096):
            received += data
            while b"\r\n\r\n" in received:
                request, _, received = received.partition(b"\r\n\r\n")
                for piece in respond(request.split()[1].decode()):
                    session.sendall(piece)

    return act


def http(body: object, status: str = "200 OK", headers: str = "") -> Iterable[bytes]:
    data = json.dumps(body).encode()
    yield (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length:"
        f" {len(data)}\r\n{headers}\r\n".encode()
        + data
    )


def good(path: str) -> Iterable[bytes]:
    return http(
        {"ApiVersion": "1.44"} if path == "/version" else {"Id": "c", "Config": {"Tty": False}}
    )


def call(server: Adversary, query: Callable[[Any], Any]) -> Any:
    began = time.monotonic()
    with Fleet(inventory_of(server)) as nodes, docker_api.errors("gpu01"):
        try:
            return query(nodes.docker("gpu01"))
        finally:
            assert time.monotonic() - began < 60


def test_a_login_shell_that_never_stops_printing(
    adversary: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is abandoned, and its output discarded."""
    monkeypatch.setattr(docker_api, "DIAL_TIMEOUT", 0.3)
    monkeypatch.setattr(channel, "GRACE", 0.3)

    def act(session: paramiko.Channel, _: str) -> None:
        while server.send(session, b"noise\n" * 1000):
            pass

    server = adversary(act)
    with pytest.raises(NodeError):
        call(server, lambda client: client.api_version)
    assert server.sent < 64 * 2**20


def test_an_answer_without_end(adversary: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container list of a gigabyte is an error."""
    monkeypatch.setattr(docker_api, "_LIMIT", 2**20)

    def respond(path: str) -> Iterable[bytes]:
        if path == "/version":
            return good(path)
        return [
            (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length:"
                b" 1000000000\r\n\r\n"
            ),
            *[b"[" * 2**15] * 100,
        ]

    with pytest.raises(NodeError, match="API did not answer"):
        call(adversary(speaking(respond)), lambda client: client.containers())


def test_a_frame_of_four_gigabytes(adversary: Start) -> None:
    """Its bytes are passed on as they arrive, and long lines cut."""
    header = b"\x01\0\0\0\xff\xff\xff\xff"

    def respond(path: str) -> Iterable[bytes]:
        if "/logs" not in path:
            return good(path)
        data = header + b"first\n" + b"x" * 3_000_000 + b"\nlast\n" + b"y" * 2**17
        return [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (2**40), data]

    lines: list[str] = []

    def read(client: Any) -> None:
        whole = Lines(lines.append)
        for chunk in client.logs("c", stream=True, follow=True):
            assert len(chunk) <= 2**16
            whole.feed(chunk)
            if lines[-1:] == ["last"]:
                return

    tracemalloc.start()
    call(adversary(speaking(respond)), read)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line[:5] for line in lines] == ["first", "xxxxx", "last"]
    assert peak < 32 * 2**20


def test_a_redirection_leads_nowhere_else(adversary: Start) -> None:
    """The control machine connects to no address from a node."""
    with Adversary.listening() as (port, connections):

        def respond(path: str) -> Iterable[bytes]:
            if path == "/version":
                return good(path)
            return http({}, "302 Found", f"Location: http://127.0.0.1:{port}/secret\r\n")

        with pytest.raises(NodeError):
            call(adversary(speaking(respond)), lambda client: client.inspect_container("c"))
    assert connections == []


@pytest.mark.parametrize(
    "body", [None, 1, [], {}, {"Config": None}, {"Config": {"Tty": {}}}, [[[]]], "x", [None]]
)
def test_answers_of_another_form(adversary: Start, body: object) -> None:
    """Fields that the SDK relies on are missing: the error is ours."""

    def respond(path: str) -> Iterable[bytes]:
        return good(path) if path == "/version" else http(body)

    try:
        call(
            adversary(speaking(respond)),
            lambda client: list(client.logs("c", stream=True, follow=False)),
        )
    except NodeError as error:
        assert error.node == "gpu01"
