"""A real sshd on loopback, run by the tests' user."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.core.domain import Inventory, Node, Ssh
from tests.ports import free_port


@dataclass(kw_only=True)
class Sshd:
    """A running server; `key` logs in, `known_hosts` has its host key."""

    folder: Path
    port: int
    key: Path
    known_hosts: Path
    process: subprocess.Popen[str]

    @property
    def user(self) -> str:
        return getpass.getuser()

    def ssh(self, **changes: Any) -> Ssh:
        """The SSH settings for this server."""
        settings: dict[str, Any] = {
            "user": self.user,
            "port": self.port,
            "identity": str(self.key),
            "known_hosts": str(self.known_hosts),
            "connect_timeout": 10.0,
        }
        return Ssh(**{**settings, **changes})

    def node(self, name: str = "gpu01", *, host: str = "127.0.0.1", **changes: Any) -> Node:
        """Return this server as a node."""
        return Node(
            name=name,
            host=host,
            ip="127.0.0.1",
            gpus=0,
            head=name == "gpu01",
            ssh=self.ssh(**changes),
        )


def inventory(*nodes: Node, cap: int = 32) -> Inventory:
    """Return an inventory of these nodes."""
    return Inventory(
        path=Path("inventory.yaml"),
        cluster="test",
        image="none",
        nodes=nodes,
        cap=cap,
        accelerator="cpu",
    )


def make_home(folder: Path, configuration: str = "") -> dict[str, str]:
    """Create a home with an SSH configuration; return the user's environment. ssh takes the home
    from the system's user database, not from HOME: PATH has a wrapper that does not.
    """
    (folder / ".ssh").mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / ".ssh" / "config").write_text(configuration)
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir(exist_ok=True)
    program = shutil.which("ssh", path="/usr/bin:/usr/local/bin")
    ssh.write_text(f'#!/bin/sh\nexec {program} -F "{folder}/.ssh/config" "$@"\n')
    ssh.chmod(0o755)
    return {"HOME": str(folder), "PATH": f"{ssh.parent}:{os.environ['PATH']}"}


def make_key(path: Path, *, passphrase: str = "") -> Path:
    """Write an ed25519 key pair."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", str(path)],
        check=True,
    )
    return path


def start(
    folder: Path, *, extra: str = "", authorized: Path | None = None, listen: str = "127.0.0.1"
) -> Sshd:
    """Start a server in `folder`, with `extra` in its configuration, and wait until it listens.
    `folder` is the home directory, to exclude the start-up files of the user's shell.
    """
    binary = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if binary is None:
        pytest.fail("these tests need sshd: apt-get install -y openssh-server")
    if os.geteuid() == 0:
        # its privilege separation directory, normally created by the service
        Path("/run/sshd").mkdir(exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    key = authorized or make_key(folder / "key")
    host_key = make_key(folder / "host_key")
    (folder / "authorized_keys").write_text(Path(f"{key}.pub").read_text())
    port = free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress {listen}\nHostKey {host_key}\nAuthorizedKeysFile"
        f" {folder}/authorized_keys\nStrictModes no\nUsePAM no\nPidFile"
        " none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups"
        f" 200\nPrintMotd no\nPermitRootLogin yes\nSetEnv HOME={folder}\n{extra}\n"
    )
    process = subprocess.Popen(
        [binary, "-D", "-e", "-f", str(folder / "sshd_config")],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    output_lines = []
    for line in process.stderr:
        output_lines.append(line)
        if "Server listening" in line:
            break
    else:
        pytest.fail("sshd did not start:\n" + "".join(output_lines))
    threading.Thread(target=process.stderr.read, daemon=True).start()
    known_hosts = folder / "known_hosts"
    kind, blob = Path(f"{host_key}.pub").read_text().split()[:2]
    known_hosts.write_text(f"[127.0.0.1]:{port} {kind} {blob}\n")
    return Sshd(folder=folder, port=port, key=key, known_hosts=known_hosts, process=process)


def stop(server: Sshd) -> None:
    """Stop the server and its sessions."""
    server.process.terminate()
    server.process.wait(timeout=60)
    if server.process.stderr is not None:
        server.process.stderr.close()
