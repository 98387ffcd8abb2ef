"""An inventory from bare host names: found out, written, and used as it is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.inventory.load import load
from launcher.lab import image
from tests.integration.conftest import VLAUNCH, Practice
from tests.ssh import sshd

pytestmark = pytest.mark.lab

Vlaunch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def vlaunch(bare: Practice, tmp_path: Path) -> Iterator[Vlaunch]:
    """The command line of somebody whose `~/.ssh/config` knows the hosts by name, in an empty
    folder.
    """
    home = sshd.make_home(
        tmp_path,
        "".join(
            f"Host {host.name}\n  HostName {host.ip}\n  User root\n  IdentityFile"
            f" {bare.lab.identity}\n  UserKnownHostsFile {bare.lab.known_hosts}\n"
            for host in bare.lab.hosts
        ),
    )
    folder = tmp_path / "work"
    folder.mkdir()
    # what was downloaded stays downloaded
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    env = {key: value for key, value in bare.environment().items() if key != "VLAUNCH_INVENTORY"}
    env |= {
        **home,
        "XDG_CACHE_HOME": cache,
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    env.pop("SSH_AUTH_SOCK", None)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [VLAUNCH, *words],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    yield run
    if (folder / "inventory.yaml").exists():
        assert run("down", "--yes").returncode == 0


def test_an_inventory_written_from_bare_names_brings_the_cluster_up_unedited(
    trio: Practice, vlaunch: Vlaunch, tmp_path: Path
) -> None:
    """Three names in, three nodes in Ray."""
    names = [host.name for host in trio.lab.hosts]
    wrote = vlaunch("init", *names)
    assert wrote.returncode == 0, wrote.stdout + wrote.stderr

    written = load(tmp_path / "work/inventory.yaml")
    assert [(node.name, node.ip, node.interface) for node in written.nodes] == [
        (host.name, host.ip, "eth0") for host in trio.lab.hosts
    ]
    assert (written.accelerator, written.image) == ("cpu", image.NAME)

    up = vlaunch("up")
    assert up.returncode == 0, up.stdout + up.stderr
    assert f"cluster {written.cluster} is up: 3 nodes" in up.stderr
    down = vlaunch("down", "--yes")
    assert down.returncode == 0, down.stdout + down.stderr


def test_a_login_without_rights_on_docker_gets_them_through_sudo(
    trio: Practice, vlaunch: Vlaunch, tmp_path: Path
) -> None:
    """Found out on the host, and written for it."""
    wrote = vlaunch("init", "node1", "ops@node2", "node3")
    assert wrote.returncode == 0, wrote.stdout + wrote.stderr

    assert [node.docker for node in load(tmp_path / "work/inventory.yaml").nodes] == [
        ("docker",),
        ("sudo", "-n", "docker"),
        ("docker",),
    ]
