"""Trusted servers, and the errors for others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.ssh.fleet import Fleet
from tests.ssh import sshd
from tests.ssh.conftest import refusal, works

pytestmark = pytest.mark.processes


def test_unknown_host_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """An unknown server is rejected, with both ways to trust it."""
    error = refusal(server.node(known_hosts=str(tmp_path / "none")))
    assert "host key" in error.message
    assert str(tmp_path / "none") in error.message
    assert f"ssh-keyscan -p {server.port} -H 127.0.0.1 >> {tmp_path}/none" in error.hint
    assert "--accept-new-host-keys" in error.hint
    assert "SHA256:" in error.evidence


def test_accept_new_host_keys(server: sshd.Sshd, tmp_path: Path) -> None:
    """It writes one line in OpenSSH's format, keeps the rest, and is unnecessary the next time."""
    file = tmp_path / "deep" / "known_hosts"
    file.parent.mkdir()
    file.write_text("# mine\nother ssh-ed25519 AAAA")
    node = server.node(known_hosts=str(file))
    assert works(node, accept_new_host_keys=True)
    lines = file.read_text().splitlines()
    assert lines[:2] == ["# mine", "other ssh-ed25519 AAAA"]
    assert len(lines) == 3
    assert works(node)
    ssh = [
        "ssh",
        "-F",
        "none",
        "-o",
        f"UserKnownHostsFile={file}",
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


@pytest.mark.parametrize("accept", [False, True])
def test_changed_host_key(server: sshd.Sshd, tmp_path: Path, accept: bool) -> None:
    """A key other than the stored one is always rejected."""
    other = sshd.make_key(tmp_path / "other")
    kind, blob = Path(f"{other}.pub").read_text().split()[:2]
    file = tmp_path / "known"
    file.write_text(f"[127.0.0.1]:{server.port} {kind} {blob}\n")
    error = refusal(server.node(known_hosts=str(file)), accept_new_host_keys=accept)
    assert "has changed" in error.message
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {file}" in error.hint
    assert len(file.read_text().splitlines()) == 1


def test_a_second_key_of_another_type_is_no_change(
    start_server: Callable[..., sshd.Sshd], tmp_path: Path
) -> None:
    """The server must present the stored type of key."""
    key = tmp_path / "ecdsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(key)], check=True)
    server = start_server(extra=f"HostKey {key}")
    kind, blob = Path(f"{key}.pub").read_text().split()[:2]
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {kind} {blob}\n")
    assert works(server.node())


def test_users_own_known_hosts(server: sshd.Sshd, home: Path) -> None:
    """Without a file in the inventory, the user's own counts."""
    (home / "hosts").write_text(server.known_hosts.read_text())
    (home / ".ssh" / "config").write_text(f"UserKnownHostsFile {home}/none {home}/hosts\n")
    assert works(server.node(known_hosts=None))
