"""SSH configuration and jump hosts: an inventory that works with `ssh` works with vlaunch."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core.domain import Node
from launcher.core.transport import Command
from launcher.ssh import openssh
from launcher.ssh.fleet import Fleet
from tests.ports import free_port
from tests.ssh import processes, sshd
from tests.ssh.conftest import refusal, works

pytestmark = pytest.mark.processes

PLAIN = {"user": None, "port": None, "identity": None, "known_hosts": None}


def plain(server: sshd.Sshd, host: str, **changes: object) -> Node:
    """A node with only a host in the inventory."""
    return server.node(host=host, **{**PLAIN, **changes})


def config(home: Path, text: str) -> None:
    (home / ".ssh" / "config").write_text(textwrap.dedent(text))


def test_inventory_wins(server: sshd.Sshd, home: Path) -> None:
    """The configuration does not overrule it."""
    config(
        home,
        f"""
        Host rack-1
          HostName 127.0.0.1
          User nobody-of-that-name
          Port 1
          IdentityFile {home}/none
          UserKnownHostsFile {home}/none
          ProxyJump nowhere
        """,
    )
    target = openssh.resolve(server.node(host="rack-1", jump="ops@bastion:23"))
    assert (target.host, target.port, target.user) == ("127.0.0.1", server.port, server.user)
    assert (target.identity, target.jump) == (str(server.key), "ops@bastion:23")
    assert target.known_hosts[0] == server.known_hosts
    assert target.host_key_name == f"[127.0.0.1]:{server.port}"


def test_settings(server: sshd.Sshd, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are expanded, `none` is empty, and the default keys apply without a named one."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "/the/agent")
    config(
        home,
        """
        Host one
          HostName %h.rack
          IdentityFile /keys/%r-%%-%n-%h
          IdentitiesOnly yes
          IdentityAgent /other/agent
          HostKeyAlias cluster
          ProxyCommand nc %h %p
        Host *
          User ops
          ProxyCommand none
          ProxyJump none
        Host silent
          IdentityAgent none
        """,
    )
    first, second, third = (openssh.resolve(plain(server, n)) for n in ("one", "other", "silent"))
    assert third.agent == ""
    assert first.keys == ("/keys/ops-%-one-one.rack",)
    assert (first.only_keys, first.agent, first.host_key_name) == (True, "/other/agent", "cluster")
    assert first.proxy == "nc one.rack 22"
    assert (second.proxy, second.jump, second.only_keys) == ("", "", False)
    assert (second.agent, second.host_key_name, second.address) == ("/the/agent", "other", "other")
    assert "~/.ssh/id_ed25519" in second.keys


def test_host_key_alias(server: sshd.Sshd, home: Path) -> None:
    """Host keys are looked up under HostKeyAlias."""
    file = home / "known"
    file.write_text("cluster " + server.known_hosts.read_text().split(" ", 1)[1])
    config(home, "Host 127.0.0.1\n  HostKeyAlias cluster\n")
    assert works(server.node(known_hosts=str(file)))


def test_agent_of_the_configuration(
    server: sshd.Sshd, home: Path, agent: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """IdentityAgent names an agent that the environment does not."""
    agent(server.key)
    config(home, f"IdentityAgent {os.environ['SSH_AUTH_SOCK']}\n")
    monkeypatch.delenv("SSH_AUTH_SOCK")
    assert works(server.node(identity=None))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Host a\n  Port x\n", "line 2: Bad port 'x'."),
        ("Host a\n  Colour red\n", "line 2: Bad configuration option: colour"),
    ],
)
def test_broken_configuration(server: sshd.Sshd, home: Path, text: str, message: str) -> None:
    """OpenSSH names the line, even in an included file and for another host."""
    config(home, f"Include {home}/more\n")
    (home / "more").write_text(text)
    error = refusal(server.node())
    assert error.message == "gpu01: ssh cannot use its configuration for 127.0.0.1"
    assert error.evidence.removeprefix(f"{home}/more").lstrip(": ") == message
    assert error.hint == "ssh -G 127.0.0.1"


def test_slow_configuration(server: sshd.Sshd, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in the configuration has a deadline."""
    monkeypatch.setattr(openssh, "_CONFIG_TIMEOUT", 0.3)
    config(home, 'Match exec "sleep 20"\n  User ops\n')
    error = refusal(server.node())
    assert "gpu01: `ssh -G 127.0.0.1`, which runs `Match exec`, timed out" in error.message


