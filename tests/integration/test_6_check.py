"""The preflight on real parts: green on healthy hosts; each fault turns its own check red, and its
fix makes it green again.

Faults are made before `up`, on hosts that have the image and nothing else. Each time the whole
catalogue is run: but for the named checks, and companions with their reason, all is as on healthy
hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.faults import host_faults
from tests.integration.catalogue import Document, broken, check, do, healthy
from tests.integration.conftest import Practice

pytestmark = pytest.mark.lab

# What hosts without accelerator, RDMA and time daemon, and a model that is a path, cannot be asked.
SKIPPED = {
    "accelerator",
    "driver",
    "fabric-manager",
    "gid-index",
    "gpu-errors",
    "gpu-memory",
    "gpu-mig",
    "gpu-model",
    "gpu-runtime",
    "gpu-shared",
    "gpudirect",
    "hca-names",
    "hf-token",
    "imex",
    "interface",
    "ipc-lock",
    "libibverbs",
    "memlock",
    "next-boot",
    "privileged",
    "rdma-container",
    "rdma-devices",
    "rdma-link",
    "sudo",
    "time-sync",
}
# Before `up` the image has no Ray yet.
NOT_YET = {"ray-version", "certificates"}


@contextmanager
def taken(practice: Practice, host: str, port: int) -> Iterator[None]:
    """Let a stranger listen at a port."""
    program = (
        f"import socket, time; s = socket.create_server(('', {port})); print('up', flush=True);"
        " time.sleep(600)"
    )
    shell = f'setsid python3 -c "{program}" >/tmp/taken 2>&1 & echo $! >/tmp/taken.pid'
    host_faults.enter(
        practice.lab.host(host),
        "sh",
        "-c",
        f"rm -f /tmp/taken; {shell}; until grep up /tmp/taken; do :; done",
    )
    try:
        yield
    finally:
        host_faults.enter(
            practice.lab.host(host), "sh", "-c", "kill $(cat /tmp/taken.pid) 2>/dev/null"
        )


def test_healthy_hosts_before_up(three: Practice) -> None:
    """Nothing fails or warns; what is skipped has a reason, and is what such hosts cannot have, or
    not yet.
    """
    seen = check(three, code=0)

    assert (seen.of("fail"), seen.of("warn")) == (set(), set())
    assert seen.of("skip") == SKIPPED | NOT_YET
    assert all(
        finding["text"] for name in seen.of("skip") for finding in seen.findings(name, "skip")
    )
    assert three.containers() == {}


def test_an_interface_that_a_variable_names_and_one_node_alone_has(three: Practice) -> None:
    """`GLOO_SOCKET_IFNAME` of the head given to all: the other two are named; each gets its own,
    and all is well.
    """
    host_faults.add_nic(three.lab.host("node1"), "ib0", "10.99.0.11/24")
    try:
        three.write(lambda document: document["env"].update(GLOO_SOCKET_IFNAME="ib0"))
        found = broken(three, "interface").findings("interface", "fail")
        assert [each["node"] for each in found] == ["node2", "node3"]
        assert "set it to eth0 under node2's own `env:`" in found[0]["fix"]

        def own(document: Document) -> None:
            document["env"].update(GLOO_SOCKET_IFNAME="ib0")
            for node in document["nodes"][1:]:
                node["env"] = {"GLOO_SOCKET_IFNAME": "eth0"}

        three.write(own)
        healthy(three, "interface")
    finally:
        host_faults.remove_nic(three.lab.host("node1"), "ib0")


def test_an_interface_that_is_called_otherwise_on_one_node(three: Practice) -> None:
    """`network: {interface: eth0}` for all, where node3 calls it ens9: the fix is node3's own
    interface.
    """
    host_faults.rename(three.lab.host("node3"), "eth0", "ens9")
    try:
        found = broken(three, "address").one("address")
        assert (found["node"], found["fix"]) == (
            "node3",
            "set `network: {interface: ens9}` for node3",
        )
        three.write(lambda document: document["nodes"][2].update(network={"interface": "ens9"}))
        healthy(three, "address")
    finally:
        host_faults.rename(three.lab.host("node3"), "ens9", "eth0")


def test_the_heads_hca_given_to_a_worker(three: Practice) -> None:
    """node2 calls its device otherwise: `hca-names` names it, and its own list makes it green.

    An inventory of CPUs may name no device. This one says that there are GPUs, so that only the
    group `rdma` is asked.
    """
    for host, name in zip(three.lab.hosts, ("mlx5_0", "mlx5_4", "mlx5_0"), strict=True):
        host_faults.show_rdma(host, name)
    # There are no drivers behind the names: no host has /dev/infiniband, and no container can be
    # given it.
    companion = "rdma-devices"
    try:

        def fast(document: Document) -> None:
            document["accelerator"] = "nvidia"
            document["network"].update(fabric="infiniband")
            document["env"]["NCCL_IB_HCA"] = "mlx5_0"

        three.write(fast)
        seen = broken(three, "hca-names", companion, group="rdma")
        found = seen.one("hca-names")
        assert (found["node"], found["fix"]) == (
            "node2",
            "set `network: {hca: [mlx5_4]}` for node2 alone",
        )

        def own(document: Document) -> None:
            fast(document)
            document["nodes"][1]["network"] = {"hca": ["mlx5_4"]}

        three.write(own)
        seen = broken(three, companion, group="rdma")
        assert seen.checks["hca-names"]["status"] == "pass"
    finally:
        for host in three.lab.hosts:
            host_faults.hide_rdma(host)


def test_a_firewall_that_is_open_one_way(three: Practice) -> None:
    """node3 takes nothing from node2: node3 is named with the direction, and its fix opens it."""
    host_faults.block(three.lab.host("node3"), three.lab.host("node2"))
    found = broken(three, "ports-reachable").one("ports-reachable")
    assert (found["node"], found["text"].startswith("node2 → node3: TCP ")) == ("node3", True)
    assert "timed out" in found["text"]
    do(three, "node3", found["fix"])
    try:
        healthy(three, "ports-reachable")
    finally:
        three.on("node3", "iptables", "-D", "INPUT", "1")


def test_a_port_that_a_firewall_drops(three: Practice) -> None:
    """Ray's port of the head is closed for all: the head is named once for each that knocked, with
    that port alone.
    """
    host_faults.close_port(three.lab.host("node1"), 6379)
    found = broken(three, "ports-reachable").findings("ports-reachable", "fail")
    assert {(f["node"], f["text"]) for f in found} == {
        ("node1", f"{name} → node1: TCP 6379 timed out: something drops it")
        for name in ("node2", "node3")
    }
    for each in found:
        do(three, "node1", each["fix"])
    try:
        healthy(three, "ports-reachable")
    finally:
        for _ in found:
            three.on("node1", "iptables", "-D", "INPUT", "1")


def test_jumbo_frames_on_one_side(three: Practice) -> None:
    """MTU 9000 on node3 alone."""
    host_faults.set_mtu(three.lab.host("node3"), 9000)
    found = broken(three, "mtu").one("mtu")
    assert (found["node"], found["text"]) == (
        "node3",
        "mtu 9000 on `eth0`, while node[1-2] has 1500",
    )
    do(three, "node3", found["fix"])
    healthy(three, "mtu")


def test_a_bridge_that_drops_large_packets(three: Practice) -> None:
    """What is larger than 1400 bytes is lost from node2 to node3; with that MTU on every node
    nothing is.
    """
    host_faults.drop_large(three.lab.host("node3"), three.lab.host("node2"), 1400)
    found = broken(three, "mtu-path").one("mtu-path")
    assert (found["node"], found["text"]) == (
        "node3",
        "node2 → node3: packets of more than 1400 bytes are lost; 1500 should pass",
    )
    for host in three.lab.hosts:
        do(three, host.name, found["fix"])
    healthy(three, "mtu-path")


def test_a_name_on_loopback(three: Practice) -> None:
    """node2 knows itself as 127.0.1.1, as Debian's installer writes it."""
    host_faults.name_on_loopback(three.lab, three.lab.host("node2"))
    try:
        found = broken(three, "hostname").one("hostname")
        assert (found["node"], found["text"]) == ("node2", "its name `node2` resolves to 127.0.1.1")
        do(three, "node2", found["fix"])
        healthy(three, "hostname")
    finally:
        host_faults.name_on_loopback(three.lab, three.lab.host("node2"), yes=False)


