"""The preflight checks on real parts: each fault fails its own check, and the check's fix repairs
it.

The faults are injected before `up`, on hosts that have only the image. Each test runs all checks:
but for the named ones, and those that fail with them, all is as on healthy hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.faults import host_faults
from tests.integration.catalogue import (
    SKIPPED,
    Document,
    assert_fails,
    assert_healthy,
    run_checks,
    run_fix,
)
from tests.integration.conftest import LabCluster

pytestmark = pytest.mark.lab

# Checks that need Ray in the image, and so an earlier `up`.
NOT_YET = {"ray-version", "certificates"}


@contextmanager
def port_in_use(lab_cluster: LabCluster, host: str, port: int) -> Iterator[None]:
    """Open a port with an unrelated program."""
    program = (
        f"import socket, time; s = socket.create_server(('', {port})); print('up', flush=True);"
        " time.sleep(600)"
    )
    shell = f'setsid python3 -c "{program}" >/tmp/taken 2>&1 & echo $! >/tmp/taken.pid'
    host_faults.enter(
        lab_cluster.lab.host(host),
        "sh",
        "-c",
        f"rm -f /tmp/taken; {shell}; until grep up /tmp/taken; do :; done",
    )
    try:
        yield
    finally:
        host_faults.enter(
            lab_cluster.lab.host(host), "sh", "-c", "kill $(cat /tmp/taken.pid) 2>/dev/null"
        )


def test_healthy_hosts_before_up(three: LabCluster) -> None:
    """Nothing fails or warns; a skipped check has a reason, and cannot run on such hosts, or not
    yet.
    """
    report = run_checks(three, code=0)

    assert (report.with_status("fail"), report.with_status("warn")) == (set(), set())
    assert report.with_status("skip") == SKIPPED | NOT_YET
    assert all(
        finding["text"]
        for name in report.with_status("skip")
        for finding in report.findings(name, "skip")
    )
    assert three.containers() == {}


def test_a_variable_names_an_interface_of_another_node(three: LabCluster) -> None:
    """`GLOO_SOCKET_IFNAME` of the head for all: the check names the other two; with their own
    values it passes.
    """
    host_faults.add_nic(three.lab.host("node1"), "ib0", "10.99.0.11/24")
    try:
        three.write(lambda document: document["env"].update(GLOO_SOCKET_IFNAME="ib0"))
        findings = assert_fails(three, "interface").findings("interface", "fail")
        assert [finding["node"] for finding in findings] == ["node2", "node3"]
        assert "set it to eth0 under node2's own `env:`" in findings[0]["fix"]

        def own(document: Document) -> None:
            document["env"].update(GLOO_SOCKET_IFNAME="ib0")
            for node in document["nodes"][1:]:
                node["env"] = {"GLOO_SOCKET_IFNAME": "eth0"}

        three.write(own)
        assert_healthy(three, "interface")
    finally:
        host_faults.remove_nic(three.lab.host("node1"), "ib0")


def test_an_interface_has_another_name_on_a_node(three: LabCluster) -> None:
    """`network: {interface: eth0}` for all, but ens9 on node3: the fix is node3's own interface."""
    host_faults.rename(three.lab.host("node3"), "eth0", "ens9")
    try:
        finding = assert_fails(three, "address").only_finding("address")
        assert (finding["node"], finding["fix"]) == (
            "node3",
            "set `network: {interface: ens9}` for node3",
        )
        three.write(lambda document: document["nodes"][2].update(network={"interface": "ens9"}))
        assert_healthy(three, "address")
    finally:
        host_faults.rename(three.lab.host("node3"), "ens9", "eth0")


def test_a_worker_has_the_hca_of_the_head(three: LabCluster) -> None:
    """node2 has another device name: `hca-names` names it, and its own list repairs it.

    An inventory of CPUs may name no device. This one claims GPUs, so that only the group `rdma`
    runs.
    """
    for host, name in zip(three.lab.hosts, ("mlx5_0", "mlx5_4", "mlx5_0"), strict=True):
        host_faults.show_rdma(host, name)
    # The names have no drivers: no host has /dev/infiniband for its containers.
    companion = "rdma-devices"
    try:

        def fast(document: Document) -> None:
            document["accelerator"] = "nvidia"
            document["network"].update(fabric="infiniband")
            document["env"]["NCCL_IB_HCA"] = "mlx5_0"

        three.write(fast)
        report = assert_fails(three, "hca-names", companion, group="rdma")
        finding = report.only_finding("hca-names")
        assert (finding["node"], finding["fix"]) == (
            "node2",
            "set `network: {hca: [mlx5_4]}` for node2 alone",
        )

        def own(document: Document) -> None:
            fast(document)
            document["nodes"][1]["network"] = {"hca": ["mlx5_4"]}

        three.write(own)
        report = assert_fails(three, companion, group="rdma")
        assert report.checks["hca-names"]["status"] == "pass"
    finally:
        for host in three.lab.hosts:
            host_faults.hide_rdma(host)


def test_a_firewall_blocks_one_direction(three: LabCluster) -> None:
    """node3 drops connections from node2: the check names node3 with the direction, and its fix
    opens it.
    """
    host_faults.block(three.lab.host("node3"), three.lab.host("node2"))
    finding = assert_fails(three, "ports-reachable").only_finding("ports-reachable")
    assert (finding["node"], finding["text"].startswith("node2 → node3: TCP ")) == ("node3", True)
    assert "timed out" in finding["text"]
    run_fix(three, "node3", finding["fix"])
    try:
        assert_healthy(three, "ports-reachable")
    finally:
        three.on("node3", "iptables", "-D", "INPUT", "1")


