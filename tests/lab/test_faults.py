"""Injected faults and their removal, on two lab hosts without the image."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.faults import host_faults
from launcher.lab import hosts, layout, machine, processes, removal
from launcher.lab.layout import Host, Lab
from tests.lab.test_lifecycle import DIRECTORY, NAME, quiet, reaches, ssh, start

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts, which every test leaves intact."""
    lab = layout.make_lab(name=NAME, directory=DIRECTORY, subnet="10.79.77.0/24", nodes=2, gpus=1)
    removal.remove_lab(NAME, DIRECTORY, quiet)
    start(lab)
    yield lab
    removal.remove_lab(NAME, DIRECTORY, quiet)
    assert removal.leftovers(NAME, DIRECTORY) == []


@contextmanager
def listening(host: Host, port: int) -> Iterator[None]:
    """Let a host receive data at a port, over TCP or UDP, and report the size."""
    program = f"""
import socket, threading
listener = socket.create_server(("", {port}))
datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("", {port}))
def answer_datagrams():
    while True:
        data, sender = datagrams.recvfrom(65536)
        datagrams.sendto(b"%d" % len(data), sender)
def count_bytes(client):
    count = 0
    while data := client.recv(65536):
        count += len(data)
    client.sendall(b"%d" % count)
    client.close()
threading.Thread(target=answer_datagrams, daemon=True).start()
print("open", flush=True)
while True:
    threading.Thread(target=count_bytes, args=listener.accept()[:1], daemon=True).start()
"""
    argv = hosts.enter_argv(host, "python3", "-c", program)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            yield
        finally:
            subprocess.run(["pkill", "--parent", str(process.pid)], check=False)
            process.kill()


def send_bytes(host: Host, ip: str, port: int, size: int, timeout: float = 3.0) -> float | None:
    """Send bytes from a host to a host with `listening`; return the seconds until all arrived."""
    program = f"""
import socket, time
began = time.monotonic()
target = socket.create_connection(("{ip}", {port}), timeout={timeout})
target.sendall(b"x" * {size})
target.shutdown(socket.SHUT_WR)
assert int(target.recv(64)) == {size}
print(time.monotonic() - began)
"""
    completed = host_faults.enter(host, "python3", "-c", program)
    return float(completed.stdout) if completed.returncode == 0 else None


def packet_arrives(host: Host, ip: str, port: int, size: int) -> bool:
    """Return True if an unfragmented packet of this size reaches a host with `listening`."""
    program = f"""
import socket
datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.settimeout(0.5)
datagrams.setsockopt(socket.IPPROTO_IP, 10, 3)  # IP_MTU_DISCOVER: IP_PMTUDISC_PROBE (ip(7))
datagrams.sendto(b"x" * {size - 28}, ("{ip}", {port}))
datagrams.recv(64)
"""
    return host_faults.enter(host, "python3", "-c", program).returncode == 0


def test_faults_take_effect_and_heal(lab: Lab) -> None:
    """Hosts cut off from each other are reachable over SSH; an unplugged one is not; a rebooted one
    is clean.
    """
    first, second = lab.hosts
    assert reaches(lab, "node1", "node2")
    host_faults.cut(first, second, port=22)
    assert not reaches(lab, "node2", "node1")
    host_faults.heal(first, second)
    assert reaches(lab, "node2", "node1")
    host_faults.cut(first, second)
    assert not reaches(lab, "node1", "node2")
    assert ssh(lab, "root", "node1", "true").returncode == 0
    host_faults.heal(first)
    assert reaches(lab, "node1", "node2")
    host_faults.unplug(second)
    assert not hosts.ssh_answers(second)
    host_faults.plug(second)
    # The kernel takes up to a second to notice a cable.
    machine.await_true(
        lambda: reaches(lab, "node1", "node2"),
        what="the connection to a host that was plugged in again",
        timeout=10,
    )
    old = processes.init_pid(second)
    host_faults.reboot(lab, second)
    assert processes.init_pid(second) != old
    assert ssh(lab, "root", "node2", "docker", "ps").returncode == 0


