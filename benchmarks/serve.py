"""`vlaunch serve` against `vllm serve` started by hand in the same containers; recovery; CPU cost.

    python -m benchmarks.serve [INVENTORY] [--rounds 3] [--backend ray|mp …] [--only
    start|recovery|cost …]

The default inventory is the lab cluster's, which must be up and idle. One client sends requests all
the time; a start ends with the first answer. The two candidates take turns, in changing order. "By
hand" uses the supervisor's own argv and variables, started on all nodes at the same time. Exits
with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import client
from benchmarks.client import Endpoint
from benchmarks.up import ssh
from launcher.agent import desired, state
from launcher.agent.desired import Desired, ProcessSpec
from launcher.core.domain import Argv, Inventory, Node
from launcher.inventory.load import load
from launcher.serving import endpoints
from launcher.tools import agent_queries, containers
from launcher.tools.site import Site

NAME = "bench"
GOALS = {"start": 1.05, "rank": 1.1, "head": 1.3, "cpu": 0.01, "memory": 64e6}
SECONDS = 60.0  # of the measurement of the supervisor's cost
_START, _GONE = 900.0, 60.0  # seconds until a first answer, and until an endpoint fails
_PORT = 8101  # of the first stand-in
_STAND_IN = f"{containers.SERVERS}/bench-stand-in.py"
_BY_HAND = "/tmp/bench-by-hand"
# Runs in a container. The log stays for debugging; the pid is also the session's.
_ENTER = f'echo $$ >{_BY_HAND}.pid; exec "$@" >{_BY_HAND}.log 2>&1'
_STOP = f"""
import os, signal, time
leader = int(open("{_BY_HAND}.pid").read())
def running():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = open(f"/proc/{{name}}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            yield int(name)
steps = (signal.SIGTERM, lambda pid: pid == leader), (signal.SIGKILL, lambda pid: True)
for number, match in steps:  # the session leader, then the rest of the session
    for pid in filter(match, list(running())):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + 30
    while any(map(match, running())) and time.monotonic() < deadline:
        time.sleep(0.2)
"""
_KILL = """
import os, signal, sys
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        argv = open(f"/proc/{name}/cmdline", "rb").read()
        line = argv.replace(b"\\0", b" ").decode(errors="replace")
    except OSError:
        continue
    if line.startswith(sys.argv[1]):
        os.kill(int(name), signal.SIGKILL)
        sys.exit()
sys.exit(f"no process `{sys.argv[1]}`")
"""
# Seconds of CPU and bytes of memory of the container's first process, which is the agent.
_COST = """
import os
fields = open("/proc/1/stat").read().rpartition(")")[2].split()
pages = int(open("/proc/1/statm").read().split()[1])
seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
print(seconds, pages * os.sysconf("SC_PAGE_SIZE"))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds of a start until the first answer: from the command, and from the request for the
    engine.
    """

    whole: float
    engine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One backend on one cluster: the server's spec and endpoint."""

    inventory: Inventory
    backend: str
    spec: Desired
    target: Endpoint

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `vlaunch`."""
        return ("serve", "--name", NAME, "--backend", self.backend, "--skip-network-check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the report: the measurement, its figure, and the goal, if any."""

    what: str
    seconds: Sequence[float]
    ratio: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool:
        """True unless the goal is missed."""
        return self.ratio is None or self.goal is None or self.ratio <= self.goal


# -- On the nodes ----------------------------------------------------------------------------------


def run_on_node(node: Node, *argv: str, stdin: str = "", timeout: float = 120) -> str:
    """Run a command on a node and return its output; exit when it fails."""
    completed = subprocess.run(
        [*shlex.split(ssh(node)), shlex.join(argv)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if completed.returncode != 0:
        sys.exit(
            f"{node.name}: {shlex.join(argv)[:200]} ended with"
            f" {completed.returncode}:\n{completed.stdout[-500:]}{completed.stderr[-1500:]}"
        )
    return completed.stdout


def run_in_container(inventory: Inventory, node: Node, *argv: str, stdin: str = "") -> str:
    """Run a command in a node's container and return its output."""
    options = ("--interactive",) if stdin else ()
    return run_on_node(
        node,
        *node.docker,
        "exec",
        *options,
        Site(inventory).container_name(node),
        *argv,
        stdin=stdin,
    )


def read_server_file(inventory: Inventory, name: str, file: str) -> Any:
    """Read a JSON file of a server on the head; None without the file."""
    path = state.server_file(name, file, containers.SERVERS)
    text = run_in_container(
        inventory, inventory.head, "sh", "-c", 'cat "$1" 2>/dev/null; true', "cat", path
    )
    return json.loads(text) if text.strip() else None


def spec_time(inventory: Inventory, name: str) -> float:
    """Return the time of a server's spec, by this machine's clock."""
    path = state.server_file(name, state.DESIRED, containers.SERVERS)
    program = f"import os, time; print(time.time() - os.stat({path!r}).st_mtime)"
    return time.time() - float(
        run_in_container(inventory, inventory.head, "python3", "-c", program)
    )


# -- Starts ----------------------------------------------------------------------------------------


def prepare(inventory: Inventory, backend: str) -> Bench:
    """Start a server once, which warms the caches and yields its spec."""
    client.run_checked(
        inventory, "serve", "--name", NAME, "--backend", backend, "--skip-network-check"
    )
    spec = desired.parse_spec(read_server_file(inventory, NAME, state.DESIRED))
    client.run_checked(inventory, "stop", NAME)
    url = endpoints.endpoint_url(inventory, spec.host, spec.port, spec.api_node)
    target = Endpoint(url=url, model=spec.model, key=client.read_api_key(inventory))
    return Bench(inventory=inventory, backend=backend, spec=spec, target=target)


@contextmanager
def started_by_vlaunch(bench: Bench) -> Iterator[Start]:
    """Start with `vlaunch serve`; the server runs inside the block."""
    began = time.time()
    with subprocess.Popen(
        [client.VLAUNCH, *bench.arguments],
        env=client.environment(bench.inventory),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        answered = bench.target.await_answer(_START)
        process.wait(120)
    try:
        yield Start(whole=answered - began, engine=answered - spec_time(bench.inventory, NAME))
    finally:
        client.run_checked(bench.inventory, "stop", NAME)


@contextmanager
def started_by_hand(bench: Bench) -> Iterator[Start]:
    """Start the same processes on all nodes at once, without a supervisor; they run inside the
    block.
    """
    inventory, nodes = (
        bench.inventory,
        [bench.inventory.node(process.node) for process in bench.spec.processes],
    )
    argvs = [
        [*shlex.split(ssh(node)), node_command(bench, process)]
        for node, process in zip(nodes, bench.spec.processes, strict=True)
    ]
    began = time.time()
    clients = [
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        for argv in argvs
    ]
    starts = []
    for argv, client_process in zip(argvs, clients, strict=True):
        out, _ = client_process.communicate(timeout=60)
        if client_process.returncode != 0:
            sys.exit(f"{shlex.join(argv)[:300]} ended with {client_process.returncode}")
        first, last = map(float, out.split())
        starts.append(time.time() - (last - first))
    try:
        answered = bench.target.await_answer(_START)
        yield Start(whole=answered - began, engine=answered - min(starts))
    finally:
        for node in nodes:
            run_in_container(inventory, node, "python3", "-c", _STOP)
        if bench.backend == "ray":
            await_free(inventory)


def node_command(bench: Bench, process: ProcessSpec) -> str:
    """Return the shell command for a node, which prints the times of its start and its return."""
    node = bench.inventory.node(process.node)
    env = dict(process.env)
    if process.gpus is not None and bench.spec.visible:
        env[bench.spec.visible] = ",".join(map(str, process.gpus))
    env_options = [
        option for name, value in sorted(env.items()) for option in ("--env", f"{name}={value}")
    ]
    command: Argv = (
        "setsid",
        "sh",
        "-c",
        _ENTER,
        "enter",
        f"{containers.PAYLOAD}/entry.sh",
        *process.argv,
    )
    line = shlex.join(
        (
            *node.docker,
            "exec",
            "--detach",
            *env_options,
            Site(bench.inventory).container_name(node),
            *command,
        )
    )
    return f"date +%s.%N; {line} && date +%s.%N"


def await_free(inventory: Inventory) -> None:
    """Wait until all GPUs are free in Ray; exit at the deadline."""
    deadline = time.monotonic() + _GONE
    verb = agent_queries.nodes(inventory.ports, ())
    while (
        gpus_in_use(json.loads(run_in_container(inventory, inventory.head, *verb))["status"]) != 0
    ):
        if time.monotonic() > deadline:
            sys.exit(f"GPUs are still taken in Ray after {_GONE:.0f} s")
        time.sleep(1)


def gpus_in_use(status: str) -> float | None:
    """Return the number of GPUs in use by `ray status`; None without a figure."""
    match = re.search(r"([\d.]+)/[\d.]+ GPU\b", status)
    return float(match[1]) if match else None


def compare_starts(bench: Bench, rounds: int) -> list[Row]:
    """Compare the starts of both candidates."""
    ours, theirs = list[Start](), list[Start]()
    for number in range(rounds):
        candidates = [(started_by_vlaunch, ours), (started_by_hand, theirs)]
        for candidate, results in candidates if number % 2 == 0 else candidates[::-1]:
            with candidate(bench) as start:
                results.append(start)
            print(
                f"{bench.backend}, round {number + 1}: {candidate.__name__} {start.engine:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    hand = [timed.engine for timed in theirs]
    return [
        Row(what=f"`{bench.backend}`: by hand", seconds=hand),
        Row(
            what=f"`{bench.backend}`: `vlaunch serve`, from the engine's start",
            seconds=[timed.engine for timed in ours],
            ratio=ratio([timed.engine for timed in ours], hand),
            goal=GOALS["start"],
        ),
        Row(
            what=f"`{bench.backend}`: `vlaunch serve`, from the command line",
            seconds=[timed.whole for timed in ours],
            ratio=ratio([timed.whole for timed in ours], hand),
        ),
    ]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


# -- Recovery --------------------------------------------------------------------------------------


def compare_recoveries(bench: Bench, rounds: int) -> list[Row]:
    """Compare recoveries with the first start of the same server."""
    rows = []
    for title, inject, goal in (
        ("a killed rank", kill_rank, "rank"),
        ("a restart of the head's container", restart_head, "head"),
    ):
        first, recovered = list[float](), list[float]()
        for _ in range(rounds):
            with started_by_vlaunch(bench) as start:
                began = inject(bench)
                await_failure(bench.target)
                recovered.append(bench.target.await_answer(_START) - began)
                faults = (read_server_file(bench.inventory, NAME, state.OBSERVED) or {}).get(
                    "faults"
                ) or [{}]
            first.append(start.engine)
            fault = {name: faults[-1].get(name) for name in ("what", "pause", "phases")}
            print(
                f"{bench.backend}, {title}: {recovered[-1]:.1f} s after {first[-1]:.1f} s; {fault}",
                file=sys.stderr,
                flush=True,
            )
        rows += [
            Row(what=f"`{bench.backend}`: first start", seconds=first),
            Row(
                what=f"`{bench.backend}`: ready again after {title}",
                seconds=recovered,
                ratio=ratio(recovered, first),
                goal=GOALS[goal],
            ),
        ]
    return rows


def kill_rank(bench: Bench) -> float:
    """Kill a rank, off the head if possible; return the time."""
    nodes = [bench.inventory.node(name) for name, count in bench.spec.places.items() if count]
    node = next((candidate for candidate in nodes if not candidate.head), nodes[-1])
    title = (
        "ray::RayWorker"
        if bench.backend == "ray"
        else "VLLM::Worker"
        if len(nodes) > 1
        else "VLLM::"
    )
    began = time.time()
    run_in_container(bench.inventory, node, "python3", "-c", _KILL, title)
    return began


def restart_head(bench: Bench) -> float:
    """Restart the head's container at once; return the time."""
    head = bench.inventory.head
    began = time.time()
    run_on_node(
        head, *head.docker, "restart", "--time", "0", Site(bench.inventory).container_name(head)
    )
    return began


def await_failure(target: Endpoint) -> None:
    """Wait until a request fails: the fault may not have taken effect yet.

    Exits at the deadline.
    """
    deadline = time.monotonic() + _GONE
    while target.is_answering(3):
        if time.monotonic() > deadline:
            sys.exit(f"{target.url} goes on as if nothing had happened")


# -- Cost of the supervisor ------------------------------------------------------------------------


def measure_cost(inventory: Inventory, servers: int = 3) -> list[Row]:
    """Measure the head's agent while it supervises servers without a model."""
    head = inventory.head
    program = Path(__file__).parent.joinpath("faults", "stand_in.py").read_text()
    run_in_container(inventory, head, "sh", "-c", 'cat >"$1"', "cat", _STAND_IN, stdin=program)
    names = [f"{NAME}-{number}" for number in range(1, servers + 1)]
    try:
        for number, name in enumerate(names):
            write_spec(inventory, stand_in_spec(name, head, _PORT + number))
        for name in names:
            await_state(inventory, name, "ready")
        time.sleep(10)  # the cost of a start is over
        before, _ = read_agent_cost(inventory)
        began = time.monotonic()
        time.sleep(SECONDS)
        after, memory = read_agent_cost(inventory)
        share = (after - before) / (time.monotonic() - began)
    finally:
        files = [state.server_file(name, state.DESIRED, containers.SERVERS) for name in names]
        run_in_container(inventory, head, "rm", "-f", *files)
        for name in names:
            await_state(inventory, name, "stopped")
        folders = [str(Path(file).parent) for file in files]
        run_in_container(inventory, head, "rm", "-rf", _STAND_IN, *folders)
    return [
        Row(
            what=f"the supervisor with {servers} servers: {share:.2%} of a core",
            seconds=(),
            ratio=share,
            goal=GOALS["cpu"],
        ),
        Row(what=f"… and {memory / 1e6:.0f} MB", seconds=(), ratio=memory, goal=GOALS["memory"]),
    ]


def stand_in_spec(name: str, head: Node, port: int) -> Desired:
    """Return the spec of a server with one process on the head and no GPU."""
    argv = ("python3", _STAND_IN, "serve", "stand-in", "--host", "127.0.0.1", "--port", str(port))
    return Desired(
        name=name,
        id=name,
        model="stand-in",
        backend="mp",
        processes=(ProcessSpec(node=head.name, argv=argv),),
        host="127.0.0.1",
        port=port,
        places={},
        asked=time.time(),
    )


def write_spec(inventory: Inventory, server: Desired) -> None:
    """Write the spec of a server."""
    path = state.server_file(server.name, state.DESIRED, containers.SERVERS)
    script = 'mkdir -p "${1%/*}" && cat >"$1.new" && mv "$1.new" "$1"'
    run_in_container(
        inventory,
        inventory.head,
        "sh",
        "-c",
        script,
        "want",
        path,
        stdin=json.dumps(server.as_json()),
    )


def await_state(inventory: Inventory, name: str, target_state: str, seconds: float = 120) -> None:
    """Wait until the supervisor reports a state of a server; exit at the deadline."""
    deadline = time.monotonic() + seconds
    while (
        current := (read_server_file(inventory, name, state.OBSERVED) or {}).get("state")
    ) != target_state:
        if time.monotonic() > deadline:
            sys.exit(f"server `{name}` is {current} and not {target_state} after {seconds:.0f} s")
        time.sleep(1)


def read_agent_cost(inventory: Inventory) -> tuple[float, float]:
    """Return the seconds of CPU and the bytes of memory of the head's agent."""
    seconds, memory = map(
        float, run_in_container(inventory, inventory.head, "python3", "-c", _COST).split()
    )
    return seconds, memory


# -- The command -----------------------------------------------------------------------------------


def report(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    lines = ["| | median s | lowest–highest | ratio | goal |", "|---|---|---|---|---|"]
    for row in rows:
        seconds = sorted(row.seconds)
        times = (
            (f"{statistics.median(seconds):.1f}", f"{seconds[0]:.1f}–{seconds[-1]:.1f}")
            if seconds
            else ("", "")
        )
        figure = f"{row.ratio:.2f}×" if row.ratio is not None and seconds else ""
        goal = (
            ""
            if row.goal is None
            else (f"≤ {row.goal}×" if seconds else f"< {_format_goal(row.goal)}")
        )
        lines.append(
            f"| {row.what} | {' | '.join(times)} | {figure} | {goal}"
            f" {'' if row.goal is None else _met(row)} |"
        )
    return "\n".join(lines)


def _format_goal(goal: float) -> str:
    return f"{goal:.0%} of a core" if goal < 1 else f"{goal / 1e6:.0f} MB"


def _met(row: Row) -> str:
    return "met" if row.met else "missed"


def main() -> int:
    """Measure the chosen parts, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=client.LAB)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--backend",
        action="append",
        choices=["ray", "mp"],
        help="only this backend (repeatable)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=["start", "recovery", "cost"],
        help="only this part (repeatable)",
    )
    args = parser.parse_args()
    inventory = load(args.inventory)
    client.require_no_servers(inventory, "needs its GPUs")
    parts, rows = args.only or ["start", "recovery", "cost"], list[Row]()
    for backend in args.backend or (["mp"] if inventory.ray.off else ["ray", "mp"]):
        if {"start", "recovery"} & set(parts):
            bench = prepare(inventory, backend)
            rows += compare_starts(bench, args.rounds) if "start" in parts else []
            rows += compare_recoveries(bench, args.rounds) if "recovery" in parts else []
    rows += measure_cost(inventory) if "cost" in parts else []
    print(report(rows))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
