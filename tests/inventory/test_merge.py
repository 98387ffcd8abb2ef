"""Cluster-wide values below every node's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.core.domain import (
    Inventory,
    Mount,
    Node,
    Ports,
    RaySettings,
    SecretSource,
    ServeDefaults,
    Ssh,
)

Load = Callable[..., Inventory]

_NODES = """
nodes:
  - {host: a, ip: 10.0.0.1, gpus: 8}
  - host: b
    ip: 10.0.0.2
    gpus: 4
    %s
"""


def _second(load_text: Load, extra: str, own: str) -> Node:
    return load_text(extra, _NODES % own).nodes[1]


def test_a_minimal_inventory_has_the_models_defaults(load_text: Load) -> None:
    """The schema repeats none of them differently."""
    inventory = load_text(nodes="\nnodes: [{host: 10.0.0.1, gpus: 8}]")

    assert (
        Node(name="10.0.0.1", host="10.0.0.1", ip="10.0.0.1", gpus=8, head=True),
    ) == inventory.nodes
    assert (RaySettings(), Ports(), ServeDefaults()) == (
        inventory.ray,
        inventory.ports,
        inventory.serve,
    )
    assert (
        inventory.accelerator,
        inventory.fabric,
        inventory.require,
        inventory.shm,
        inventory.cap,
    ) == ("nvidia", "ethernet", "auto", "private", 32)


def test_environment_is_merged_name_by_name(load_text: Load) -> None:
    """The node's value wins; the cluster's others stay."""
    env = _second(load_text, "env: {A: 1, B: 2}", "env: {B: 3, C: 4}").env

    assert env == {"A": "1", "B": "3", "C": "4"}


def test_ssh_is_merged_key_by_key(load_text: Load) -> None:
    """A node with another port keeps the cluster's user."""
    ssh = _second(
        load_text,
        "ssh: {user: ops, port: 22, jump: bastion}",
        "ssh: {port: 2222, connect_timeout: 3}",
    ).ssh

    assert Ssh(user="ops", port=2222, jump="bastion", connect_timeout=3.0) == ssh


def test_network_is_merged_key_by_key(load_text: Load) -> None:
    """A node with other devices keeps the cluster's interface."""
    node = _second(
        load_text,
        "network: {fabric: roce, interface: eth0, hca: [mlx5_0]}",
        "network: {hca: [mlx5_4, mlx5_5]}",
    )

    assert (node.interface, node.hca) == ("eth0", ("mlx5_4", "mlx5_5"))


def test_a_node_can_have_no_devices_where_the_cluster_has_some(load_text: Load) -> None:
    """An empty list differs from a missing key."""
    assert (
        _second(load_text, "network: {fabric: roce, hca: [mlx5_0]}", "network: {hca: []}").hca == ()
    )


@pytest.mark.parametrize(
    ("key", "cluster", "own", "expected"),
    [
        ("docker", "[sudo, -n, docker]", "[podman]", ("podman",)),
        ("hf_home", "/a", "/b", "/b"),
        ("state_dir", "/a", "/b", "/b"),
        ("connection", "ssh", "local", "local"),
    ],
)
def test_other_values_are_replaced(
    load_text: Load, key: str, cluster: str, own: str, expected: object
) -> None:
    """Completely, and only on that node."""
    inventory = load_text(f"{key}: {cluster}", _NODES % f"{key}: {own}")

    assert expected == getattr(inventory.nodes[1], key)
    assert expected != getattr(inventory.nodes[0], key)


def test_names_default_to_hosts(load_text: Load) -> None:
    """Ranges of names correspond to ranges of hosts."""
    named = "\nnodes: [{host: '10.0.0.[1-2]', name: 'n[01-02]', gpus: 1}]"

    assert [
        node.name for node in load_text(nodes=named.replace("name: 'n[01-02]', ", "")).nodes
    ] == ["10.0.0.1", "10.0.0.2"]
    assert [node.name for node in load_text(nodes=named).nodes] == ["n01", "n02"]


def test_paths_of_keys_start_at_the_inventorys_folder_or_at_home(
    load_text: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inventory can be moved together with its key."""
    monkeypatch.setenv("HOME", "/home/me")
    ssh = load_text("ssh: {identity: keys/id, known_hosts: ~/known}").head.ssh

    assert (ssh.identity, ssh.known_hosts) == ("/etc/vlaunch/keys/id", "/home/me/known")


def test_relative_inventories_give_absolute_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For any later working directory."""
    from launcher.inventory.load import load

    (tmp_path / "my.yaml").write_text(
        "cluster: a\nimage: b\nssh: {identity: id}\nnodes: [{host: 10.0.0.1, gpus: 1}]\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)

    assert str(tmp_path / "id") == load(Path("my.yaml")).head.ssh.identity


def test_all_other_sections(load_text: Load) -> None:
    """One by one."""
    inventory = load_text("""
        accelerator: amd
        ray: "2.61.0"
        shm: 1GiB
        privileged: true
        cap: 5
        network: {fabric: infiniband, require: rdma}
        mounts: ["/a:/b:ro", {source: /c, target: /d}]
        secrets:
          {A: {env: B}, C: {file: keys/d}, E: {command: pass show e}, F: {prompt: true},
           G: {prompt: Say}}
        secrets_in: memory
        ports: {api: 9000}
        serve: {model: org/name, tp: 8, pp: 2, backend: mp, bind: 127.0.0.1, args: [--x, 1]}
        """)

    assert (inventory.accelerator, inventory.ray.version, inventory.shm, inventory.cap) == (
        "amd",
        "2.61.0",
        2**30,
        5,
    )
    assert (inventory.fabric, inventory.require, inventory.privileged) == (
        "infiniband",
        "rdma",
        True,
    )
    assert (
        Mount(source="/a", target="/b", read_only=True),
        Mount(source="/c", target="/d"),
    ) == inventory.mounts
    assert {
        "A": SecretSource(env="B"),
        "C": SecretSource(file="keys/d"),
        "E": SecretSource(command="pass show e"),
        "F": SecretSource(prompt="Value of F"),
        "G": SecretSource(prompt="Say"),
    } == inventory.secrets
    assert inventory.secrets_in == "memory"
    assert Ports(api=9000) == inventory.ports
    assert (
        ServeDefaults(
            model="org/name", tp=8, pp=2, backend="mp", bind="127.0.0.1", args=("--x", "1")
        )
        == inventory.serve
    )
