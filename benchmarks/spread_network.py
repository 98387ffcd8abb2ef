"""Nodes as network namespaces on a bridge, with limited links; the load of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MB = 10**6
SWITCH = "spread-switch"
# A plain copy, without any program of ours.
RECEIVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 29571)); print("ready", flush=True)
sock = listener.accept()[0]; size = int(sys.argv[2]); buffer = bytearray(1 << 20)
while size: size -= sock.recv_into(buffer)
sock.sendall(b"x")
"""
SEND = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 29571))
size, block = int(sys.argv[2]), bytes(1 << 20)
began = time.monotonic()
while size: size -= sock.send(block[:size])
sock.recv(1); print(time.monotonic() - began)
"""


def address(node: int) -> str:
    return f"10.99.7.{10 + node}"


def namespace(node: int) -> str:
    return f"spread-{node}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def node_argv(node: int, *argv: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace(node), *argv)


def limit(node: int, rate: float, action: str = "change") -> None:
    """Limit a node's link to `rate` Mbit/s, both ways."""
    for space, device in ((namespace(node), "eth0"), (SWITCH, f"p{node}")):
        arguments = f"qdisc {action} dev {device} root tbf rate {rate}mbit burst 128k latency 30ms"
        subprocess.run(["tc", "-n", space, *arguments.split()], check=True)


def unlimit(node: int) -> None:
    for space, device in ((namespace(node), "eth0"), (SWITCH, f"p{node}")):
        subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"], check=True)


@contextmanager
def network(count: int, rate: float) -> Iterator[None]:
    """Create namespaces on a bridge with limited links; remove them after the block."""
    names = [SWITCH, *(namespace(node) for node in range(count))]
    _remove(names)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "br0", "up")
        for node in range(count):
            own, port = namespace(node), f"p{node}"
            ip(*f"-n {own} link add eth0 type veth peer name {port} netns {SWITCH}".split())
            ip("-n", own, "addr", "add", f"{address(node)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", own, "link", "set", device, "up")
            ip("-n", SWITCH, "link", "set", port, "master", "br0", "up")
            limit(node, rate, "add")
        yield
    finally:
        _remove(names)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_program(node: int, program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python program on a node; return when it is ready."""
    process = subprocess.Popen(
        node_argv(node, sys.executable, "-c", program, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def send_line(process: subprocess.Popen[str], line: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def measure_goodput(count: int) -> float:
    """Return the bytes per second of one plain TCP stream from the first node to the second."""
    receiver = start_program(1, RECEIVE, address(1), str(count))
    sender = subprocess.run(
        node_argv(0, sys.executable, "-c", SEND, address(1), str(count)),
        check=True,
        capture_output=True,
        text=True,
    )
    receiver.wait(10)
    return count / float(sender.stdout)


class MachineLoad:
    """Load of the machine since the last call: of its own processes, and of its hypervisor
    (`steal`).
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._before = self._read()

    def _read(self) -> list[int]:
        # user, nice, system, idle, iowait, irq, softirq, steal
        return [int(field) for field in self._stat.read_text().split()[1:9]]

    def describe(self) -> str:
        now = self._read()
        spent = [after - before for before, after in zip(self._before, now, strict=True)]
        self._before = now
        whole = sum(spent) or 1
        idle, steal = spent[3] + spent[4], spent[7]
        load = os.getloadavg()[0]
        return (
            f"load {load:.0f}, idle {100 * idle / whole:.0f} %, steal {100 * steal / whole:.0f} %"
        )
