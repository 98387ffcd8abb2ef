"""Files of a lab cluster."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from launcher.lab import gpu_image, host_configs, layout

LAB = layout.make_lab(
    name="vlaunch-lab", directory=Path("/var/lib/my lab: 1"), subnet="10.78.0.0/24", nodes=2, gpus=3
)


def test_the_inventory_names_every_host_and_survives_odd_paths() -> None:
    """A directory with a space and a colon is still one path."""
    inventory = yaml.safe_load(host_configs.inventory(LAB))

    assert inventory["ssh"] == {
        "user": "root",
        "identity": "/var/lib/my lab: 1/id_ed25519",
        "known_hosts": "/var/lib/my lab: 1/known_hosts",
    }
    assert inventory["nodes"] == [
        {"name": "node1", "host": "10.78.0.11", "ip": "10.78.0.11", "gpus": 3},
        {"name": "node2", "host": "10.78.0.12", "ip": "10.78.0.12", "gpus": 3},
    ]
    assert inventory["accelerator"] == "cpu"
    assert all(isinstance(value, str) for value in inventory["env"].values())


def test_the_inventory_of_simulated_gpus_names_the_cpu_build(tmp_path: Path) -> None:
    """It is one for NVIDIA GPUs, with the image that replaces one with CUDA."""
    lab = layout.make_lab(
        name="vlaunch-lab",
        directory=tmp_path,
        subnet="10.78.0.0/24",
        nodes=1,
        gpus=8,
        accelerator="nvidia",
    )
    text = host_configs.inventory(lab)
    inventory = yaml.safe_load(text)

    assert (inventory["accelerator"], inventory["image"]) == ("nvidia", gpu_image.NAME)
    assert inventory["nodes"][0]["gpus"] == 8
    assert "vLLM runs its CPU build" in text


def test_every_host_resolves_every_host() -> None:
    """An unresolved host name delays Ray by half a minute."""
    hosts = host_configs.etc_files(LAB, LAB.hosts[0])["hosts"]

    assert "10.78.0.11 node1\n10.78.0.12 node2\n" in hosts
    assert "127.0.1.1" not in hosts


def test_docker_daemons_do_not_interfere() -> None:
    """Two daemons on one kernel must not interfere."""
    first, second = (
        json.loads(host_configs.etc_files(LAB, host)["docker/daemon.json"]) for host in LAB.hosts
    )

    assert (first["bridge"], first["iptables"], first["ip6tables"]) == ("none", False, False)
    assert first["cgroup-parent"] != second["cgroup-parent"]


def test_accounts_are_open_to_keys_only() -> None:
    """`*` lets keys in; a `!` would lock the account for a server without PAM."""
    shadow = host_configs.etc_files(LAB, LAB.hosts[0])["shadow"].splitlines()

    assert {line.split(":")[1] for line in shadow} == {"*"}
    # and `ops` is not in it
    assert "docker:x:999:\n" in host_configs.etc_files(LAB, LAB.hosts[0])["group"]


def test_known_hosts_has_a_line_per_host() -> None:
    """Without the comments of public keys."""
    keys = {
        "node1": "ssh-ed25519 AAAA1 root@somewhere\n",
        "node2": "ssh-ed25519 AAAA2 root@somewhere\n",
    }

    assert host_configs.known_hosts(LAB, keys) == (
        "10.78.0.11,node1 ssh-ed25519 AAAA1\n10.78.0.12,node2 ssh-ed25519 AAAA2\n"
    )
