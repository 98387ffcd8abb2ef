"""Attacks on the connection between the agents of two nodes: no order is executed, and a log names
the cause.

The attacker controls the network: it has the head's address on the worker's host, and connects to
the head from the head's own host.
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

from launcher.agent.processes.node import RUN, Order
from launcher.app.certificates import Authority
from launcher.lab.layout import Host
from tests.integration.batches import wait_until
from tests.integration.conftest import LabCluster
from tests.integration.servers import failed_requests, read_record, serve, steady_traffic
from tests.relay import Relay

pytestmark = [pytest.mark.lab, pytest.mark.long]

PORT = 29560
FOLDER = "/root/.vlaunch/lab/secrets"
PAIR = "AGENT_CERTIFICATE"  # a node's certificate and private key
ORDER = Order(generation=1, phase=RUN, argv=("touch", "/tmp/owned"))
ORDERS = {"head_boot": "evil", "number": 1, "orders": {"owned": vars(ORDER)}, "ray": ""}
FAR_FUTURE = datetime(2100, 1, 1, tzinfo=timezone.utc)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_APPLICATION_DATA = b"\x17"  # the type of encrypted TLS records
T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> LabCluster:
    """Two nodes without Ray, connected by nothing but their agents."""
    lab_cluster.recreate(lambda document: document.update(ray="none"))
    return lab_cluster


@pytest.fixture
def connected(cluster: LabCluster) -> Iterator[LabCluster]:
    """The cluster, with connected agents before and after a test."""
    wait_until(lambda: is_connected(cluster), "the agents are connected", 60)
    yield cluster
    wait_until(lambda: is_connected(cluster), "the agents are connected again", 90)


@pytest.fixture
def listener(connected: LabCluster) -> Iterator[socket.socket]:
    """A socket on the worker that listens at the head's address."""
    head, worker = connected.lab.hosts
    address = (f"{head.ip}/32", "dev", "lo")
    connected.on("node2", "ip", "address", "add", *address)
    sock = run_in_network(worker, lambda: socket.create_server((head.ip, PORT)))
    try:
        yield sock
    finally:
        sock.close()
        connected.on("node2", "ip", "address", "del", *address)


class Attack:
    """A filter of a relay that, once `armed`, changes the next encrypted data."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self.armed, self._change = False, change

    def __call__(self, data: bytes) -> bytes:
        if self.armed and data[:1] == _APPLICATION_DATA:
            self.armed = False
            return self._change(data)
        return data


class FakeHead:
    """An HTTPS server in the head's place.

    `pair` is its certificate and private key; `answer` maps a path and a body to a response.
    """

    def __init__(
        self, listener: socket.socket, pair: Path, answer: Callable[[str, bytes], tuple[int, bytes]]
    ) -> None:
        self._connections = connections = list[socket.socket]()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                connections.append(self.connection)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, response = answer(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(response)))
                self.end_headers()
                self.wfile.write(response)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair)
        self._server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.socket.close()
        self._server.socket = context.wrap_socket(listener, server_side=True)

    def __enter__(self) -> FakeHead:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("victim", ["node2", "node1"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: plain_response(ORDERS) + data, "TLS failed: wrong version number"),
        (lambda data: data + data, "TLS failed: decryption failed or bad record mac"),
    ],
    ids=["plain orders", "a repeated record"],
)
def test_a_relay_cannot_add_data(
    connected: LabCluster,
    listener: socket.socket,
    change: Callable[[bytes], bytes],
    reason: str,
    victim: str,
) -> None:
    """Additional data ends the connection; the victim's log has the reason, and the agents
    reconnect.
    """
    attack, greeting = Attack(change), "connected to the head's agent"
    filters = (attack, bytes) if victim == "node2" else (bytes, attack)
    before = log(connected, "node2").count(greeting)
    with Relay(0, *filters, listener=listener.dup(), connect=lambda: connect_to_head(connected)):
        wait_until(
            lambda: log(connected, "node2").count(greeting) > before, "the worker is connected", 60
        )
        attack.armed = True
        wait_until(lambda: reason in log(connected, victim), "its log has the reason", 60)

    assert not attack.armed
    assert not is_executed(connected)


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        ("of another authority", "the certificate is not accepted: unable to get local issuer"),
        ("the worker's own", "the certificate is not accepted: IP address mismatch"),
    ],
)
def test_a_worker_accepts_orders_only_from_its_head(
    connected: LabCluster, listener: socket.socket, tmp_path: Path, owner: str, reason: str
) -> None:
    """The head's address is not enough, nor is the certificate of another node of the cluster."""
    head, _ = connected.lab.hosts
    if owner == "the worker's own":
        pair = copy_pair(connected, "node2", tmp_path)
    else:
        pair = sign_pair("node1", head.ip, tmp_path)
    with FakeHead(listener, pair, lambda *_: (200, json.dumps(ORDERS).encode())):
        wait_until(lambda: reason in log(connected, "node2"), "the worker's log has the reason", 60)

    assert not is_executed(connected)


