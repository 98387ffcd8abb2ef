"""The user's own configuration of ssh."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.remote.fleet import Fleet
from tests.remote import sshd
from tests.remote.conftest import refusal, works

pytestmark = pytest.mark.processes


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
