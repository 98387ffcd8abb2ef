"""Handshakes of mutual TLS, and the errors of refused clients."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from launcher.app import certificates
from launcher.core import tls

OURS, FOREIGN = (
    certificates.make_certificate("run"),
    certificates.make_certificate("another run"),
)


def run_both(
    server: ssl.SSLContext, client: Callable[[socket.socket], ssl.SSLSocket]
) -> tuple[str, str]:
    """Return the data that the server and the client received, or the reasons of their errors."""
    results = {}

    def run(name: str, sock: socket.socket, wrap: Callable[[socket.socket], ssl.SSLSocket]) -> None:
        sock.settimeout(60)
        with sock:
            try:
                with wrap(sock) as secure:
                    if name == "server":
                        secure.sendall(b"from server")
                    results[name] = secure.recv(100).decode()
                    if name == "client":
                        secure.sendall(b"from client")
            except OSError as error:
                results[name] = tls.reason(error)

    sockets = socket.socketpair()
    threads = [
        threading.Thread(
            target=run,
            args=("server", sockets[0], lambda sock: server.wrap_socket(sock, server_side=True)),
        ),
        threading.Thread(target=run, args=("client", sockets[1], client)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results["server"], results["client"]


def test_programs_with_the_runs_certificate_connect() -> None:
    """The version is TLS 1.3."""
    versions = []

    def client(sock: socket.socket) -> ssl.SSLSocket:
        secure = tls.contexts(OURS)[1].wrap_socket(sock)
        versions.append(secure.version())
        return secure

    assert run_both(tls.contexts(OURS)[0], client) == ("from client", "from server")
    assert versions == ["TLSv1.3"]


def test_a_foreign_certificate_is_rejected() -> None:
    """The client verifies the server's first and rejects it; both sides have the reason."""
    server, client = run_both(tls.contexts(OURS)[0], tls.contexts(FOREIGN)[1].wrap_socket)

    assert client.startswith("its certificate is from another run: ")
    assert server.startswith("it refused this node's certificate (")


@pytest.mark.parametrize("own", ["", FOREIGN], ids=["none", "foreign"])
def test_a_client_needs_the_private_key(own: str) -> None:
    """Trusting the server's certificate is not enough."""
    context = tls.contexts(own)[1] if own else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=OURS)
    server, client = run_both(tls.contexts(OURS)[0], context.wrap_socket)

    assert "certificate" in server
    assert client.startswith("it refused this node's certificate (")


def test_an_expired_certificate_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if both sides have the same one."""
    monkeypatch.setattr(certificates, "_RUN_EXPIRY", datetime(2020, 1, 1, tzinfo=timezone.utc))
    expired = tls.contexts(certificates.make_certificate("run"))
    server, client = run_both(expired[0], expired[1].wrap_socket)

    assert client == "its certificate is from another run: certificate has expired"
    assert "expired" in server


def test_older_versions_are_rejected() -> None:
    """The client's certificate does not matter."""
    context = tls.contexts(OURS)[1]
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    server, _ = run_both(tls.contexts(OURS)[0], context.wrap_socket)

    assert server == "TLS failed: unsupported protocol"


def test_an_invalid_certificate_is_an_error() -> None:
    """The text may be empty, malformed, or without the private key."""
    for text in ("", "nonsense", OURS.partition("-----BEGIN PRIVATE")[0]):
        with pytest.raises((OSError, ValueError)):
            tls.contexts(text)
