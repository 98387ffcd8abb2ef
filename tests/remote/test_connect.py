"""Getting in, also through other hosts, and what the user reads when it does not work."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.remote.connect import Connector
from launcher.remote.fleet import Fleet
from launcher.transport import Command
from tests.remote import sshd
from tests.remote.conftest import refusal, works

pytestmark = pytest.mark.processes


def test_known_host_and_key(server: sshd.Sshd) -> None:
    """The plain case."""
    assert works(server.node())


def test_connections_share_no_configuration(server: sshd.Sshd) -> None:
    """Fabric would take one's settings away while it makes the other: "No attribute or config key
    found".
    """
    connector = Connector()
    made = [connector.open(server.node(name)) for name in ("gpu01", "gpu02")]
    for connection in made:
        connection.client.close()
    connector.close()
    assert made[0].config is not made[1].config


def test_refused_connection(server: sshd.Sshd) -> None:
    """A port nobody listens on."""
    port = sshd.free_port()
    error = refusal(server.node(port=port))
    assert f"nothing listens on 127.0.0.1:{port}" in error.message
    assert f"ssh -p {port} {server.user}@127.0.0.1" in error.hint


def test_name_that_does_not_resolve(server: sshd.Sshd) -> None:
    """A name nobody knows."""
    assert "does not resolve" in refusal(server.node(host="no-such-host.invalid")).message


def test_silent_server(server: sshd.Sshd) -> None:
    """Something that accepts connections and says nothing is given up in time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        error = refusal(server.node(port=listener.getsockname()[1], connect_timeout=0.5))
    assert "did not finish an SSH handshake within 0.5s" in error.message


def test_dropped_connection_is_tried_once_more(server: sshd.Sshd) -> None:
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
        thread.join(timeout=10)
    assert (
        "closed the connection before saying SSH" in error.message
        or "dropped the connection" in error.message
    )
    assert "MaxStartups" in error.hint or "sshd's log" in error.hint
    assert len(tries) == 2


def test_not_an_ssh_server(server: sshd.Sshd) -> None:
    """A web server on the port is not mistaken for anything else."""

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
    """Connecting does not stop at the first failure."""
    nodes = [
        server.node("gpu01"),
        server.node("gpu02", port=sshd.free_port()),
        server.node("gpu03", known_hosts=str(tmp_path / "none")),
        server.node("gpu04", host="no-such-host.invalid"),
    ]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        assert list(fleet.connect()) == ["gpu02", "gpu03", "gpu04"]


@pytest.fixture
def both(start_server: Callable[..., sshd.Sshd], tmp_path: Path) -> tuple[sshd.Sshd, sshd.Sshd]:
    """A jump host and a node, that take the same key, and one file that vouches for both."""
    jump = start_server("jump")
    node = start_server("node", authorized=jump.key)
    node.known_hosts.write_text(node.known_hosts.read_text() + jump.known_hosts.read_text())
    return jump, node


def connections(server: sshd.Sshd) -> int:
    """Count the connections a server holds."""
    children = (
        Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    )
    return len(children)


def test_jump_host(both: tuple[sshd.Sshd, sshd.Sshd]) -> None:
    """Nodes behind a jump host share one connection to it."""
    jump, node = both
    nodes = [node.node(f"gpu0{n}", jump=f"{jump.user}@127.0.0.1:{jump.port}") for n in (1, 2, 3)]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        assert fleet.connect() == {}
        assert connections(jump) == 1
        argv = ("sh", "-c", "echo $SSH_CONNECTION")
        answers = list(fleet.run([Command(node=n.name, argv=argv) for n in nodes]))
        assert len({answer.out for answer in answers if answer.ok}) == 3


def test_jump_host_from_ssh_config(both: tuple[sshd.Sshd, sshd.Sshd], home: Path) -> None:
    """ProxyJump works, also when a wildcard makes it match the jump host itself."""
    jump, node = both
    (home / ".ssh" / "config").write_text(
        f"Host bastion\n  HostName 127.0.0.1\n  Port {jump.port}\n  User {jump.user}\nHost *\n "
        " ProxyJump bastion\n"
    )
    assert works(node.node())


def test_jump_hosts_key_is_verified(both: tuple[sshd.Sshd, sshd.Sshd], tmp_path: Path) -> None:
    """A jump host nobody vouches for is refused like any other server, and named."""
    jump, node = both
    only_node = tmp_path / "only_node"
    only_node.write_text(node.known_hosts.read_text().splitlines()[0] + "\n")
    error = refusal(
        node.node(jump=f"{jump.user}@127.0.0.1:{jump.port}", known_hosts=str(only_node))
    )
    assert f"jump host {jump.user}@127.0.0.1:{jump.port}" in error.message
    assert "host key" in error.message
    assert f"-p {jump.port}" in error.hint


def test_unreachable_jump_host(server: sshd.Sshd) -> None:
    """A jump host that is down is tried once for all nodes, and named in each error."""
    port = sshd.free_port()
    nodes = [server.node(f"gpu0{n}", jump=f"127.0.0.1:{port}") for n in (1, 2)]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        errors = fleet.connect()
    assert len(errors) == 2
    for error in errors.values():
        assert f"jump host 127.0.0.1:{port}: nothing listens" in error.message


def test_node_that_the_jump_host_cannot_reach(both: tuple[sshd.Sshd, sshd.Sshd]) -> None:
    """When the jump host is fine and the node is not, the error says which of the two."""
    jump, node = both
    port = sshd.free_port()
    error = refusal(node.node(jump=f"{jump.user}@127.0.0.1:{jump.port}", port=port))
    assert "cannot reach" in error.message
    assert f"127.0.0.1:{port}" in error.message
