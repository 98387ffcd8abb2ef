"""Nodes as network namespaces on a bridge, each link limited both ways, and how busy the machine is
meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MB = 10**6
SWITCH = "spread-switch"
# One copy as a program without any of ours would make it.
RECEIVE = """
import socket, sys
door = socket.create_server((sys.argv[1], 29571)); print("ready", flush=True)
sock = door.accept()[0]; left = int(sys.argv[2]); buffer = bytearray(1 << 20)
while left: left -= sock.recv_into(buffer)
sock.sendall(b"x")
"""
SEND = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 29571))
left, block = int(sys.argv[2]), bytes(1 << 20)
began = time.monotonic()
while left: left -= sock.send(block[:left])
sock.recv(1); print(time.monotonic() - began)
"""


def address(node: int) -> str:
    return f"10.99.7.{10 + node}"


def space(node: int) -> str:
    return f"spread-{node}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def inside(node: int, *words: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", space(node), *words)


def limit(node: int, rate: float, how: str = "change") -> None:
    """Have a node's link carry so many Mbit/s, both ways."""
    for where, device in ((space(node), "eth0"), (SWITCH, f"p{node}")):
        words = f"qdisc {how} dev {device} root tbf rate {rate}mbit burst 128k latency 30ms"
        subprocess.run(["tc", "-n", where, *words.split()], check=True)


def unlimit(node: int) -> None:
    for where, device in ((space(node), "eth0"), (SWITCH, f"p{node}")):
        subprocess.run(["tc", "-n", where, "qdisc", "del", "dev", device, "root"], check=True)


@contextmanager
def network(count: int, rate: float) -> Iterator[None]:
    """So many namespaces on a bridge, each link limited both ways; gone afterwards."""
    names = [SWITCH, *(space(node) for node in range(count))]
    _remove(names)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "br0", "up")
        for node in range(count):
            own, port = space(node), f"p{node}"
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


def begin(node: int, program: str, *words: str) -> subprocess.Popen[str]:
    """Start a Python program on a node, and return when it is ready."""
    started = subprocess.Popen(
        inside(node, sys.executable, "-c", program, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def tell(started: subprocess.Popen[str], line: str = "go") -> None:
    assert started.stdin is not None
    started.stdin.write(line + "\n")
    started.stdin.flush()


def goodput(count: int) -> float:
    """Return bytes a second of one plain TCP stream from the first node to the second."""
    hears = begin(1, RECEIVE, address(1), str(count))
    said = subprocess.run(
        inside(0, sys.executable, "-c", SEND, address(1), str(count)),
        check=True,
        capture_output=True,
        text=True,
    )
    hears.wait(10)
    return count / float(said.stdout)


class Busy:
    """How busy the machine was since the last question: what everybody here did, and what its host
    took away from it (`steal`).
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._before = self._read()

    def _read(self) -> list[int]:
        # user, nice, system, idle, iowait, irq, softirq, steal
        return [int(each) for each in self._stat.read_text().split()[1:9]]

    def said(self) -> str:
        now = self._read()
        spent = [after - before for before, after in zip(self._before, now, strict=True)]
        self._before = now
        whole = sum(spent) or 1
        idle, steal = spent[3] + spent[4], spent[7]
        load = os.getloadavg()[0]
        return (
            f"load {load:.0f}, idle {100 * idle / whole:.0f} %, steal {100 * steal / whole:.0f} %"
        )
