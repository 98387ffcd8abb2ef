"""Attacks on the connection between the agents of two nodes: nothing is executed, and a log names
the cause.

Who attacks stands on the worker's host: has the head's address there, and connects to the head from
the head's own host.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

from launcher.lab.layout import Host
from launcher.payload.agent.node import RUN, Order
from launcher.remote.certificate import Authority
from tests.integration.batches import until
from tests.integration.conftest import Practice
from tests.integration.servers import asking, lost, record, serve
from tests.relay import Relay

pytestmark = [pytest.mark.lab, pytest.mark.long]

PORT = 29560
FOLDER = "/root/.vlaunch/lab/secrets"
ORDER = Order(generation=1, phase=RUN, argv=("touch", "/tmp/owned"))
ORDERS = {"head_boot": "evil", "number": 1, "orders": {"owned": ORDER.as_json()}, "ray": ""}
NEVER = datetime(2100, 1, 1, tzinfo=timezone.utc)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_APPLICATION_DATA = b"\x17"  # the type of TLS records that are encrypted
T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster(practice: Practice) -> Practice:
    """Two nodes without Ray: all that connects them is their agents."""
    practice.bring_up_anew(lambda document: document.update(ray="none"))
    return practice


@pytest.fixture
def whole(cluster: Practice) -> Iterator[Practice]:
    """The cluster, in which both agents are connected before and after."""
    until(lambda: connected(cluster), "the agents are connected", 60)
    yield cluster
    until(lambda: connected(cluster), "the agents are connected again", 90)


@pytest.fixture
def door(whole: Practice) -> Iterator[socket.socket]:
    """A socket on the worker that listens where its agent looks for the head's."""
    head, worker = whole.lab.hosts
    address = (f"{head.ip}/32", "dev", "lo")
    whole.on("node2", "ip", "address", "add", *address)
    made = within(worker, lambda: socket.create_server((head.ip, PORT)))
    try:
        yield made
    finally:
        made.close()
        whole.on("node2", "ip", "address", "del", *address)


class Attack:
    """Changes the next encrypted data that passes once it is `armed`."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self.armed, self._change = False, change

    def __call__(self, data: bytes) -> bytes:
        if self.armed and data[:1] == _APPLICATION_DATA:
            self.armed = False
            return self._change(data)
        return data


class Middle:
    """An HTTPS server in the head's place, which answers what `answer` says to a path and a body;
    `pair` is its certificate and private key.
    """

    def __init__(
        self, door: socket.socket, pair: Path, answer: Callable[[str, bytes], tuple[int, bytes]]
    ) -> None:
        self._connections = connections = list[socket.socket]()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                connections.append(self.connection)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, said = answer(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair)
        self._server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.socket.close()
        self._server.socket = context.wrap_socket(door, server_side=True)

    def __enter__(self) -> Middle:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for each in self._connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("victim", ["node2", "node1"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: clear(ORDERS) + data, "TLS failed: wrong version number"),
        (lambda data: data + data, "TLS failed: decryption failed or bad record mac"),
    ],
    ids=["orders in the clear", "what has passed before"],
)
def test_a_relay_can_only_pass_on(
    whole: Practice,
    door: socket.socket,
    change: Callable[[bytes], bytes],
    why: str,
    victim: str,
) -> None:
    """What it adds ends the connection; the log of who receives it says why, and the agents connect
    once more.
    """
    attack, here = Attack(change), "the head's agent is here"
    ways = (attack, bytes) if victim == "node2" else (bytes, attack)
    before = log(whole, "node2").count(here)
    with Relay(0, *ways, door=door.dup(), connect=lambda: to_head(whole)):
        until(lambda: log(whole, "node2").count(here) > before, "the worker is connected", 60)
        attack.armed = True
        until(lambda: why in log(whole, victim), "its log says why", 60)

    assert not attack.armed
    assert not executed(whole)


@pytest.mark.parametrize(
    ("whose", "why"),
    [
        ("of another authority", "the certificate is not accepted: unable to get local issuer"),
        ("the worker's own", "the certificate is not accepted: IP address mismatch"),
    ],
)
def test_a_worker_takes_orders_from_its_head_alone(
    whole: Practice, door: socket.socket, tmp_path: Path, whose: str, why: str
) -> None:
    """Not from who has the head's address, and not from another node of the cluster."""
    pair = tmp_path / "pair.pem"
    head, _ = whole.lab.hosts
    stranger = Authority("lab", NEVER).sign("node1", head.ip, NEVER).reveal()
    own = whole.on("node2", "cat", f"{FOLDER}/AGENT_CERTIFICATE")
    pair.write_text(own if whose == "the worker's own" else stranger)
    with Middle(door, pair, lambda *_: (200, json.dumps(ORDERS).encode())):
        until(lambda: why in log(whole, "node2"), "the worker says why", 60)

    assert not executed(whole)