def test_the_probes_port_is_taken(three: Practice) -> None:
    """29500 on the head: what the fix says finds who has it."""
    with taken(three, "node1", 29500):
        found = broken(three, "ports").one("ports")
        assert (found["node"], found["text"]) == ("node1", "port 29500 (network check) is taken")
        who = re.search(r"pid=(\d+)", do(three, "node1", found["fix"]))
        assert who is not None
        host_faults.enter(three.lab.host("node1"), "kill", who[1])
        healthy(three, "ports")


def test_one_of_rays_ports_is_taken(three: Practice) -> None:
    """6381 on a worker: another one in the inventory will do."""
    with taken(three, "node2", 6381):
        found = broken(three, "ports").one("ports")
        assert (found["node"], found["text"]) == (
            "node2",
            "port 6381 (Ray object manager) is taken",
        )
        assert "choose others under `ports:`" in found["fix"]
        three.write(lambda document: document.update(ports={"object_manager": 6391}))
        healthy(three, "ports")


def test_a_second_card_in_the_same_subnet(three: Practice) -> None:
    """It may work, and is a warning; with a subnet of its own it is none."""
    two = three.lab.host("node2")
    host_faults.add_nic(two, "eth1", "10.79.0.200/24")
    try:
        seen = check(three, code=0)
        assert (seen.of("fail"), seen.of("warn")) == (set(), {"one-nic-per-subnet"})
        found = seen.one("one-nic-per-subnet", "warn")
        assert (found["node"], found["text"]) == (
            "node2",
            "`eth0` and `eth1` are both in 10.79.0.0/24",
        )
        assert found["fix"].startswith("give each a subnet of its own")
        check(three, "--strict", "--only", "one-nic-per-subnet", code=3)
        host_faults.remove_nic(two, "eth1")
        host_faults.add_nic(two, "eth1", "10.99.0.200/24")
        healthy(three, "one-nic-per-subnet")
    finally:
        host_faults.remove_nic(two, "eth1")


def test_an_address_that_nobody_has(three: Practice) -> None:
    """A slip of the pen in the inventory: the node is named, with the addresses that it has."""
    three.write(lambda document: document["nodes"][2].update(ip="10.79.0.99"))
    found = broken(three, "address").one("address")
    assert (found["node"], found["text"]) == ("node3", "no interface has 10.79.0.99")
    assert "eth0 10.79.0.13" in found["evidence"]
    assert found["fix"].startswith("set `ip:` of node3")
    three.write()
    healthy(three, "address")


def test_healthy_hosts_with_the_cluster_up(three: Practice) -> None:
    """Its own ports and containers are no fault, and Ray's version is known now."""
    assert three.vlaunch("up").code == 0
    seen = check(three, code=0)
    assert three.vlaunch("down", "--yes").code == 0

    assert (seen.of("fail"), seen.of("warn")) == (set(), set())
    assert seen.of("skip") == SKIPPED
