"""CPU time of the agents, and wall and CPU time of `vlaunch status`, with one server on lab hosts.

    python -m benchmarks.agent [INVENTORY] [--server NAME] [--seconds 60] [--runs 10]

The inventory must be a lab's, whose processes are visible from this machine. The server must
answer.
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
from benchmarks.flood import find_server
from launcher.inventory.load import load
from launcher.lab import layout, processes
from launcher.lab.layout import Host
from launcher.tools.site.servers import DEFAULT

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
class HostCpu:
    """Seconds of CPU on one host: of the agent, of all containers, of each living container
    process, and of the Docker and SSH daemons with their exited children.
    """

    agent: float
    containers: float
    living: dict[int, float]
    daemons: float


def read_cpu(host: Host) -> HostCpu:
    """Read the CPU time of a host so far; exit when no agent runs on it."""
    agent = engines.find_agent(host)
    if agent is None:
        sys.exit(f"no agent runs on {host.name}")
    living: dict[int, float] = {}
    daemons = 0.0
    for process in processes.host_processes(host):
        with suppress(OSError, IndexError):
            own, children = _process_cpu(process.pid)
            if len(process.pids) > 2:
                living[process.pid] = own
            else:
                daemons += own + children
    return HostCpu(
        agent=sum(_process_cpu(agent)),
        containers=_container_cpu(host),
        living=living,
        daemons=daemons,
    )


def short_lived_cpu(before: HostCpu, after: HostCpu) -> float:
    """Return the CPU time of container processes that were not alive at both times."""
    stayed = sum(
        after.living[pid] - seconds for pid, seconds in before.living.items() if pid in after.living
    )
    return after.containers - before.containers - stayed


def _process_cpu(pid: int) -> tuple[float, float]:
    """Return the seconds of CPU of a process, and of its exited children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK, (int(fields[13]) + int(fields[14])) / _TICK


def _container_cpu(host: Host) -> float:
    """Return the seconds of CPU that the kernel counted for all containers of a host."""
    for top in _GROUPS:
        group = top / host.lab / host.name
        if (group / "cpuacct.usage").exists():
            return int((group / "cpuacct.usage").read_text()) / 1e9
        if (group / "cpu.stat").exists():
            fields = (group / "cpu.stat").read_text().split()
            return int(fields[fields.index("usage_usec") + 1]) / 1e6
    sys.exit(f"this machine does not count the CPU of {host.name}'s containers")


def measure_agents(hosts: Sequence[Host], seconds: float) -> list[float]:
    """Return the seconds of CPU per minute of all hosts' agents."""
    before = [read_cpu(host).agent for host in hosts]
    time.sleep(seconds)
    after = [read_cpu(host).agent for host in hosts]
    return [60 / seconds * (new - old) for old, new in zip(before, after, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one command: seconds, and seconds of CPU on this machine and on all hosts together.

    `started` counts processes that ran in the containers only during the command.
    """

    seconds: float
    launcher: float = 0.0
    agents: float = 0.0
    started: float = 0.0
    daemons: float = 0.0


def measure_command(hosts: Sequence[Host], argv: Sequence[str], env: dict[str, str]) -> Cost:
    """Run a command and return its cost."""
    before = [read_cpu(host) for host in hosts]
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
    time.sleep(0.3)  # so that processes of the command on the hosts exit
    pairs = list(zip(before, (read_cpu(host) for host in hosts), strict=True))
    return Cost(
        seconds=seconds,
        launcher=usage.ru_utime + usage.ru_stime,
        agents=sum(new.agent - old.agent for old, new in pairs),
        started=sum(short_lived_cpu(old, new) for old, new in pairs),
        daemons=sum(new.daemons - old.daemons for old, new in pairs),
    )


def _format_range(costs: Sequence[Cost], name: str) -> str:
    values = [getattr(cost, name) for cost in costs]
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> int:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=client.LAB)
    parser.add_argument("--server", default=DEFAULT)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    inventory = load(args.inventory)
    lab = layout.load_lab(inventory.path.parent)
    if lab is None:
        sys.exit(f"{inventory.path} is not a lab's: processes of other hosts are not visible")
    target = client.server_endpoint(inventory, find_server(inventory, args.server))
    hosts = lab.hosts
    print(f"load of the machine {health.read_load()}\n")
    names = [host.name for host in hosts]
    print("\n".join(health.format_header(["seconds of CPU per minute", *names])))
    idle = measure_agents(hosts, args.seconds)
    print(health.format_row(["agent at rest", *map("{:.2f}".format, idle)]), flush=True)
    with Traffic(
        target.url, target.key, target.model, clients=_CLIENTS, pause=0, timeout=60
    ) as traffic:
        busy = measure_agents(hosts, args.seconds)
    title = f"agent, {_CLIENTS} clients, {len(traffic.samples)} requests"
    print(health.format_row([title, *map("{:.2f}".format, busy)]))
    env, argv = client.environment(inventory), (client.VLAUNCH, "status", "--json")
    measure_command(hosts, argv, env)
    costs, baseline = [], []
    for _ in range(args.runs):
        costs.append(measure_command(hosts, argv, env))
        baseline.append(measure_command(hosts, ("sleep", f"{costs[-1].seconds:.2f}"), env))
    print(f"\nload of the machine {health.read_load()}\n")
    print("\n".join(health.format_header([f"{args.runs} runs, median (range)", *_COSTS])))
    for title, runs in (("`vlaunch status`", costs), ("no command, for as long", baseline)):
        ranges = (_format_range(runs, name) for name in _COSTS.values())
        print(health.format_row([title, *ranges]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
