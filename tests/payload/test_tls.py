"""Who is let in by mutual TLS, and what the others are told."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from launcher.payload import tls
from launcher.remote import certificate

OURS, FOREIGN = certificate.make("run"), certificate.make("another run")


def both(
    server: ssl.SSLContext, client: Callable[[socket.socket], ssl.SSLSocket]
) -> tuple[str, str]:
    """Return what each side received from the other, the client first, or why it did not."""
    said = {}

    def run(name: str, sock: socket.socket, wrap: Callable[[socket.socket], ssl.SSLSocket]) -> None:
        sock.settimeout(5)
        with sock:
            try:
                with wrap(sock) as secure:
                    if name == "server":
                        secure.sendall(b"from server")
                    said[name] = secure.recv(100).decode()
                    if name == "client":
                        secure.sendall(b"from client")
            except OSError as error:
                said[name] = tls.reason(error)

    ends = socket.socketpair()
    threads = [
        threading.Thread(
            target=run,
            args=("server", ends[0], lambda sock: server.wrap_socket(sock, server_side=True)),
        ),
        threading.Thread(target=run, args=("client", ends[1], client)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return said["server"], said["client"]


def test_both_hold_the_certificate_of_the_run() -> None:
    """And speak TLS 1.3."""
    versions = []

    def client(sock: socket.socket) -> ssl.SSLSocket:
        secure = tls.contexts(OURS)[1].wrap_socket(sock)
        versions.append(secure.version())
        return secure

    assert both(tls.contexts(OURS)[0], client) == ("from client", "from server")
    assert versions == ["TLSv1.3"]


def test_a_foreign_certificate_is_refused() -> None:
    """By the side that connects, which sees the other one's first; both say why."""
    server, client = both(tls.contexts(OURS)[0], tls.contexts(FOREIGN)[1].wrap_socket)

    assert client.startswith("its certificate is not this run's: ")
    assert server.startswith("it refused this node's certificate (")


@pytest.mark.parametrize("own", ["", FOREIGN], ids=["none", "foreign"])
def test_who_trusts_the_server_is_not_let_in_for_that(own: str) -> None:
    """It needs the certificate's key."""
    context = tls.contexts(own)[1] if own else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=OURS)
    server, client = both(tls.contexts(OURS)[0], context.wrap_socket)

    assert "certificate" in server
    assert client.startswith("it refused this node's certificate (")


def test_an_expired_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though both hold it."""
    monkeypatch.setattr(certificate, "_UNTIL", datetime(2020, 1, 1, tzinfo=timezone.utc))
    expired = tls.contexts(certificate.make("run"))
    server, client = both(expired[0], expired[1].wrap_socket)

    assert client == "its certificate is not this run's: certificate has expired"
    assert "expired" in server


def test_older_versions_are_refused() -> None:
    """Of a client that holds the certificate."""
    context = tls.contexts(OURS)[1]
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    server, _ = both(tls.contexts(OURS)[0], context.wrap_socket)

    assert server == "TLS failed: unsupported protocol"


def test_a_certificate_that_is_none_is_an_error() -> None:
    """Of the system's kind."""
    for text in ("", "nonsense", OURS.partition("-----BEGIN PRIVATE")[0]):
        with pytest.raises((OSError, ValueError)):
            tls.contexts(text)