def test_ssh_is_not_installed(server: sshd.Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setenv("PATH", "/nowhere")
    error = refusal(server.node())
    assert error.message == "gpu01: the program `ssh` is not installed on this machine"
    assert "openssh-client" in error.hint


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("** WARNING: no post-quantum exchange\nssh: no route\n", "ssh: no route"),
        (
            "ssh: no route\nkex_exchange_identification: x\nConnection closed by UNKNOWN p",
            "ssh: no route",
        ),
        ("Host key verification failed.\r\n", "Host key verification failed."),
        ("Warning: Permanently added x\n", "Warning: Permanently added x"),
        ("ssh: no route\n** WARNING: x", "ssh: no route"),
        ("", ""),
    ],
)
def test_line_with_the_reason(lines: str, reason: str) -> None:
    """It need not be the last one, and a line without a reason is better than none."""
    assert openssh._message(lines) == reason


def test_proxy_command(server: sshd.Sshd, home: Path) -> None:
    """A ProxyCommand carries the connection."""
    relay = (
        "python3 -c 'import socket,sys,threading,os;"
        ' s=socket.create_connection(("%h",%p));t=threading.Thread(target=lambda:[os.write(1,d) for'
        ' d in iter(lambda:s.recv(65536),b"")],daemon=True);t.start();[s.sendall(d) for d in'
        ' iter(lambda:os.read(0,65536),b"")]\''
    )
    config(home, f"Host 127.0.0.1\n  ProxyCommand {relay}\n")
    assert works(server.node())


@pytest.mark.parametrize(
    ("command", "reason"), [("exit 1", "exit status 1"), ("echo no route >&2; exit 2", "no route")]
)
def test_failing_proxy_command(server: sshd.Sshd, home: Path, command: str, reason: str) -> None:
    """The error names a ProxyCommand that exits at once, with its last line."""
    config(home, f"Host 127.0.0.1\n  ProxyCommand {command}\n")
    error = refusal(server.node())
    assert f"the ProxyCommand for 127.0.0.1:{server.port} failed" in error.message
    assert error.evidence == reason


@pytest.fixture
def both(start_server: Callable[..., sshd.Sshd]) -> tuple[sshd.Sshd, sshd.Sshd]:
    """A jump host and a node that accept the same key, and a known_hosts file for both."""
    jump = start_server("jump")
    node = start_server("node", authorized=jump.key)
    node.known_hosts.write_text(node.known_hosts.read_text() + jump.known_hosts.read_text())
    return jump, node


def via(jump: sshd.Sshd) -> str:
    return f"{jump.user}@127.0.0.1:{jump.port}"


def connections(server: sshd.Sshd) -> int:
    """Count the open connections of a server."""
    return len(children(server.process.pid))


def children(pid: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_jump_host(both: tuple[sshd.Sshd, sshd.Sshd]) -> None:
    """Nodes behind a jump host share a login to it, which is closed with the fleet."""
    jump, node = both
    nodes = [node.node(f"gpu0{n}", jump=via(jump)) for n in (1, 2, 3)]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        assert fleet.connect() == {}
        assert connections(jump) == 1
        argv = ("sh", "-c", "echo $SSH_CONNECTION")
        answers = list(fleet.run([Command(node=n.name, argv=argv) for n in nodes]))
        assert len({answer.out for answer in answers if answer.ok}) == 3
    assert processes.awaited(lambda: connections(jump) == 0)


@pytest.mark.parametrize("ours", [True, False])
def test_jump_host_that_comes_back(both: tuple[sshd.Sshd, sshd.Sshd], ours: bool) -> None:
    """A lost login to a jump host is renewed on the next use of a node."""
    jump, second_node = both
    nodes = [second_node.node(name, jump=via(jump)) for name in ("gpu01", "gpu02")]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        assert fleet.connect() == {}
        lost = fleet.transport("gpu01")
        (login,) = fleet._connector._jumps.values()
        assert login._process is not None
        for child in children(login._process.pid if ours else jump.process.pid):
            os.kill(child, 9)
        assert processes.awaited(lambda: not lost.is_active())
        commands = [Command(node=node.name, argv=("true",)) for node in nodes]
        assert all(answer.ok for answer in fleet.run(commands))
        assert connections(jump) == 1


def test_dropped_connection_behind_a_jump_host(both: tuple[sshd.Sshd, sshd.Sshd]) -> None:
    """A busy sshd of a node is not reported as an unreachable node."""
    jump, node = both
    tries: list[bool] = []

    def drop(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                tries.append(True)
                peer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drop, args=(listener,), daemon=True)
        thread.start()
        error = refusal(node.node(jump=via(jump), port=listener.getsockname()[1]))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=60)
    assert "closed the connection before the login" in error.message
    assert len(tries) == 2


