"""The agent's HTTP server: addresses, clients, and deadlines."""

from __future__ import annotations

import gc
import http.client
import itertools
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from launcher.agent.link import queries, server
from launcher.agent.link.certificates import Certificates
from launcher.agent.link.server import HttpServer, HttpSite
from tests.agent.authority import Authority
from tests.agent.waits import until

Serve = Callable[..., HttpServer]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server of some sites for one test."""
    monkeypatch.setattr(server, "_RETRY", 0.05)
    created: list[HttpServer] = []

    def start(*sites: HttpSite, wait: bool = True) -> HttpServer:
        created.append(HttpServer(*sites))
        created[-1].start()
        if wait:
            until(lambda: len(created[-1].bound) == len(sites), "all sites listen")
        return created[-1]

    yield start
    for item in created:
        item.close()


def page(make: Callable[[float], str] = lambda now: f"vlaunch_made {now > 0:d}\n") -> HttpSite:
    """Return a metrics site on loopback."""
    return queries.metrics_site("127.0.0.1", 0, make)


def request(of: HttpServer, path: str = "/metrics", verb: str = "GET") -> tuple[int, str, str]:
    """Return status, type and text of an answer over TCP."""
    connection = http.client.HTTPConnection("127.0.0.1", of.bound["metrics"], timeout=60)
    connection.request(verb, path)
    answer = connection.getresponse()
    result = answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    connection.close()
    return result


def over_unix(path: Path, request: str = "/words") -> str:
    """Return the whole answer over a Unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(path))
        client.sendall(
            f"GET {request} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n".encode()
        )
        return b"".join(iter(lambda: client.recv(4096), b"")).decode()


async def echo(_: web.Request) -> web.Response:
    """Answer with two words."""
    return web.Response(text="two words")


async def broken(_: web.Request) -> web.Response:
    """Raise."""
    raise LookupError("no such thing")


def local(path: Path) -> HttpSite:
    """Return a site on a Unix socket."""
    results = [web.get("/words", echo), web.get("/broken", broken)]
    return HttpSite(name="local", routes=results, path=str(path))


def test_metrics_are_served(serve: Serve) -> None:
    """In Prometheus' format."""
    serving = serve(page())
    assert request(serving) == (200, queries.KIND, "vlaunch_made 1\n")
    assert request(serving, "/metrics?x=1")[0] == 200


@pytest.mark.parametrize(
    ("verb", "path", "status"),
    [("GET", "/", 404), ("GET", "/../etc/passwd", 404), ("POST", "/metrics", 405)],
)
def test_nothing_else_is_served(serve: Serve, verb: str, path: str, status: int) -> None:
    """Neither files nor other methods."""
    assert request(serve(page()), path, verb)[0] == status


