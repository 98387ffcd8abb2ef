"""Getting in: what is trusted, which keys are offered, and what the user reads when it does not
work.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConnectError, RequestError
from launcher.model import Node
from launcher.remote.connect import Connector
from launcher.remote.fleet import Fleet
from launcher.transport import Command
from tests.remote import sshd

pytestmark = pytest.mark.processes


def refusal(node: Node, **options: Any) -> ConnectError:
    """Connect, which must fail."""
    with Fleet(sshd.inventory(node), **options) as fleet:
        errors = fleet.connect()
    assert list(errors) == ["gpu01"], "it connected"
    assert errors["gpu01"].node == "gpu01"
    assert errors["gpu01"].hint
    return errors["gpu01"]


def works(node: Node, **options: Any) -> bool:
    """Connect and run something."""
    with Fleet(sshd.inventory(node), **options) as fleet:
        errors = fleet.connect()
        for error in errors.values():
            raise error
        return all(answer.ok for answer in fleet.run([Command(node=node.name, argv=("true",))]))


def test_known_host_and_key(server: sshd.Sshd) -> None:
    """The plain case."""
    assert works(server.node())


def test_unknown_host_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """A server nobody vouches for is refused, with both ways to trust it."""
    error = refusal(server.node(known_hosts=str(tmp_path / "none")))
    assert "host key" in error.message
    assert str(tmp_path / "none") in error.message
    assert f"ssh-keyscan -p {server.port} -H 127.0.0.1 >> {tmp_path}/none" in error.hint
    assert "--accept-new-host-keys" in error.hint
    assert "SHA256:" in error.evidence


def test_accept_new_host_keys(server: sshd.Sshd, tmp_path: Path) -> None:
    """Accepting writes one line, for OpenSSH to read too, keeps the rest, and is not needed the
    second time.
    """
    known = tmp_path / "deep" / "known_hosts"
    known.parent.mkdir()
    known.write_text("# mine\nother ssh-ed25519 AAAA")
    node = server.node(known_hosts=str(known))
    assert works(node, accept_new_host_keys=True)
    lines = known.read_text().splitlines()
    assert lines[:2] == ["# mine", "other ssh-ed25519 AAAA"]
    assert len(lines) == 3
    assert works(node)
    ssh = [
        "ssh",
        "-F",
        "none",
        "-o",
        f"UserKnownHostsFile={known}",
        "-o",
        "BatchMode=yes",
        "-i",
        str(server.key),
    ]
    ran = subprocess.run(
        [*ssh, "-p", str(server.port), f"{server.user}@127.0.0.1", "true"], check=False, timeout=20
    )
    assert ran.returncode == 0


def test_accepting_many_at_once_writes_one_line(server: sshd.Sshd, tmp_path: Path) -> None:
    """Nodes that share a server and a file do not write its key twice."""
    nodes = [server.node(f"gpu0{n}", known_hosts=str(tmp_path / "new")) for n in range(1, 6)]
    with Fleet(sshd.inventory(*nodes), accept_new_host_keys=True) as fleet:
        assert fleet.connect() == {}
    assert len((tmp_path / "new").read_text().splitlines()) == 1


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


@pytest.mark.parametrize("accept", [False, True])
def test_changed_host_key(server: sshd.Sshd, tmp_path: Path, accept: bool) -> None:
    """A key that is not the one on file is refused, whatever was asked."""
    other = sshd.make_key(tmp_path / "other")
    kind, blob = Path(f"{other}.pub").read_text().split()[:2]
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{server.port} {kind} {blob}\n")
    error = refusal(server.node(known_hosts=str(known)), accept_new_host_keys=accept)
    assert "has changed" in error.message
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {known}" in error.hint
    assert len(known.read_text().splitlines()) == 1


def test_users_own_known_hosts(server: sshd.Sshd, home: Path) -> None:
    """Without a file in the inventory, the user's own counts."""
    (home / ".ssh" / "known_hosts").write_text(server.known_hosts.read_text())
    assert works(server.node(known_hosts=None))


def test_wrong_user(server: sshd.Sshd) -> None:
    """A login that is refused names the user and the keys that were tried."""
    error = refusal(server.node(user="nobody-of-that-name"))
    assert f"nobody-of-that-name@127.0.0.1:{server.port} refused the login" in error.message
    assert str(server.key) in error.message
    assert "ssh-copy-id nobody-of-that-name@127.0.0.1" in error.hint