def test_a_killed_launcher_logs_out(both: tuple[sshd.Sshd, sshd.Sshd], tmp_path: Path) -> None:
    """SIGKILL of the launcher leaves no login to the jump host behind."""
    jump, node = both
    program = tmp_path / "launcher.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, sys
        sys.path[:0] = {sys.path!r}
        from launcher.core.domain import Node, Ssh
        from launcher.ssh.fleet import Fleet
        from tests.ssh import sshd
        fleet = Fleet(sshd.inventory({node.node(jump=via(jump))!r}))
        assert fleet.connect() == {{}}
        os.kill(os.getpid(), 9)
        """)
    )
    assert subprocess.run([sys.executable, str(program)], check=False, timeout=60).returncode == -9
    assert processes.awaited(lambda: connections(jump) == 0)


def test_unknown_jump_host(both: tuple[sshd.Sshd, sshd.Sshd], tmp_path: Path) -> None:
    """A jump host's key is verified like a node's; accepting new keys stores it, too."""
    jump, node = both
    file = tmp_path / "only_node"
    file.write_text(node.known_hosts.read_text().splitlines()[0] + "\n")
    behind = node.node(jump=via(jump), known_hosts=str(file))
    error = refusal(behind)
    assert error.message == f"gpu01: cannot log in to jump host {via(jump)}"
    assert error.evidence == "Host key verification failed."
    assert error.hint == f"make `ssh ssh://{via(jump)} true` work"
    assert works(behind, accept_new_host_keys=True)
    assert len(file.read_text().splitlines()) == 2


def test_changed_jump_host(both: tuple[sshd.Sshd, sshd.Sshd], tmp_path: Path) -> None:
    """A key other than the stored one is rejected, even when new keys are accepted."""
    jump, node = both
    lines = node.known_hosts.read_text().splitlines()
    key = Path(f"{sshd.make_key(tmp_path / 'other')}.pub").read_text().split()[:2]
    node.known_hosts.write_text(f"{lines[0]}\n[127.0.0.1]:{jump.port} {' '.join(key)}\n")
    error = refusal(node.node(jump=via(jump)), accept_new_host_keys=True)
    assert f"Host key for [127.0.0.1]:{jump.port} has changed" in error.evidence


def test_first_of_two_jump_hosts(both: tuple[sshd.Sshd, sshd.Sshd], home: Path) -> None:
    """OpenSSH's reason is quoted, whichever of them is down."""
    jump, node = both
    port = free_port()
    settings = f"UserKnownHostsFile {node.known_hosts}\nIdentityFile {jump.key}\n"
    for first, second in ((port, jump.port), (jump.port, port)):
        hops = (("a", first), ("b", second))
        hosts = "".join(f"Host {name}\n  Port {number}\n" for name, number in hops)
        config(home, f"{hosts}Host 127.0.0.1\n  ProxyJump a,b\nMatch all\n  {settings}")
        text = (home / ".ssh" / "config").read_text()
        config(home, f"{text}Host a b\n  HostName 127.0.0.1\n")
        error = refusal(node.node())
        assert "cannot log in to jump host a,b" in error.message
        assert error.evidence.endswith("Connection refused")