def test_a_port_that_a_firewall_drops(three: LabCluster) -> None:
    """Ray's port of the head is closed for all: the check names the head once per client, with only
    that port.
    """
    host_faults.close_port(three.lab.host("node1"), 6379)
    findings = assert_fails(three, "ports-reachable").findings("ports-reachable", "fail")
    assert {(row["node"], row["text"]) for row in findings} == {
        ("node1", f"{name} → node1: TCP 6379 timed out: something drops it")
        for name in ("node2", "node3")
    }
    for finding in findings:
        run_fix(three, "node1", finding["fix"])
    try:
        assert_healthy(three, "ports-reachable")
    finally:
        for _ in findings:
            three.on("node1", "iptables", "-D", "INPUT", "1")


def test_jumbo_frames_on_a_single_node(three: LabCluster) -> None:
    """MTU 9000 on node3 alone."""
    host_faults.set_mtu(three.lab.host("node3"), 9000)
    finding = assert_fails(three, "mtu").only_finding("mtu")
    assert (finding["node"], finding["text"]) == (
        "node3",
        "mtu 9000 on `eth0`, while node[1-2] has 1500",
    )
    run_fix(three, "node3", finding["fix"])
    assert_healthy(three, "mtu")


def test_a_bridge_that_drops_large_packets(three: LabCluster) -> None:
    """Packets of more than 1400 bytes are lost from node2 to node3; with that MTU on every node
    none are.
    """
    host_faults.drop_large(three.lab.host("node3"), three.lab.host("node2"), 1400)
    finding = assert_fails(three, "mtu-path").only_finding("mtu-path")
    assert (finding["node"], finding["text"]) == (
        "node3",
        "node2 → node3: packets of more than 1400 bytes are lost; 1500 should pass",
    )
    for host in three.lab.hosts:
        run_fix(three, host.name, finding["fix"])
    assert_healthy(three, "mtu-path")


def test_a_name_on_loopback(three: LabCluster) -> None:
    """node2 resolves its own name to 127.0.1.1, as Debian's installer writes it."""
    host_faults.name_on_loopback(three.lab, three.lab.host("node2"))
    try:
        finding = assert_fails(three, "hostname").only_finding("hostname")
        assert (finding["node"], finding["text"]) == (
            "node2",
            "its name `node2` resolves to 127.0.1.1",
        )
        run_fix(three, "node2", finding["fix"])
        assert_healthy(three, "hostname")
    finally:
        host_faults.name_on_loopback(three.lab, three.lab.host("node2"), yes=False)


def test_the_port_of_the_network_check_is_in_use(three: LabCluster) -> None:
    """29500 on the head: the command of the fix finds the process."""
    with port_in_use(three, "node1", 29500):
        finding = assert_fails(three, "ports").only_finding("ports")
        assert (finding["node"], finding["text"]) == (
            "node1",
            "port 29500 (network check) is in use",
        )
        match = re.search(r"pid=(\d+)", run_fix(three, "node1", finding["fix"]))
        assert match is not None
        host_faults.enter(three.lab.host("node1"), "kill", match[1])
        assert_healthy(three, "ports")


def test_a_port_of_ray_is_in_use(three: LabCluster) -> None:
    """6381 on a worker: another port in the inventory repairs it."""
    with port_in_use(three, "node2", 6381):
        finding = assert_fails(three, "ports").only_finding("ports")
        assert (finding["node"], finding["text"]) == (
            "node2",
            "port 6381 (Ray object manager) is in use",
        )
        assert "choose others under `ports:`" in finding["fix"]
        three.write(lambda document: document.update(ports={"object_manager": 6391}))
        assert_healthy(three, "ports")


def test_a_second_card_in_the_same_subnet(three: LabCluster) -> None:
    """A warning, because it may work; none with a subnet of its own."""
    two = three.lab.host("node2")
    host_faults.add_nic(two, "eth1", "10.79.0.200/24")
    try:
        report = run_checks(three, code=0)
        assert (report.with_status("fail"), report.with_status("warn")) == (
            set(),
            {"one-nic-per-subnet"},
        )
        finding = report.only_finding("one-nic-per-subnet", "warn")
        assert (finding["node"], finding["text"]) == (
            "node2",
            "`eth0` and `eth1` are both in 10.79.0.0/24",
        )
        assert finding["fix"].startswith("give each a subnet of its own")
        run_checks(three, "--strict", "--only", "one-nic-per-subnet", code=3)
        host_faults.remove_nic(two, "eth1")
        host_faults.add_nic(two, "eth1", "10.99.0.200/24")
        assert_healthy(three, "one-nic-per-subnet")
    finally:
        host_faults.remove_nic(two, "eth1")


def test_an_address_of_no_host(three: LabCluster) -> None:
    """A typo in the inventory: the check names the node, with its real addresses."""
    three.write(lambda document: document["nodes"][2].update(ip="10.79.0.99"))
    finding = assert_fails(three, "address").only_finding("address")
    assert (finding["node"], finding["text"]) == ("node3", "no interface has 10.79.0.99")
    assert "eth0 10.79.0.13" in finding["evidence"]
    assert finding["fix"].startswith("set `ip:` of node3")
    three.write()
    assert_healthy(three, "address")