def test_wrong_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """Likewise with a key the server does not know."""
    assert (
        "refused the login"
        in refusal(server.node(identity=str(sshd.make_key(tmp_path / "wrong")))).message
    )


def test_missing_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """A key file of the inventory that is not there is named."""
    error = refusal(server.node(identity=str(tmp_path / "nowhere")))
    assert f"key {tmp_path}/nowhere does not exist" in error.message
    assert "ssh.identity" in error.hint


def test_file_that_is_no_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """So is one that holds something else."""
    (tmp_path / "poem").write_text("roses are red\n")
    assert "is not a private key" in refusal(server.node(identity=str(tmp_path / "poem"))).message


def test_no_key_at_all(server: sshd.Sshd) -> None:
    """With nothing to offer, that is what is said."""
    error = refusal(server.node(identity=None))
    assert "was offered no key" in error.message
    assert "ssh-add" in error.hint


def test_usual_key_of_the_user(server: sshd.Sshd, home: Path) -> None:
    """Without a key in the inventory the usual files are tried."""
    (home / ".ssh" / "id_ed25519").write_bytes(server.key.read_bytes())
    assert works(server.node(identity=None))


@pytest.fixture
def locked(start_server: Callable[..., sshd.Sshd], tmp_path: Path) -> sshd.Sshd:
    """A server whose key has a passphrase, `open sesame`."""
    return start_server(authorized=sshd.make_key(tmp_path / "locked", passphrase="open sesame"))


def test_encrypted_key_without_anybody_to_ask(locked: sshd.Sshd) -> None:
    """An encrypted key says how to unlock it."""
    error = refusal(locked.node())
    assert "is encrypted" in error.message
    assert error.hint == f"ssh-add {locked.key}"


def test_encrypted_key_asks_once(locked: sshd.Sshd) -> None:
    """One question serves all nodes."""
    asked: list[str] = []

    def ask(path: str) -> str:
        asked.append(path)
        return "open sesame"

    nodes = [locked.node(f"gpu0{n}") for n in (1, 2, 3)]
    with Fleet(sshd.inventory(*nodes), ask_passphrase=ask) as fleet:
        assert fleet.connect() == {}
    assert asked == [str(locked.key)]


def test_wrong_passphrase(locked: sshd.Sshd) -> None:
    """A wrong passphrase is not asked for again, and is what the error says."""
    asked: list[str] = []

    def ask(path: str) -> str:
        asked.append(path)
        return "open simsim"

    error = refusal(locked.node(), ask_passphrase=ask)
    assert "not its passphrase" in error.message
    assert len(asked) == 1


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """An ssh-agent; call it with a key to add."""
    path = tmp_path / "agent"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # printed once it listens
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))

    def add(key: Path) -> None:
        subprocess.run(["ssh-add", "-q", str(key)], check=True, stdin=subprocess.DEVNULL)

    yield add
    process.terminate()
    process.communicate(timeout=10)


def test_agent(server: sshd.Sshd, agent: Callable[[Path], None]) -> None:
    """The agent's keys are offered, to many nodes at once."""
    agent(server.key)
    nodes = [server.node(f"gpu{n:02}", identity=None) for n in range(1, 9)]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        assert fleet.connect() == {}


def test_named_key_goes_before_the_agents(
    start_server: Callable[..., sshd.Sshd], agent: Callable[[Path], None], tmp_path: Path
) -> None:
    """A full agent does not use up the server's patience before the key that was named."""
    strict = start_server(extra="MaxAuthTries 2")
    for number in range(4):
        agent(sshd.make_key(tmp_path / f"other{number}"))
    assert works(strict.node())


def test_agent_holds_the_encrypted_key(
    locked: sshd.Sshd, agent: Callable[[Path], None], tmp_path: Path
) -> None:
    """A key that is named, encrypted, and in the agent needs no passphrase."""
    clear = tmp_path / "clear"
    clear.write_bytes(locked.key.read_bytes())
    clear.chmod(0o600)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "open sesame", "-N", "", "-f", str(clear)], check=True
    )
    agent(clear)
    assert works(locked.node())


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