def test_these_orders_would_be_executed(
    whole: Practice, door: socket.socket, tmp_path: Path
) -> None:
    """From who has the head's private key, so that the other tests have something to prevent."""
    pair = tmp_path / "pair.pem"
    pair.write_text(whole.on("node1", "cat", f"{FOLDER}/AGENT_CERTIFICATE"))
    with Middle(door, pair, lambda *_: (200, json.dumps(ORDERS).encode())):
        until(lambda: executed(whole), "the order is carried out", 60)
    whole.docker("node2", "exec", "vlaunch-lab-node2", "rm", "/tmp/owned")


def test_a_report_counts_once(whole: Practice, door: socket.socket, tmp_path: Path) -> None:
    """Also for who has the private keys of both: the head takes no report that it had before, or
    that is older than another.
    """
    pair, own = tmp_path / "pair.pem", identity(whole, "node2", tmp_path)
    pair.write_text(whole.on("node1", "cat", f"{FOLDER}/AGENT_CERTIFICATE"))
    passed: list[bytes] = []
    upstream = threading.local()
    opened = contextlib.ExitStack()

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        if not hasattr(upstream, "connection"):
            upstream.connection = secured(whole, own, opened)
        said = ask(upstream.connection, path, body)
        if body and json.loads(body)["head_boot"]:
            passed.append(body)
        return said

    with opened, Middle(door, pair, answer):
        until(lambda: len(passed) > 3, "reports pass", 60)
        for at in (1, len(passed) - 1):
            status, said = ask(secured(whole, own, opened), "/report", passed[at])
            assert (status, b" after report " in said) == (403, True), said
    assert "node2 sent report " in log(whole, "node1")
    assert "refused a report from" in log(whole, "node1")


def test_a_client_without_a_certificate_is_nobody(whole: Practice, tmp_path: Path) -> None:
    """Whatever it knows: Ray's token, the address, and what reports look like."""
    token = whole.on("node2", "cat", f"{FOLDER}/RAY_AUTH_TOKEN")
    report = json.dumps({"node": "node2", "boot": "b", "number": 1, "head_boot": "", "servers": {}})
    request = (
        f"POST /report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {len(report)}\r\n\r\n{report}"
    ).encode()
    (tmp_path / "own.pem").write_text(
        Authority("lab", NEVER).sign("node2", whole.lab.hosts[1].ip, NEVER).reveal()
    )
    for own, why in (
        (None, "peer did not return a certificate"),
        (tmp_path / "own.pem", "the certificate is not accepted: unable to get local issuer"),
    ):
        with (
            contextlib.suppress(OSError),
            to_head(whole, 1) as plain,
            unverified(own).wrap_socket(plain) as connection,
        ):
            connection.sendall(request)
            assert connection.recv(1 << 16) == b""
        until(lambda why=why: why in log(whole, "node1"), "the head says why", 30)
    with contextlib.suppress(OSError), to_head(whole, 1) as plain:
        plain.sendall(request)
        assert b"200" not in plain.recv(1 << 16)
    until(lambda: "TLS failed: http request" in log(whole, "node1"), "the head says why", 30)
    assert not executed(whole)


def test_an_expired_certificate_is_refused_until_up_renews_it(whole: Practice) -> None:
    """The head's log says that it has expired; nothing restarts."""
    before, authority = whole.containers(), Authority("lab", NEVER)
    for host, end in zip(
        whole.lab.hosts, (NEVER, datetime.now(timezone.utc) - timedelta(days=1)), strict=True
    ):
        pair = authority.sign(host.name, host.ip, end).reveal()
        for name, text in (("AGENT_CA", authority.certificate), ("AGENT_CERTIFICATE", pair)):
            write(whole, host.name, f"{FOLDER}/{name}", text)
    why = "the certificate is not accepted: certificate has expired"
    until(lambda: why in log(whole, "node1"), "the head says why", 60)
    until(lambda: not connected(whole), "the worker is lost", 60)
    assert "the agents' certificates ended on" in whole.vlaunch("status").out
    up = whole.vlaunch("up")

    assert up.code == 0, up.said
    assert "node2: its agent's certificate ended on" in up.err
    assert whole.containers() == before