def test_jump_host_is_down(server: sshd.Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried once for all nodes, and named in all errors."""
    port = free_port()
    nodes = [server.node(f"gpu0{n}", jump=f"127.0.0.1:{port}") for n in (1, 2)]
    really, tries = openssh.JumpHost._login, []

    def login(jump: openssh.JumpHost) -> str:
        tries.append(jump)
        return really(jump)

    monkeypatch.setattr(openssh.JumpHost, "_login", login)
    with Fleet(sshd.inventory(*nodes)) as fleet:
        errors = fleet.connect()
    assert (len(errors), len(tries)) == (2, 1)
    for error in errors.values():
        assert f"jump host 127.0.0.1:{port}" in error.message
        assert error.evidence == f"ssh: connect to host 127.0.0.1 port {port}: Connection refused"


def test_silent_jump_host(server: sshd.Sshd) -> None:
    """A jump host that accepts connections without replying causes a timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        jump = f"127.0.0.1:{listener.getsockname()[1]}"
        error = refusal(server.node(jump=jump, connect_timeout=1))
    assert f"cannot log in to jump host {jump}" in error.message
    assert "timed out" in error.evidence


def test_node_behind_the_jump_host_is_down(both: tuple[sshd.Sshd, sshd.Sshd]) -> None:
    """The error names the right one of the two."""
    jump, node = both
    port = free_port()
    error = refusal(node.node(jump=via(jump), port=port))
    assert error.message == f"gpu01: jump host {via(jump)} cannot reach 127.0.0.1:{port}"
    assert error.evidence == "Stdio forwarding request failed: Session open refused by peer"
    assert error.hint == f"ssh -W [127.0.0.1]:{port} ssh://{via(jump)}"


@pytest.fixture
def chain(start_server: Callable[..., sshd.Sshd], home: Path) -> tuple[sshd.Sshd, ...]:
    """Two jump hosts and a node with one encrypted key; the configuration names them in an included
    file, and adds the second jump host by `Match exec`.
    """
    key = sshd.make_key(home / "locked", passphrase="open sesame")
    servers = tuple(start_server(name, authorized=key) for name in ("first", "second", "node"))
    (home / "hosts").write_text("".join(server.known_hosts.read_text() for server in servers))
    first, second, node = servers
    config(home, f"Include {home}/included/*\n")
    (home / "included").mkdir()
    (home / "included" / "cluster").write_text(
        textwrap.dedent(
            f"""
            Host first
              Port {first.port}
            Host second
              Port {second.port}
            Host rack-*
              Port {node.port}
            Match originalhost rack-* exec "test -e {home}/hosts"
              ProxyJump first,second
            Match all
              HostName 127.0.0.1
              User {node.user}
              IdentityFile {key}
              UserKnownHostsFile {home}/hosts
            """
        )
    )
    return servers


def test_the_same_inventory_works_with_ssh(
    chain: tuple[sshd.Sshd, ...], home: Path, agent: Callable[[Path], None], tmp_path: Path
) -> None:
    """Include, Match exec, two jump hosts, ports, and a key that only the agent can use."""
    first, second, node = chain
    clear = tmp_path / "clear"
    clear.write_bytes((home / "locked").read_bytes())
    clear.chmod(0o600)
    change = ["ssh-keygen", "-q", "-p", "-P", "open sesame", "-N", "", "-f", str(clear)]
    subprocess.run(change, check=True)
    agent(clear)
    show = "echo $SSH_CONNECTION"

    ssh = ["ssh", "-o", "BatchMode=yes", "rack-1", show]
    by_ssh = subprocess.run(ssh, capture_output=True, text=True, check=True).stdout.split()
    with Fleet(sshd.inventory(plain(node, "rack-1"))) as fleet:
        (answer,) = fleet.run([Command(node="gpu01", argv=("sh", "-c", show))])
        assert (connections(first), connections(second)) == (1, 1)
    assert answer.ok, answer.err
    assert answer.out.split()[2:] == by_ssh[2:] == ["127.0.0.1", str(node.port)]


_PROGRAM = """\
import contextlib, fcntl, sys, termios, time
sys.path[:0] = {path!r}
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from launcher.core.domain import Node, Ssh
from launcher.ssh.fleet import Fleet
from launcher.core.transport import Command
from tests.ssh import sshd

with Fleet(sshd.inventory(*{nodes!r}), terminal=contextlib.nullcontext) as fleet:
    for error in fleet.connect(["gpu01"]).values():
        sys.exit(f"{{error}}: {{error.evidence}}")
    try:
        print("connected", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        (answer,) = fleet.run([Command(node="gpu02", argv=("echo", "still", "connected"))])
        print(answer.out)
"""


def test_passphrase_prompts_use_the_terminal(chain: tuple[sshd.Sshd, ...], tmp_path: Path) -> None:
    """OpenSSH prompts by itself; Ctrl-C reaches this program, but not its connections."""
    nodes = [replace(plain(chain[2], "rack-1"), name=f"gpu0{number}") for number in (1, 2)]
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(path=sys.path, nodes=nodes))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        printed, prompts, deadline = "", 0, time.monotonic() + 120
        try:
            while "still connected" not in printed and time.monotonic() < deadline:
                if select.select([ours], [], [], 0.1)[0]:
                    try:
                        printed += os.read(ours, 65536).decode(errors="replace")
                    except OSError:  # the program has exited
                        break
                if printed.count("assphrase") > prompts:
                    os.write(ours, b"open sesame\n")
                    prompts += 1
                elif "connected\r\n" in printed and "^C" not in printed:
                    os.write(ours, b"\x03")
                    time.sleep(0.2)
        finally:
            process.kill()
            os.close(ours)

    assert "still connected" in printed, printed
    assert printed.count("Enter passphrase for key") == 2
    assert printed.count("Passphrase of") == 1