def test_ssh_config(server: sshd.Sshd, home: Path, tmp_path: Path) -> None:
    """Alias, HostName, User, Port, IdentityFile, UserKnownHostsFile and Include work as they do for
    ssh.
    """
    (home / ".ssh" / "config").write_text("Include conf.d/*\nHost *\n  User nobody-of-that-name\n")
    (home / ".ssh" / "conf.d").mkdir()
    (home / ".ssh" / "conf.d" / "nodes").write_text(
        f"Host rack-*\n  HostName 127.0.0.1\n  Port {server.port}\n  User {server.user}\n "
        f" IdentityFile {server.key}\n  UserKnownHostsFile {server.known_hosts} {tmp_path}/more\n"
    )
    plain = {"user": None, "port": None, "identity": None, "known_hosts": None}
    assert works(server.node(host="rack-1", **plain))
    error = refusal(
        server.node(host="127.0.0.1", **{**plain, "port": server.port}), accept_new_host_keys=True
    )
    assert "nobody-of-that-name" in error.message


def test_inventory_wins_over_ssh_config(server: sshd.Sshd, home: Path) -> None:
    """What the inventory says is not overruled by the user's file."""
    (home / ".ssh" / "config").write_text(
        "Host rack-1\n  HostName 127.0.0.1\n  User nobody-of-that-name\n  Port 1\n  IdentityFile"
        f" {home}/none\n  UserKnownHostsFile {home}/none\n"
    )
    assert works(server.node(host="rack-1"))


def test_broken_ssh_config(server: sshd.Sshd, home: Path) -> None:
    """A file that cannot be understood is a request error before anything is touched."""
    (home / ".ssh" / "config").write_text("Host a\n  Port\n")
    with pytest.raises(Exception, match="ssh configuration") as caught:
        Fleet(sshd.inventory(server.node()))
    assert getattr(caught.value, "exit_code", None) == 2


@pytest.mark.parametrize("value", ["ssh", "0", "65536", "=x", "22.0"])
def test_port_that_is_none(server: sshd.Sshd, home: Path, value: str) -> None:
    """It is found with its line, also in a file that is included and for a host that is not asked
    for.
    """
    (home / ".ssh" / "config").write_text("Include more\n")
    (home / ".ssh" / "more").write_text(f"Host other\n  Port {value}\n")
    with pytest.raises(
        RequestError, match=f"{home}/.ssh/more:2: `Port {value.removeprefix('=')}` is no port"
    ) as caught:
        Fleet(sshd.inventory(server.node()))
    assert caught.value.hint


@pytest.mark.parametrize("line", ["port={}", 'Port "{}"', "PORT = {}", "Port {} # the usual"])
def test_ways_to_write_a_port(server: sshd.Sshd, home: Path, line: str) -> None:
    """As ssh reads them."""
    (home / ".ssh" / "config").write_text(f"Host *\n  {line.format(server.port)}\n")
    assert works(server.node(port=None))


def test_host_key_alias(server: sshd.Sshd, home: Path) -> None:
    """HostKeyAlias is the name that is looked up."""
    known = home / "known"
    known.write_text("cluster " + server.known_hosts.read_text().split(" ", 1)[1])
    (home / ".ssh" / "config").write_text("Host 127.0.0.1\n  HostKeyAlias cluster\n")
    assert works(server.node(known_hosts=str(known)))


def test_proxy_command(server: sshd.Sshd, home: Path) -> None:
    """A ProxyCommand carries the connection."""
    relay = (
        "python3 -c 'import socket,sys,threading,os;"
        ' s=socket.create_connection(("%h",%p));t=threading.Thread(target=lambda:[os.write(1,d) for'
        ' d in iter(lambda:s.recv(65536),b"")],daemon=True);t.start();[s.sendall(d) for d in'
        ' iter(lambda:os.read(0,65536),b"")]\''
    )
    (home / ".ssh" / "config").write_text(f"Host 127.0.0.1\n  ProxyCommand {relay}\n")
    assert works(server.node())


def test_failing_proxy_command(server: sshd.Sshd, home: Path) -> None:
    """A ProxyCommand that ends at once is named."""
    (home / ".ssh" / "config").write_text("Host 127.0.0.1\n  ProxyCommand exit 1\n")
    assert "ProxyCommand" in refusal(server.node()).message


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_unreadable_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """A key file that may not be read is named."""
    key = sshd.make_key(tmp_path / "key")
    key.chmod(0)
    assert "cannot be read" in refusal(server.node(identity=str(key))).message