def test_firewalls_block_a_direction_or_a_port(lab: Lab) -> None:
    """`block` and `close_port` drop only their packets, not replies or other ports, and `heal`
    removes both.
    """
    first, second = lab.hosts
    with listening(first, 7001), listening(first, 7002), listening(second, 7001):
        host_faults.block(first, second)
        assert not reaches(lab, "node2", "node1", 7001)
        assert reaches(lab, "node1", "node2", 7001)
        assert reaches(lab, "node2", "node1", 22)
        host_faults.heal(first, second)
        assert reaches(lab, "node2", "node1", 7001)
        host_faults.close_port(first, 7001)
        assert not reaches(lab, "node2", "node1", 7001)
        assert reaches(lab, "node2", "node1", 7002)
        host_faults.heal(first)
        assert reaches(lab, "node2", "node1", 7001)


def test_a_deaf_host(lab: Lab) -> None:
    """It receives nothing from the other host; SSH from this machine works, and `heal` removes the
    fault.
    """
    first, second = lab.hosts
    host_faults.drop_incoming(second, first)
    assert not reaches(lab, "node1", "node2")
    assert not reaches(lab, "node2", "node1")
    assert ssh(lab, "root", "node2", "true").returncode == 0
    host_faults.heal(second)
    assert reaches(lab, "node1", "node2")


