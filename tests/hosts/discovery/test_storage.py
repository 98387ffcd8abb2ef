"""The state directory of hosts with network home directories."""

from __future__ import annotations

from pathlib import Path

from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.inventory_writer import format_inventory
from launcher.hosts.discovery.local_assets import Disk, LocalAssets
from launcher.hosts.discovery.shape import Discovery, InitOptions
from launcher.inventory.load import loads
from launcher.tools.compile_cache import CompileCache
from tests.hosts.discovery.hosts import GIB, gpus, host, nic

RAID, SCRATCH = Disk(path="/raid", free=900 * GIB), Disk(path="/scratch/ops", free=100 * GIB)


def discover_homes(home: str, *disks: tuple[Disk, ...]) -> Discovery:
    """Discover hosts with these disks and homes on this file system."""
    hosts = [
        host(
            f"gpu0{at}",
            nic("eth0", f"10.0.0.{at}/24"),
            gpus=gpus(8),
            assets=LocalAssets(disks=disk),
            compile_cache=CompileCache(kind=home),
        )
        for at, disk in enumerate(disks, start=1)
    ]
    return discover(hosts, InitOptions())


def test_a_home_on_a_disk_is_used() -> None:
    """Without a remark."""
    evidence = discover_homes("ext2/ext3", (RAID,), (RAID,))

    assert (evidence.state_dir, "state_dir" in format_inventory(evidence)) == (None, False)


def test_a_disk_is_preferred_to_a_network_home() -> None:
    """The one with the most space among those on all hosts, for the compile cache as well."""
    smaller = Disk(path="/raid", free=500 * GIB)
    other = Disk(path="/data", free=9000 * GIB)
    evidence = discover_homes("nfs4", (SCRATCH, RAID, other), (smaller, SCRATCH))
    text = format_inventory(evidence)

    assert loads(text, Path("inventory.yaml")).head.state_dir == "/raid/vlaunch"
    assert "# the SSH user's home is on nfs4, a network file system, where root of the" in text
    assert "# /raid is on a local disk of each host: 500 GiB free" in text
    assert "# the compile cache is there too, in `cache` (`cache_dir:`)" in text
    assert evidence.warnings == ()


def test_no_writable_disk_is_a_warning() -> None:
    """With a command that creates a folder."""
    evidence = discover_homes("nfs4", (RAID,), (SCRATCH,))

    assert evidence.state_dir is None
    assert evidence.warnings == (
        "gpu[01-02]: the SSH user's home is on nfs4, a network file system, and no local disk"
        " common to all hosts is writable: `sudo install -d -o ops /var/lib/vlaunch` on the"
        " hosts, then set `state_dir:` to it",
    )
