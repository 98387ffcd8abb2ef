"""CPU of the head's agent for one exchange with a member: report, orders, mutual TLS.

The head's side runs in this process, all members in another one on this machine: 63, and 256. Each
reports once a second, of two servers. Also: seconds until all have connected at once, and from a
change of their orders until all have carried it out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from launcher.payload.agent import reports
from launcher.payload.agent.certificates import Certificates
from launcher.payload.agent.crew import Lead
from launcher.payload.agent.members import Follower, Link
from launcher.payload.agent.node import RUN, Order
from launcher.payload.agent.server import Server
from tests.payload.agent.authority import Authority

SIZES = (63, 256)
GOAL = 2.0  # ms of CPU for one exchange
TURN = 0.5  # seconds between two turns of the head's agent
ORDER = Order(
    generation=1,
    phase=RUN,
    argv=("vllm", "serve", *(f"--option-{at}=value" for at in range(40))),
    env={f"VARIABLE_{at}": "a value" for at in range(20)},
    pids=tuple(range(1000, 1008)),
)
REPORT = {
    "state": "running",
    "last": 1,
    "prepared": 1,
    "evidence": "a line of the engine's log " * 8,
    "cause": "",
    "pid": 1000,
    "ranks": {str(pid): True for pid in range(1000, 1008)},
    "probe": {"answers": {"": [10, 0.1]}, "counters": {"running": 3, "tokens": 12345.0}},
}


class Node:
    """A node with two servers, on which nothing runs."""

    def __init__(self) -> None:
        self.orders: Any = {}

    def turn(self) -> None:
        """Do nothing."""

    def report(self) -> dict[str, Any]:
        """Report two servers."""
        return {"one": REPORT, "two": REPORT}


class Counted(Lead):
    """The head's agent, which counts exchanges."""

    exchanges = 0

    def exchange(self, *args: Any) -> dict[str, Any]:
        """Count it."""
        self.exchanges += 1
        return super().exchange(*args)


def member(folder: str, port: int, nodes: int) -> None:
    """Be all members, until standard input ends."""
    followers = []
    for at in range(nodes):
        own = Certificates(server=False, folder=f"{folder}/node{at}")
        own.context()  # reading files is no part of connecting
        link = Link(f"node{at}", "127.0.0.1", port, own, lambda: None)
        followers.append(Follower(Node(), link))  # type: ignore[arg-type]
    print("ready", flush=True)
    sys.stdin.readline()
    for each in followers:
        each.link.start()
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.wait(0.02):
        for each in followers:
            if each.link.orders is not each.orders or time.monotonic() >= each._again:
                each.turn()


def measure(nodes: int, seconds: float) -> tuple[float, float, float, float]:
    """Return the seconds to connect, ms of CPU for an exchange, the share of a core that the head's
    agent takes, and the seconds until changed orders are carried out.
    """
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name:
        authority, folder = Authority(), Path(name)
        for at in range(nodes):
            authority.deliver(folder / f"node{at}", f"node{at}")
        authority.deliver(folder / "head", "head")
        lead, lock = Counted("head", Node()), threading.RLock()  # type: ignore[arg-type]
        own = Certificates(server=True, folder=str(folder / "head"))
        server = Server(reports.site(lead, lock, own, "127.0.0.1", 0))
        server.start()
        wait(lambda: bool(server.bound))
        words = ["--members", name, str(*server.bound.values()), str(nodes)]
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.members", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        began = time.monotonic()
        child.stdin.write("go\n")
        child.stdin.flush()
        wait(lambda: len(lead.members) == nodes)
        connected = time.monotonic() - began

        def turn() -> None:
            with lock:
                lead.orders = {f"node{at}": dict(orders) for at in range(nodes)}
                lead.turn()

        orders = {"one": ORDER, "two": ORDER}
        turn()
        wait(lambda: all(map(lead.settled, lead.members)))
        count, cpu, began = lead.exchanges, time.process_time(), time.monotonic()
        while time.monotonic() - began < seconds:
            turn()
            time.sleep(TURN)
        cpu, took = time.process_time() - cpu, time.monotonic() - began
        exchanges = lead.exchanges - count
        del orders["two"]
        began = time.monotonic()
        turn()
        wait(lambda: all(map(lead.settled, lead.members)))
        settled = time.monotonic() - began
        child.stdin.close()
        child.wait()
        server.close()
        print(f"{nodes} members: {exchanges / took:.0f} exchanges/s", file=sys.stderr)
        return connected, cpu / exchanges * 1e3, cpu / took, settled


def wait(true: Any) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 120
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit("not within two minutes")
        time.sleep(0.005)


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default=",".join(map(str, SIZES)), help="sizes, by commas")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--members", nargs=3, metavar=("FOLDER", "PORT", "NODES"))
    given = parser.parse_args()
    if given.members:
        member(given.members[0], int(given.members[1]), int(given.members[2]))
        return 0
    print("| members | connected, s | CPU of an exchange, ms | of a core | orders carried out, s |")
    print("|---|---|---|---|---|")
    found = []
    mock.patch("launcher.payload.agent.crew.say").start()
    for nodes in map(int, given.nodes.split(",")):
        connected, cpu, share, settled = measure(nodes, given.seconds)
        found.append(cpu)
        print(f"| {nodes} | {connected:.2f} | {cpu:.2f} | {share:.1%} | {settled:.2f} |")
    print(f"\nGoal: at most {GOAL:g} ms: {'met' if max(found) <= GOAL else 'missed'}")
    return 0 if max(found) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
