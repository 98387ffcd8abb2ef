"""Logins, direct and through other hosts, and their errors."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from launcher.ssh.connect import Connector
from launcher.ssh.fleet import Fleet
from tests.ports import free_port
from tests.ssh import sshd
from tests.ssh.conftest import refusal, works

pytestmark = pytest.mark.processes


def test_recognised_host_and_key(server: sshd.Sshd) -> None:
    """The usual case."""
    assert works(server.node())


def test_connections_share_no_configuration(server: sshd.Sshd) -> None:
    """Otherwise Fabric fails with "No attribute or config key found" in concurrent connects."""
    connector = Connector()
    connections = [connector.open(server.node(name)) for name in ("gpu01", "gpu02")]
    for connection in connections:
        connection.client.close()
    connector.close()
    assert connections[0].config is not connections[1].config


def test_refused_connection(server: sshd.Sshd) -> None:
    """A port without a listener."""
    port = free_port()
    error = refusal(server.node(port=port))
    assert f"cannot connect to 127.0.0.1:{port}: Connection refused" in error.message
    assert error.hint == f"try `ssh -l {server.user} -p {port} -i {server.key} 127.0.0.1`"


def test_name_that_does_not_resolve(server: sshd.Sshd) -> None:
    """An unknown host name."""
    error = refusal(server.node(host="no-such-host.invalid"))
    assert "no-such-host.invalid" in error.message
    assert "getent hosts no-such-host.invalid" in error.hint


def test_silent_server(server: sshd.Sshd) -> None:
    """A server that accepts connections without replying causes a timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        error = refusal(server.node(port=listener.getsockname()[1], connect_timeout=0.5))
    assert "did not finish the login within 0.5s" in error.message


def test_dropped_connection_is_retried(server: sshd.Sshd) -> None:
    """A busy sshd drops new connections (MaxStartups): one more try, and no third."""
    tries: list[bool] = []

    def drop(listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            tries.append(True)
            peer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drop, args=(listener,), daemon=True)
        thread.start()
        error = refusal(server.node(port=listener.getsockname()[1]))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=60)
    assert "closed the connection before the login" in error.message
    assert "MaxStartups" in error.hint
    assert len(tries) == 2


def test_not_an_ssh_server(server: sshd.Sshd) -> None:
    """A web server on the port is reported as such."""

    def talk(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 120)
            peer.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=talk, args=(listener,), daemon=True).start()
        error = refusal(server.node(port=listener.getsockname()[1]))
    assert "SSH" in error.message


def test_every_failure_is_reported(server: sshd.Sshd, tmp_path: Path) -> None:
    """The first failure does not stop other connections."""
    nodes = [
        server.node("gpu01"),
        server.node("gpu02", port=free_port()),
        server.node("gpu03", known_hosts=str(tmp_path / "none")),
        server.node("gpu04", host="no-such-host.invalid"),
    ]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        assert list(fleet.connect()) == ["gpu02", "gpu03", "gpu04"]