def test_ssh_connections_are_reset(lab: Lab) -> None:
    """Open ones break at once; a new one works."""
    first = lab.hosts[0]
    argv = (
        "ssh",
        "-F",
        "none",
        "-i",
        str(lab.identity),
        "-o",
        f"UserKnownHostsFile={lab.known_hosts}",
        f"root@{first.ip}",
    )
    with subprocess.Popen(
        [*argv, "echo open; sleep 60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert host_faults.reset_ssh(first) == 1
        process.communicate(timeout=60)
    assert process.returncode == 255
    assert ssh(lab, "root", "node1", "true").returncode == 0


def test_a_small_disk_is_full(lab: Lab) -> None:
    """In one folder of one host; after `drain` it accepts files again, and after `remove_disk` it
    shows the old ones.
    """
    first, second = lab.hosts
    assert ssh(lab, "root", "node1", "echo old > /srv/kept").returncode == 0
    host_faults.small_disk(first, "/srv", 1)
    host_faults.fill(first, "/srv")
    full = ssh(lab, "root", "node1", "echo new > /srv/file")
    assert "No space left on device" in full.stderr
    assert ssh(lab, "root", second.name, "echo new > /srv/file").returncode == 0
    host_faults.drain(first, "/srv")
    assert ssh(lab, "root", "node1", "echo new > /srv/file").returncode == 0
    host_faults.remove_disk(first, "/srv")
    host_faults.remove_disk(first, "/srv")
    assert ssh(lab, "root", "node1", "cat /srv/kept").stdout == "old\n"


def test_large_packets_are_lost_in_a_single_direction(lab: Lab) -> None:
    """Large packets from the other host are lost until `heal`; smaller ones pass."""
    first, second = lab.hosts
    host_faults.drop_large(first, second, 1400)
    with listening(first, 7001), listening(second, 7001):
        assert [packet_arrives(second, first.ip, 7001, size) for size in (1400, 1401, 1500)] == [
            True,
            False,
            False,
        ]
        assert send_bytes(second, first.ip, 7001, 1000) is not None
        assert send_bytes(second, first.ip, 7001, 100_000) is None
        assert send_bytes(first, second.ip, 7001, 100_000) is not None
        host_faults.heal(first)
        assert packet_arrives(second, first.ip, 7001, 1500)
        assert send_bytes(second, first.ip, 7001, 100_000) is not None


def test_larger_packets_than_the_other_mtu_are_lost(lab: Lab) -> None:
    """MTU 9000 on one side: packets of that size are lost, those of 1500 arrive."""
    first, second = lab.hosts
    host_faults.set_mtu(first, 9000)
    assert "mtu 9000" in host_faults.enter(first, "ip", "link", "show", "eth0").stdout
    with listening(second, 7001):
        assert [packet_arrives(first, second.ip, 7001, size) for size in (1500, 9000)] == [
            True,
            False,
        ]
    host_faults.set_mtu(first, 1500)

    assert "mtu 1500" in host_faults.enter(first, "ip", "link", "show", "eth0").stdout


def test_a_rate_limit_applies_to_a_host_or_to_all(lab: Lab) -> None:
    """Two megabytes at 16 Mbit/s take a second, to one host or all, until the fault is removed."""
    first, second = lab.hosts
    with listening(second, 7001), listening(first, 7001):
        host_faults.limit_rate(first, "16mbit", second)
        host_faults.limit_rate(first, "16mbit", second)
        assert (send_bytes(first, second.ip, 7001, 2_000_000, 20) or 0) > 0.5
        assert (send_bytes(second, first.ip, 7001, 2_000_000) or 9) < 0.5
        host_faults.limit_rate(first, "16mbit")
        assert (send_bytes(first, second.ip, 7001, 2_000_000, 20) or 0) > 0.5
        assert (send_bytes(second, first.ip, 7001, 2_000_000, 20) or 0) > 0.5
        host_faults.unlimit_rate(first)
        assert (send_bytes(first, second.ip, 7001, 2_000_000) or 9) < 0.5
        assert (send_bytes(second, first.ip, 7001, 2_000_000) or 9) < 0.5


def test_a_name_on_loopback(lab: Lab) -> None:
    """The host resolves its own name to 127.0.1.1, other hosts do not, until the repair."""
    first, second = lab.hosts
    host_faults.name_on_loopback(lab, first)
    assert host_faults.enter(first, "getent", "ahostsv4", "node1").stdout.split()[0] == "127.0.1.1"
    assert host_faults.enter(second, "getent", "ahostsv4", "node1").stdout.split()[0] == first.ip
    host_faults.name_on_loopback(lab, first, yes=False)

    assert host_faults.enter(first, "getent", "ahostsv4", "node1").stdout.split()[0] == first.ip


def test_cards_are_renamed_added_and_shown(lab: Lab) -> None:
    """A renamed card keeps its address and route; added cards exist; RDMA devices appear next to
    real cards.
    """
    first = lab.hosts[0]
    host_faults.rename(first, "eth0", "ens9")
    assert reaches(lab, "node2", "node1")
    assert "dev ens9" in host_faults.enter(first, "ip", "route", "show", "default").stdout
    host_faults.rename(first, "ens9", "eth0")
    assert "dev eth0" in host_faults.enter(first, "ip", "route", "show", "default").stdout
    host_faults.add_nic(first, "eth7", "10.99.0.11/24")
    assert "10.99.0.11/24" in host_faults.enter(first, "ip", "address", "show", "eth7").stdout
    host_faults.remove_nic(first, "eth7")
    assert host_faults.enter(first, "ip", "link", "show", "eth7").returncode != 0
    host_faults.show_rdma(first, "mlx5_0", "mlx5_1")
    script = (
        "ls /sys/class/infiniband; cat /sys/class/infiniband/mlx5_1/ports/1/state"
        " /sys/class/net/eth0/mtu"
    )
    assert ssh(lab, "root", "node1", script).stdout.splitlines() == [
        "mlx5_0",
        "mlx5_1",
        "4: ACTIVE",
        "1500",
    ]
    assert not Path("/sys/class/infiniband/mlx5_1").exists()
    host_faults.hide_rdma(first)

    assert (
        ssh(
            lab,
            "root",
            "node1",
            "ls /sys/class/infiniband; ls /sys/class/block >/dev/null && echo whole",
        ).stdout
        == "whole\n"
    )
