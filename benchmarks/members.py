"""CPU time of the head's agent for one exchange with a member: report, orders, mutual TLS.

The head's side runs in this process, 63 and then 256 members in another one on this machine. Every
member reports two servers once a second. Also measured: the seconds until all have connected, when
they connect at once, and those from a change of their orders until all have reported the result.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from launcher.agent.health.api import Counters
from launcher.agent.health.probe import ProbeReport
from launcher.agent.link import leader
from launcher.agent.link.certificates import Certificates
from launcher.agent.link.leader import Leader
from launcher.agent.link.members import Member, ReportReply
from launcher.agent.link.server import HttpServer
from launcher.agent.processes.node import RUN, Order, ServerReport
from tests.agent.authority import Authority

SIZES = (63, 256)
GOAL = 2.0  # ms of CPU for one exchange
TURN = 0.5  # seconds between two turns of the head's agent
ORDER = Order(
    generation=1,
    phase=RUN,
    argv=("vllm", "serve", *(f"--option-{number}=value" for number in range(40))),
    env={f"VARIABLE_{number}": "a value" for number in range(20)},
    pids=tuple(range(1000, 1008)),
)
REPORT = ServerReport(
    state="running",
    last=1,
    prepared=1,
    evidence="a line of the engine's log " * 8,
    pid=1000,
    ranks=tuple(range(1000, 1008)),
    probe=ProbeReport(
        answers={"": (10, 0.1)},
        counters=Counters((), running=3, waiting=0, tokens=12345.0, failed=0.0),
        progress={"": "0123456789ab"},
    ),
)


class Node:
    """A node that reports two servers and runs none."""

    changing = False

    def __init__(self) -> None:
        self.orders: Any = {}

    def tick(self) -> None:
        """Do nothing."""

    def report(self) -> dict[str, ServerReport]:
        """Report two servers."""
        return {"one": REPORT, "two": REPORT}


class CountingLead(Leader):
    """The head's agent, with a counter of exchanges."""

    exchanges = 0

    def exchange(self, *args: Any) -> ReportReply:
        """Count and handle an exchange."""
        self.exchanges += 1
        return super().exchange(*args)


def run_members(folder: str, port: int, nodes: int) -> None:
    """Run all members until standard input is closed."""
    followers = []
    for number in range(nodes):
        certificates = Certificates(server=False, folder=f"{folder}/node{number}")
        certificates.context()  # read the files now: that is no part of connecting
        node: Any = Node()
        address = "127.0.0.1", port
        followers.append(Member(f"node{number}", node, *address, certificates, lambda: None))
    print("ready", flush=True)
    sys.stdin.readline()
    for follower in followers:
        follower.start()
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    while not stop.wait(0.02):
        for follower in followers:
            follower.tick()


def measure(nodes: int, seconds: float) -> tuple[float, float, float, float]:
    """Return the seconds to connect, the ms of CPU for an exchange, the head's agent's share of a
    core, and the seconds until changed orders are carried out.
    """
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name:
        authority, folder = Authority(), Path(name)
        members = [f"node{number}" for number in range(nodes)]
        for member in (*members, "head"):
            authority.deliver(folder / member, member)
        lead, lock = CountingLead("head", Node()), threading.RLock()  # type: ignore[arg-type]
        certificates = Certificates(server=True, folder=str(folder / "head"))
        server = HttpServer(leader.members_site(lead, lock, certificates, "127.0.0.1", 0))
        server.start()
        wait(lambda: bool(server.bound))
        options = ["--members", name, str(*server.bound.values()), str(nodes)]
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.members", *options],
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
                lead.orders = {member: dict(orders) for member in members}
                lead.tick()

        orders = {"one": ORDER, "two": ORDER}
        turn()
        wait(lambda: all(map(lead.orders_done, lead.members)))
        count, cpu, began = lead.exchanges, time.process_time(), time.monotonic()
        while time.monotonic() - began < seconds:
            turn()
            time.sleep(TURN)
        cpu, elapsed = time.process_time() - cpu, time.monotonic() - began
        exchanges = lead.exchanges - count
        del orders["two"]
        began = time.monotonic()
        turn()
        wait(lambda: all(map(lead.orders_done, lead.members)))
        settled = time.monotonic() - began
        child.stdin.close()
        child.wait()
        server.close()
        print(f"{nodes} members: {exchanges / elapsed:.0f} exchanges/s", file=sys.stderr)
        return connected, cpu / exchanges * 1e3, cpu / elapsed, settled


def wait(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; exit when it does not within two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("timed out after two minutes")
        time.sleep(0.005)


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes", default=",".join(map(str, SIZES)), help="numbers of members, comma-separated"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--members", nargs=3, metavar=("FOLDER", "PORT", "NODES"))
    args = parser.parse_args()
    if args.members:
        folder, port, nodes = args.members
        run_members(folder, int(port), int(nodes))
        return 0
    print("| members | connected, s | CPU of an exchange, ms | of a core | orders carried out, s |")
    print("|---|---|---|---|---|")
    costs = []
    mock.patch("launcher.agent.link.leader.say").start()
    for nodes in map(int, args.nodes.split(",")):
        connected, cpu, share, settled = measure(nodes, args.seconds)
        costs.append(cpu)
        print(f"| {nodes} | {connected:.2f} | {cpu:.2f} | {share:.1%} | {settled:.2f} |")
    met = max(costs) <= GOAL
    print(f"\nGoal: at most {GOAL:g} ms: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