def test_rotating_certificates_stops_nothing(whole: Practice) -> None:
    """While a server over both nodes answers: no request fails, and the head shows another
    certificate.
    """
    serve(whole, "--backend", "mp")
    before, containers, shown = record(whole), whole.containers(), certificate_of_head(whole)
    with asking(whole) as traffic:
        until(lambda: len(traffic.samples) > 3, "requests are answered", 60)
        rotated = whole.vlaunch("secrets", "rotate", "AGENT_CERTIFICATE")
        assert rotated.code == 0, rotated.said
        until(lambda: certificate_of_head(whole) != shown, "the head shows another one", 30)
        until(lambda: connected(whole), "the agents are connected", 60)
        count = len(traffic.samples)
        until(lambda: len(traffic.samples) > count + 3, "requests are answered still", 60)

    assert lost(traffic) == []
    assert record(whole)["generation"] == before["generation"]
    assert record(whole)["fault_count"] == before["fault_count"]
    assert whole.containers() == containers
    stop = whole.vlaunch("stop")
    assert stop.code == 0, stop.said


def within(host: Host, make: Callable[[], T]) -> T:
    """Do something in a host's network; sockets stay in it."""
    found: list[T] = []

    def run() -> None:
        network = os.open(f"/run/netns/{host.netns}", os.O_RDONLY)
        try:
            assert ctypes.CDLL(None, use_errno=True).setns(network, _NEW_NETWORK) == 0
        finally:
            os.close(network)
        found.append(make())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def to_head(practice: Practice, host: int = 0) -> socket.socket:
    """Connect to the head's agent from a host."""
    hosts = practice.lab.hosts
    return within(hosts[host], lambda: socket.create_connection((hosts[0].ip, PORT), 10))


def unverified(own: Path | None) -> ssl.SSLContext:
    """Return TLS that takes every server for good."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if own is not None:
        context.load_cert_chain(own)
    return context


def identity(practice: Practice, host: str, folder: Path) -> Path:
    """Take a node's certificate and private key."""
    pair = folder / f"{host}.pem"
    pair.write_text(practice.on(host, "cat", f"{FOLDER}/AGENT_CERTIFICATE"))
    return pair


def secured(
    practice: Practice, own: Path, opened: contextlib.ExitStack
) -> http.client.HTTPConnection:
    """Connect to the head's agent as the node whose certificate that is; `opened` closes it."""
    made = http.client.HTTPConnection(practice.lab.hosts[0].ip, PORT)
    made.sock = opened.enter_context(unverified(own).wrap_socket(to_head(practice)))
    made.sock.settimeout(60)
    return made


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    connection.request("POST" if body else "GET", path, body or None)
    response = connection.getresponse()
    return response.status, response.read()


def clear(said: Any) -> bytes:
    """Return an answer without TLS."""
    body = json.dumps(said).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def certificate_of_head(practice: Practice) -> bytes | None:
    """Return the certificate that the head's agent shows."""
    with to_head(practice) as plain, unverified(None).wrap_socket(plain) as connection:
        return connection.getpeercert(binary_form=True)


def write(practice: Practice, host: str, path: str, text: str) -> None:
    """Replace a file as `up` does."""
    script = 'echo "$1" | base64 -d > "$2.new" && chmod 600 "$2.new" && mv "$2.new" "$2"'
    encoded = base64.b64encode(text.encode()).decode()
    practice.on(host, "sh", "-c", script, "write", encoded, path)


def connected(practice: Practice) -> bool:
    """True when the head's agent hears both nodes'."""
    ran = practice.vlaunch("status", "--json")
    return [each["agent"] for each in json.loads(ran.out)["nodes"]] == ["connected"] * 2


def log(practice: Practice, host: str) -> str:
    return practice.docker(host, "logs", f"vlaunch-lab-{host}")


def executed(practice: Practice) -> bool:
    """True when the order that attacks give was carried out on a node."""
    return any(
        "owned" in practice.docker(host, "exec", f"vlaunch-lab-{host}", "ls", "/tmp").split()
        for host in ("node1", "node2")
    )