def test_the_text_is_built_once_per_second(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of readers."""
    created: list[float] = []
    serving = serve(page(lambda now: created.append(now) or "x 1\n"))  # type: ignore[func-returns-value]
    monkeypatch.setattr(queries, "_FRESH", 3600.0)
    for _ in range(5):
        assert request(serving)[2] == "x 1\n"
    assert len(created) == 1
    monkeypatch.setattr(queries, "_FRESH", 0.0)
    request(serving)
    assert len(created) == 2


def test_idle_clients_are_disconnected(serve: Serve) -> None:
    """At the deadline, even if a character arrives now and then."""
    site = HttpSite(name="metrics", routes=[], host="127.0.0.1", seconds=0.3)
    with socket.create_connection(("127.0.0.1", serve(site).bound["metrics"]), 10) as reader:
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


def test_too_many_readers_are_rejected(serve: Serve) -> None:
    """Connected ones are served, and later ones again."""
    serving = serve(page())
    address = "127.0.0.1", serving.bound["metrics"]
    slow = [socket.create_connection(address, 10) for _ in range(8)]
    for item in slow:
        item.sendall(b"GET /metrics HTTP/1.0\r\n")
    with socket.create_connection(address, 10) as late:
        assert late.recv(100) == b""
    for item in slow:
        item.sendall(b"\r\n")
        assert item.recv(12) == b"HTTP/1.0 200"
        item.close()

    def again() -> bool:
        try:
            return request(serving)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    until(again, "there is room again")


def test_a_used_port(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported once, tried again, and affects no other site."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        late = serve(queries.metrics_site("127.0.0.1", port, lambda _: "x 1\n"), page(), wait=False)
        tried = iter(lambda: "metrics" in late.bound, None)
        until(lambda: next(tried), "the second site listens")
        until(lambda: "cannot serve metrics" in _printed(capsys), "it is told")
    until(lambda: late.bound.get("metrics") == port, "it listens once the port is free")
    assert request(late)[2] == "x 1\n"
    assert "cannot serve" not in capsys.readouterr().out


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_a_late_address(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """After a reboot, Docker may start before the network."""
    serve(queries.metrics_site("192.0.2.1", 0, lambda _: ""), wait=False)
    until(lambda: "metrics on 192.0.2.1 port 0" in _printed(capsys), "it is told")


def test_a_unix_socket(serve: Serve, tmp_path: Path) -> None:
    """Only its owner may connect; a dead agent's socket is replaced."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as remaining:
        remaining.bind(str(path))
    serve(local(path))

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert over_unix(path).endswith("\r\n\r\ntwo words")


def test_an_internal_error(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client gets its name, the log its location."""
    serve(local(tmp_path / "a.sock"))
    text = over_unix(tmp_path / "a.sock", "/broken")

    assert " 500 " in text.splitlines()[0]
    assert '{"error": "LookupError: no such thing"}' in text
    assert "GET /broken: Traceback" in capsys.readouterr().out


class Visitor:
    """A client that connects, and performs one step per turn of its loop."""

    def __init__(self, to: HttpServer, tls: ssl.SSLContext | None, says: bytes) -> None:
        self.to, self.tls, self.says = to, tls, says
        self.sock: socket.socket | None = None

    def step(self) -> None:
        """Connect; then continue the handshake, and send something once."""
        try:
            if self.sock is None:
                sock = socket.create_connection(("127.0.0.1", self.to.bound["visited"]))
                sock.setblocking(False)
                self.sock = (
                    self.tls.wrap_socket(sock, do_handshake_on_connect=False) if self.tls else sock
                )
            elif isinstance(self.sock, ssl.SSLSocket):
                self.sock.do_handshake()
            if self.says:
                self.sock.send(self.says)
                self.says = b""
            self.sock.recv(9)
        except OSError:  # usually with no data to read yet
            pass


@pytest.mark.parametrize("client", ["plain", "member", "silent member", "without certificate"])
def test_a_closed_server_leaves_no_socket_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, client: str
) -> None:
    """At any stage of a connection, and for later ones."""
    Authority().deliver(tmp_path, "gpu1")
    own = Certificates(server=True, folder=str(tmp_path))
    tls = Certificates(server=False, folder=str(tmp_path)).context()
    if client == "without certificate":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert tls is not None
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    says = b"" if client == "silent member" else b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    for turns, late in itertools.product(range(-8, 12), (False, True)):
        site = HttpSite(
            name="visited",
            routes=[],
            host="127.0.0.1",
            certificates=None if client == "plain" else own,
        )
        visited = HttpServer(site)
        visitor = Visitor(visited, None if client == "plain" else tls, says)
        _close_after(visited, visitor, turns, late=late)
        if visitor.sock is not None:
            visitor.sock.close()
        del visited, visitor
        gc.collect()  # a socket left open would be an error by now
    assert caplog.text == ""


def _close_after(visited: HttpServer, visitor: Visitor, turns: int, *, late: bool) -> None:
    """Close a server some turns after the visitor's first step, else before it; if `late`, at the
    end of the turn.
    """
    loop = visited._loop
    remaining = max(0, turns) + 8

    def turn() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining <= turns:
            visitor.step()
        if remaining == 0:
            close = visited._closing.set
            loop.call_soon(close) if late else close()
        if remaining > -20:
            loop.call_soon(turn)

    loop.call_soon(turn)
    loop.run_until_complete(visited._serve())
    loop.close()
