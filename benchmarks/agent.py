"""CPU of the agents, and seconds and CPU of `vlaunch status`, with one server on lab hosts.

    python -m benchmarks.agent [INVENTORY] [--server NAME] [--seconds 60] [--runs 10]

The hosts must be those of a lab: processes are counted from outside. The server must answer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import client, engines, health
from benchmarks.faults.traffic import Traffic
from benchmarks.flood import find
from launcher.inventory.load import load
from launcher.lab import layout, processes
from launcher.lab.layout import Host
from launcher.state.servers import DEFAULT

_TICK = os.sysconf("SC_CLK_TCK")
_GROUPS = (Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup"))
_CLIENTS = 8
_COSTS = {
    "seconds": "seconds",
    "CPU of the launcher": "launcher",
    "of the agents": "agents",
    "of processes started in containers": "started",
    "of sshd, dockerd and their children": "daemons",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Seconds of CPU on one host: by the agent, by all containers, by each living process of them,
    and by the daemons of Docker and SSH with the children that have ended.
    """

    agent: float
    containers: float
    living: dict[int, float]
    daemons: float


def read(host: Host) -> Used:
    """Read what has been used on a host so far; ends the program when no agent runs there."""
    agent = engines.agent(host)
    if agent is None:
        sys.exit(f"no agent runs on {host.name}")
    living: dict[int, float] = {}
    daemons = 0.0
    for process in processes.on_host(host):
        with suppress(OSError, IndexError):
            own, children = _ticks(process.pid)
            if len(process.pids) > 2:
                living[process.pid] = own
            else:
                daemons += own + children
    return Used(agent=sum(_ticks(agent)), containers=_account(host), living=living, daemons=daemons)


def started_between(before: Used, after: Used) -> float:
    """Return the CPU of processes that were not in the containers at both times."""
    stayed = sum(
        after.living[pid] - used for pid, used in before.living.items() if pid in after.living
    )
    return after.containers - before.containers - stayed


def _ticks(pid: int) -> tuple[float, float]:
    """Return the seconds of CPU of a process, and of its children that have ended."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICK, (int(words[13]) + int(words[14])) / _TICK


def _account(host: Host) -> float:
    """Return the seconds of CPU of all containers that a host has had, as the kernel counts."""
    for top in _GROUPS:
        group = top / host.lab / host.name
        if (group / "cpuacct.usage").exists():
            return int((group / "cpuacct.usage").read_text()) / 1e9
        if (group / "cpu.stat").exists():
            words = (group / "cpu.stat").read_text().split()
            return int(words[words.index("usage_usec") + 1]) / 1e6
    sys.exit(f"this machine does not count the CPU of {host.name}'s containers")


def agents(hosts: Sequence[Host], seconds: float) -> list[float]:
    """Return the seconds of CPU a minute of each host's agent."""
    before = [read(host).agent for host in hosts]
    time.sleep(seconds)
    return [
        60 / seconds * (read(host).agent - was) for host, was in zip(hosts, before, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one command took: seconds, and seconds of CPU here and on all hosts together."""

    seconds: float
    launcher: float = 0.0
    agents: float = 0.0
    started: float = 0.0
    daemons: float = 0.0


def during(hosts: Sequence[Host], argv: Sequence[str], env: dict[str, str]) -> Cost:
    """Run a command and return what it took."""
    before = [read(host) for host in hosts]
    began = time.monotonic()
    process = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    time.sleep(0.3)  # what the command has started there is ending
    pairs = list(zip(before, (read(host) for host in hosts), strict=True))
    return Cost(
        seconds=seconds,
        launcher=usage.ru_utime + usage.ru_stime,
        agents=sum(after.agent - was.agent for was, after in pairs),
        started=sum(started_between(was, after) for was, after in pairs),
        daemons=sum(after.daemons - was.daemons for was, after in pairs),
    )


def _middle(costs: Sequence[Cost], name: str) -> str:
    found = [getattr(cost, name) for cost in costs]
    return f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})"


def main() -> int:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=client.LAB)
    parser.add_argument("--server", default=DEFAULT)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    inventory = load(args.inventory)
    lab = layout.load(inventory.path.parent)
    if lab is None:
        sys.exit(f"{inventory.path} is no lab's: only there processes are counted from outside")
    target = client.endpoint(inventory, find(inventory, args.server))
    hosts = lab.hosts
    print(f"load of the machine {health.load()}\n")
    print("\n".join(health.header(["seconds of CPU a minute", *(host.name for host in hosts)])))
    rest = agents(hosts, args.seconds)
    print(health.row(["agent at rest", *(f"{each:.2f}" for each in rest)]), flush=True)
    with Traffic(
        target.url, target.key, target.model, clients=_CLIENTS, pause=0, timeout=60
    ) as traffic:
        busy = agents(hosts, args.seconds)
    what = f"agent, {_CLIENTS} clients, {len(traffic.samples)} requests"
    print(health.row([what, *(f"{each:.2f}" for each in busy)]))
    env, argv = client.environment(inventory), (client.VLAUNCH, "status", "--json")
    during(hosts, argv, env)
    costs, idle = [], []
    for _ in range(args.runs):
        costs.append(during(hosts, argv, env))
        idle.append(during(hosts, ("sleep", f"{costs[-1].seconds:.2f}"), env))
    print(f"\nload of the machine {health.load()}\n")
    print("\n".join(health.header([f"{args.runs} runs, median (range)", *_COSTS])))
    for what, found in (("`vlaunch status`", costs), ("nothing, for as long", idle)):
        print(health.row([what, *(_middle(found, name) for name in _COSTS.values())]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