def test_orders_with_the_heads_private_key_are_executed(
    connected: LabCluster, listener: socket.socket, tmp_path: Path
) -> None:
    """This shows that the other tests can fail."""
    pair = copy_pair(connected, "node1", tmp_path)
    with FakeHead(listener, pair, lambda *_: (200, json.dumps(ORDERS).encode())):
        wait_until(lambda: is_executed(connected), "the order is executed", 60)
    connected.docker("node2", "exec", "vlaunch-lab-node2", "rm", "/tmp/owned")


def test_a_report_is_accepted_once(
    connected: LabCluster, listener: socket.socket, tmp_path: Path
) -> None:
    """Even with the private keys of both nodes, the head refuses repeated and older reports."""
    pair, worker_pair = (
        copy_pair(connected, "node1", tmp_path),
        copy_pair(connected, "node2", tmp_path),
    )
    reports: list[bytes] = []
    upstream = threading.local()
    connections = contextlib.ExitStack()

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        if not hasattr(upstream, "connection"):
            upstream.connection = connect_with_tls(connected, worker_pair, connections)
        response = send_request(upstream.connection, path, body)
        if body and json.loads(body)["head_boot"]:
            reports.append(body)
        return response

    with connections, FakeHead(listener, pair, answer):
        wait_until(lambda: len(reports) > 3, "reports pass", 60)
        for report in (reports[1], reports[-1]):
            connection = connect_with_tls(connected, worker_pair, connections)
            status, text = send_request(connection, "/report", report)
            assert (status, b" after report " in text) == (403, True), text
    assert "node2 sent report " in log(connected, "node1")
    assert "refused a report from" in log(connected, "node1")


def test_a_client_without_a_valid_certificate_is_refused(
    connected: LabCluster, tmp_path: Path
) -> None:
    """Ray's token, the address and a well-formed report do not help."""
    token = connected.on("node2", "cat", f"{FOLDER}/RAY_AUTH_TOKEN")
    report = json.dumps({"node": "node2", "boot": "b", "number": 1, "head_boot": "", "servers": {}})
    request = (
        f"POST /report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {len(report)}\r\n\r\n{report}"
    ).encode()
    for pair, reason in (
        (None, "peer did not return a certificate"),
        (
            sign_pair("node2", connected.lab.hosts[1].ip, tmp_path),
            "the certificate is not accepted: unable to get local issuer",
        ),
    ):
        with (
            contextlib.suppress(OSError),
            connect_to_head(connected, 1) as plain,
            unverified_tls(pair).wrap_socket(plain) as connection,
        ):
            connection.sendall(request)
            assert connection.recv(1 << 16) == b""
        wait_until(
            lambda reason=reason: reason in log(connected, "node1"),
            "the head's log has the reason",
            30,
        )
    with contextlib.suppress(OSError), connect_to_head(connected, 1) as plain:
        plain.sendall(request)
        assert b"200" not in plain.recv(1 << 16)
    reason = "TLS failed: http request"
    wait_until(lambda: reason in log(connected, "node1"), "the head's log has the reason", 30)
    assert not is_executed(connected)


def test_an_expired_certificate_is_refused_until_up_renews_it(connected: LabCluster) -> None:
    """The head's log names the reason; no container restarts."""
    before, authority = connected.containers(), Authority("lab", FAR_FUTURE)
    yesterday = datetime.now(timezone.utc) - timedelta(days=1)
    for host, end in zip(connected.lab.hosts, (FAR_FUTURE, yesterday), strict=True):
        pair = authority.sign(host.name, host.ip, end).reveal()
        for name, text in (("AGENT_CA", authority.certificate), (PAIR, pair)):
            write_file(connected, host.name, f"{FOLDER}/{name}", text)
    reason = "the certificate is not accepted: certificate has expired"
    wait_until(lambda: reason in log(connected, "node1"), "the head's log has the reason", 60)
    wait_until(lambda: not is_connected(connected), "the worker is disconnected", 60)
    assert "the agents' certificates expired on" in connected.vlaunch("status").out
    up = connected.vlaunch("up")

    assert up.code == 0, up.output
    assert "node2: its agent's certificate expired on" in up.err
    assert connected.containers() == before


