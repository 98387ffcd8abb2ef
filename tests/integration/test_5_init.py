"""An inventory from bare host names: scanned, written, and used unchanged."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.inventory.load import load
from launcher.lab import image
from tests.integration.conftest import VLAUNCH, LabCluster
from tests.ssh import sshd

pytestmark = pytest.mark.lab

Vlaunch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def vlaunch(bare: LabCluster, tmp_path: Path) -> Iterator[Vlaunch]:
    """The command of a user whose `~/.ssh/config` has the hosts' names, in an empty folder."""
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
    # keeps earlier downloads
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    env = {key: value for key, value in bare.environment().items() if key != "VLAUNCH_INVENTORY"}
    env |= {
        **home,
        "XDG_CACHE_HOME": cache,
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    env.pop("SSH_AUTH_SOCK", None)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [VLAUNCH, *arguments],
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


def test_an_inventory_from_bare_names_starts_the_cluster(
    trio: LabCluster, vlaunch: Vlaunch, tmp_path: Path
) -> None:
    """Two names as input, two nodes in Ray."""
    hosts = trio.lab.hosts[:2]
    result = vlaunch("init", *(host.name for host in hosts))
    assert result.returncode == 0, result.stdout + result.stderr

    inventory = load(tmp_path / "work/inventory.yaml")
    assert [(node.name, node.ip, node.interface) for node in inventory.nodes] == [
        (host.name, host.ip, "eth0") for host in hosts
    ]
    assert (inventory.accelerator, inventory.image) == ("cpu", image.NAME)

    up = vlaunch("up")
    assert up.returncode == 0, up.stdout + up.stderr
    assert f"cluster {inventory.cluster} is up: 2 nodes" in up.stderr
    down = vlaunch("down", "--yes")
    assert down.returncode == 0, down.stdout + down.stderr


def test_a_user_without_docker_rights_gets_sudo(
    trio: LabCluster, vlaunch: Vlaunch, tmp_path: Path
) -> None:
    """Detected on the host, and written for it alone."""
    result = vlaunch("init", "node1", "ops@node2", "node3")
    assert result.returncode == 0, result.stdout + result.stderr

    assert [node.docker for node in load(tmp_path / "work/inventory.yaml").nodes] == [
        ("docker",),
        ("sudo", "-n", "docker"),
        ("docker",),
    ]