def test_rotating_certificates_does_not_disturb_a_server(connected: LabCluster) -> None:
    """No request to a server on both nodes fails, while the head changes its certificate."""
    serve(connected, "--backend", "mp")
    before, containers, certificate = (
        read_record(connected),
        connected.containers(),
        head_certificate(connected),
    )
    with steady_traffic(connected) as traffic:
        wait_until(lambda: len(traffic.samples) > 3, "requests are answered", 60)
        rotated = connected.vlaunch("secrets", "rotate", "AGENT_CERTIFICATE")
        assert rotated.code == 0, rotated.output
        wait_until(lambda: head_certificate(connected) != certificate, "the head has a new one", 30)
        wait_until(lambda: is_connected(connected), "the agents are connected", 60)
        count = len(traffic.samples)
        wait_until(lambda: len(traffic.samples) > count + 3, "requests are still answered", 60)

    assert failed_requests(traffic) == []
    assert read_record(connected)["generation"] == before["generation"]
    assert read_record(connected)["fault_count"] == before["fault_count"]
    assert connected.containers() == containers
    stop = connected.vlaunch("stop")
    assert stop.code == 0, stop.output


def run_in_network(host: Host, action: Callable[[], T]) -> T:
    """Run an action in a host's network namespace; sockets that it opens stay there."""
    results: list[T] = []

    def run() -> None:
        network = os.open(f"/run/netns/{host.netns}", os.O_RDONLY)
        try:
            assert ctypes.CDLL(None, use_errno=True).setns(network, _NEW_NETWORK) == 0
        finally:
            os.close(network)
        results.append(action())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def connect_to_head(lab_cluster: LabCluster, host: int = 0) -> socket.socket:
    """Connect to the head's agent from a host, without TLS."""
    hosts = lab_cluster.lab.hosts
    return run_in_network(hosts[host], lambda: socket.create_connection((hosts[0].ip, PORT), 10))


def unverified_tls(pair: Path | None) -> ssl.SSLContext:
    """Return a client's TLS that accepts all servers; `pair` is its certificate and key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if pair is not None:
        context.load_cert_chain(pair)
    return context


def copy_pair(lab_cluster: LabCluster, host: str, folder: Path) -> Path:
    """Copy a node's certificate and private key."""
    pair = folder / f"{host}.pem"
    pair.write_text(lab_cluster.on(host, "cat", f"{FOLDER}/{PAIR}"))
    return pair


def sign_pair(name: str, address: str, folder: Path) -> Path:
    """Write a node's certificate and private key of another authority."""
    pair = folder / "other.pem"
    pair.write_text(Authority("lab", FAR_FUTURE).sign(name, address, FAR_FUTURE).reveal())
    return pair


def connect_with_tls(
    lab_cluster: LabCluster, pair: Path, connections: contextlib.ExitStack
) -> http.client.HTTPConnection:
    """Connect to the head's agent with a node's certificate; `connections` closes it."""
    connection = http.client.HTTPConnection(lab_cluster.lab.hosts[0].ip, PORT)
    plain = connect_to_head(lab_cluster)
    connection.sock = connections.enter_context(unverified_tls(pair).wrap_socket(plain))
    connection.sock.settimeout(60)
    return connection


def send_request(
    connection: http.client.HTTPConnection, path: str, body: bytes
) -> tuple[int, bytes]:
    connection.request("POST" if body else "GET", path, body or None)
    response = connection.getresponse()
    return response.status, response.read()


def plain_response(document: Any) -> bytes:
    """Return an HTTP response without TLS."""
    body = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def head_certificate(lab_cluster: LabCluster) -> bytes | None:
    """Return the certificate that the head's agent presents."""
    with (
        connect_to_head(lab_cluster) as plain,
        unverified_tls(None).wrap_socket(plain) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def write_file(lab_cluster: LabCluster, host: str, path: str, text: str) -> None:
    """Replace a file as `up` does."""
    script = 'echo "$1" | base64 -d > "$2.new" && chmod 600 "$2.new" && mv "$2.new" "$2"'
    encoded = base64.b64encode(text.encode()).decode()
    lab_cluster.on(host, "sh", "-c", script, "write", encoded, path)


def is_connected(lab_cluster: LabCluster) -> bool:
    """Return whether both nodes' agents are connected."""
    result = lab_cluster.vlaunch("status", "--json")
    return [node["agent"] for node in json.loads(result.out)["nodes"]] == ["connected"] * 2


def log(lab_cluster: LabCluster, host: str) -> str:
    return lab_cluster.docker(host, "logs", f"vlaunch-lab-{host}")


def is_executed(lab_cluster: LabCluster) -> bool:
    """Return whether a node has executed the attacks' order."""
    return any(
        "owned" in lab_cluster.docker(host, "exec", f"vlaunch-lab-{host}", "ls", "/tmp").split()
        for host in ("node1", "node2")
    )
