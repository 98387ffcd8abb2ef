"""`vlaunch serve` against `vllm serve` typed by hand in the same containers; recovery; and what the
keeper costs.

    python -m benchmarks.serve [INVENTORY] [--rounds 3] [--backend ray|mp …] [--only
    start|recovery|cost …]

The default inventory is the practice cluster's, which must be up with nothing running on it. One
client asks the endpoint for a completion all the time; a start ends with the first that comes back.
The two ways take turns, in changing order. By hand means the very command lines and variables that
the keeper uses, each entered on its node at the same time. Ends with 1 when a goal is missed.
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
SECONDS = 60.0  # for which the keeper's cost is counted
_START, _GONE = 900.0, 60.0  # seconds for a first answer, and for an endpoint to fall silent
_PORT = 8101  # the first of the stand-ins'
_STAND_IN = f"{containers.SERVERS}/bench-stand-in.py"
_BY_HAND = "/tmp/bench-by-hand"
# What runs in a container. The log is kept for whoever wonders; the number is the session's, too.
_ENTER = f'echo $$ >{_BY_HAND}.pid; exec "$@" >{_BY_HAND}.log 2>&1'
_STOP = f"""
import os, signal, time
lead = int(open("{_BY_HAND}.pid").read())
def left():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{{name}}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[3]) == lead and words[0] not in "ZX":
            yield int(name)
# the first process, then what is left
for number, meant in (signal.SIGTERM, lambda pid: pid == lead), (signal.SIGKILL, lambda pid: True):
    for pid in filter(meant, list(left())):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + 30
    while any(map(meant, left())) and time.monotonic() < deadline:
        time.sleep(0.2)
"""
_KILL = """
import os, signal, sys
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        said = open(f"/proc/{name}/cmdline", "rb").read()
        line = said.replace(b"\\0", b" ").decode(errors="replace")
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
words = open("/proc/1/stat").read().rpartition(")")[2].split()
pages = int(open("/proc/1/statm").read().split()[1])
seconds = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
print(seconds, pages * os.sysconf("SC_PAGE_SIZE"))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How long a start took until the first answer: since the command line was entered, and since
    the engine was asked for.
    """

    whole: float
    engine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One backend on one cluster: the server as the keeper is told of it, and where it answers."""

    inventory: Inventory
    backend: str
    want: Desired
    target: Endpoint

    @property
    def words(self) -> tuple[str, ...]:
        """The command line of `vlaunch`."""
        return ("serve", "--name", NAME, "--backend", self.backend, "--skip-network-check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the report: what was measured, its figure, and the goal (None: there is none)."""

    what: str
    seconds: Sequence[float]
    ratio: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool:
        """True unless it has missed its goal."""
        return self.ratio is None or self.goal is None or self.ratio <= self.goal


# -- On the nodes ----------------------------------------------------------------------------------


def on(node: Node, *argv: str, stdin: str = "", timeout: float = 120) -> str:
    """Run a command on a node and return what it printed; ends the program when it fails."""
    done = subprocess.run(
        [*shlex.split(ssh(node)), shlex.join(argv)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(
            f"{node.name}: {shlex.join(argv)[:200]} ended with"
            f" {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-1500:]}"
        )
    return done.stdout


def inside(inventory: Inventory, node: Node, *argv: str, stdin: str = "") -> str:
    """Run a command in a node's container and return what it printed."""
    given = ("--interactive",) if stdin else ()
    return on(
        node, *node.docker, "exec", *given, Site(inventory).container_name(node), *argv, stdin=stdin
    )


def read(inventory: Inventory, name: str, file: str) -> Any:
    """Return what a file of a server holds on the head; None when it is not there."""
    path = state.server_file(name, file, containers.SERVERS)
    text = inside(inventory, inventory.head, "sh", "-c", 'cat "$1" 2>/dev/null; true', "cat", path)
    return json.loads(text) if text.strip() else None


def written(inventory: Inventory, name: str) -> float:
    """Return when a server was asked for, by this machine's clock."""
    path = state.server_file(name, state.DESIRED, containers.SERVERS)
    program = f"import os, time; print(time.time() - os.stat({path!r}).st_mtime)"
    return time.time() - float(inside(inventory, inventory.head, "python3", "-c", program))


# -- Starts ----------------------------------------------------------------------------------------


def prepare(inventory: Inventory, backend: str) -> Bench:
    """Start a server once, which warms the caches up and tells how the keeper starts it."""
    client.must(inventory, "serve", "--name", NAME, "--backend", backend, "--skip-network-check")
    want = desired.parse_spec(read(inventory, NAME, state.DESIRED))
    client.must(inventory, "stop", NAME)
    url = endpoints.endpoint_url(inventory, want.host, want.port, want.api_node)
    target = Endpoint(url=url, model=want.model, key=client.key(inventory))
    return Bench(inventory=inventory, backend=backend, want=want, target=target)


@contextmanager
def by_vlaunch(bench: Bench) -> Iterator[Start]:
    """Start by `vlaunch serve`; the server is there while the block is entered."""
    began = time.time()
    with subprocess.Popen(
        [client.VLAUNCH, *bench.words],
        env=client.environment(bench.inventory),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        answered = bench.target.await_answer(_START)
        process.wait(120)
    try:
        yield Start(whole=answered - began, engine=answered - written(bench.inventory, NAME))
    finally:
        client.must(bench.inventory, "stop", NAME)


@contextmanager
def by_hand(bench: Bench) -> Iterator[Start]:
    """Start what the keeper would start, on all nodes at once; it is there while the block is
    entered.
    """
    inventory, nodes = (
        bench.inventory,
        [bench.inventory.node(each.node) for each in bench.want.processes],
    )
    called = [
        [*shlex.split(ssh(node)), entered(bench, process)]
        for node, process in zip(nodes, bench.want.processes, strict=True)
    ]
    began = time.time()
    typed = [
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        for argv in called
    ]
    starts = []
    for each in typed:
        out, _ = each.communicate(timeout=60)
        if each.returncode != 0:
            sys.exit(f"{shlex.join(each.args)[:300]} ended with {each.returncode}")  # type: ignore[arg-type]
        first, last = map(float, out.split())
        starts.append(time.time() - (last - first))
    try:
        answered = bench.target.await_answer(_START)
        yield Start(whole=answered - began, engine=answered - min(starts))
    finally:
        for node in nodes:
            inside(inventory, node, "python3", "-c", _STOP)
        if bench.backend == "ray":
            await_free(inventory)


def entered(bench: Bench, process: ProcessSpec) -> str:
    """Return the command line for a node, which prints when it was entered and when it returned."""
    node = bench.inventory.node(process.node)
    env = dict(process.env)
    if process.gpus is not None and bench.want.visible:
        env[bench.want.visible] = ",".join(map(str, process.gpus))
    given = [word for name, value in sorted(env.items()) for word in ("--env", f"{name}={value}")]
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
            *given,
            Site(bench.inventory).container_name(node),
            *command,
        )
    )
    return f"date +%s.%N; {line} && date +%s.%N"


def await_free(inventory: Inventory) -> None:
    """Wait until Ray has its GPUs back; ends the program when it does not get them."""
    deadline = time.monotonic() + _GONE
    verb = agent_queries.nodes(inventory.ports, ())
    while used(json.loads(inside(inventory, inventory.head, *verb))["status"]) != 0:
        if time.monotonic() > deadline:
            sys.exit(f"GPUs are still taken in Ray after {_GONE:.0f} s")
        time.sleep(1)


def used(status: str) -> float | None:
    """Return how many GPUs are taken, as `ray status` says; None when it does not say."""
    found = re.search(r"([\d.]+)/[\d.]+ GPU\b", status)
    return float(found[1]) if found else None


def starts(bench: Bench, rounds: int) -> list[Row]:
    """Compare the two ways."""
    ours, theirs = list[Start](), list[Start]()
    for number in range(rounds):
        ways = [(by_vlaunch, ours), (by_hand, theirs)]
        for way, found in ways if number % 2 == 0 else ways[::-1]:
            with way(bench) as start:
                found.append(start)
            print(
                f"{bench.backend}, round {number + 1}: {way.__name__} {start.engine:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    hand = [each.engine for each in theirs]
    return [
        Row(what=f"`{bench.backend}`: by hand", seconds=hand),
        Row(
            what=f"`{bench.backend}`: `vlaunch serve`, from the engine's start",
            seconds=[each.engine for each in ours],
            ratio=ratio([each.engine for each in ours], hand),
            goal=GOALS["start"],
        ),
        Row(
            what=f"`{bench.backend}`: `vlaunch serve`, from the command line",
            seconds=[each.whole for each in ours],
            ratio=ratio([each.whole for each in ours], hand),
        ),
    ]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


# -- Recovery --------------------------------------------------------------------------------------


def recoveries(bench: Bench, rounds: int) -> list[Row]:
    """Compare recoveries with the first start of the same server, which had no fault before."""
    rows = []
    for what, breaks, goal in (
        ("a killed rank", kill_rank, "rank"),
        ("a restart of the head's container", restart_head, "head"),
    ):
        first, again = list[float](), list[float]()
        for _ in range(rounds):
            with by_vlaunch(bench) as start:
                began = breaks(bench)
                silent(bench.target)
                again.append(bench.target.await_answer(_START) - began)
                faults = (read(bench.inventory, NAME, state.OBSERVED) or {}).get("faults") or [{}]
            first.append(start.engine)
            told = {name: faults[-1].get(name) for name in ("what", "pause", "phases")}
            print(
                f"{bench.backend}, {what}: {again[-1]:.1f} s after {first[-1]:.1f} s; {told}",
                file=sys.stderr,
                flush=True,
            )
        rows += [
            Row(what=f"`{bench.backend}`: first start", seconds=first),
            Row(
                what=f"`{bench.backend}`: ready again after {what}",
                seconds=again,
                ratio=ratio(again, first),
                goal=GOALS[goal],
            ),
        ]
    return rows


def kill_rank(bench: Bench) -> float:
    """Kill a rank, not the head's where there is another; return when."""
    held = [bench.inventory.node(name) for name, count in bench.want.places.items() if count]
    node = next((each for each in held if not each.head), held[-1])
    title = (
        "ray::RayWorker"
        if bench.backend == "ray"
        else "VLLM::Worker"
        if len(held) > 1
        else "VLLM::"
    )
    began = time.time()
    inside(bench.inventory, node, "python3", "-c", _KILL, title)
    return began


def restart_head(bench: Bench) -> float:
    """Restart the head's container, at once; return when."""
    head = bench.inventory.head
    began = time.time()
    on(head, *head.docker, "restart", "--time", "0", Site(bench.inventory).container_name(head))
    return began


def silent(target: Endpoint) -> None:
    """Wait until a completion fails: what was broken may not have been noticed yet.

    Ends the program when none does.
    """
    deadline = time.monotonic() + _GONE
    while target.answers(3):
        if time.monotonic() > deadline:
            sys.exit(f"{target.url} goes on as if nothing had happened")


# -- The keeper's cost -----------------------------------------------------------------------------


def cost(inventory: Inventory, servers: int = 3) -> list[Row]:
    """Let the keeper keep three servers without a model, and count what the head's agent takes
    meanwhile.
    """
    head = inventory.head
    program = Path(__file__).parent.joinpath("faults", "stand_in.py").read_text()
    inside(inventory, head, "sh", "-c", 'cat >"$1"', "cat", _STAND_IN, stdin=program)
    names = [f"{NAME}-{number}" for number in range(1, servers + 1)]
    try:
        for number, name in enumerate(names):
            want(inventory, stand_in(name, head, _PORT + number))
        for name in names:
            await_state(inventory, name, "ready")
        time.sleep(10)  # what a start costs is over
        before, _ = counted(inventory)
        began = time.monotonic()
        time.sleep(SECONDS)
        after, memory = counted(inventory)
        share = (after - before) / (time.monotonic() - began)
    finally:
        files = [state.server_file(name, state.DESIRED, containers.SERVERS) for name in names]
        inside(inventory, head, "rm", "-f", *files)
        for name in names:
            await_state(inventory, name, "stopped")
        folders = [str(Path(each).parent) for each in files]
        inside(inventory, head, "rm", "-rf", _STAND_IN, *folders)
    return [
        Row(
            what=f"the keeper with {servers} servers: {share:.2%} of a core",
            seconds=(),
            ratio=share,
            goal=GOALS["cpu"],
        ),
        Row(what=f"… and {memory / 1e6:.0f} MB", seconds=(), ratio=memory, goal=GOALS["memory"]),
    ]


def stand_in(name: str, head: Node, port: int) -> Desired:
    """Return a server that is one process on the head and takes no GPU."""
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


def want(inventory: Inventory, server: Desired) -> None:
    """Write down that a server is wanted."""
    path = state.server_file(server.name, state.DESIRED, containers.SERVERS)
    script = 'mkdir -p "${1%/*}" && cat >"$1.new" && mv "$1.new" "$1"'
    inside(
        inventory,
        inventory.head,
        "sh",
        "-c",
        script,
        "want",
        path,
        stdin=json.dumps(server.as_json()),
    )


def await_state(inventory: Inventory, name: str, wanted: str, seconds: float = 120) -> None:
    """Wait until the keeper says that a server is in a state; ends the program when it does not."""
    deadline = time.monotonic() + seconds
    while (seen := (read(inventory, name, state.OBSERVED) or {}).get("state")) != wanted:
        if time.monotonic() > deadline:
            sys.exit(f"server `{name}` is {seen} and not {wanted} after {seconds:.0f} s")
        time.sleep(1)


def counted(inventory: Inventory) -> tuple[float, float]:
    """Return the seconds of CPU and the bytes of memory of the head's agent."""
    seconds, memory = map(float, inside(inventory, inventory.head, "python3", "-c", _COST).split())
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
            "" if row.goal is None else (f"≤ {row.goal}×" if seconds else f"< {_plain(row.goal)}")
        )
        lines.append(
            f"| {row.what} | {' | '.join(times)} | {figure} | {goal}"
            f" {'' if row.goal is None else _met(row)} |"
        )
    return "\n".join(lines)


def _plain(goal: float) -> str:
    return f"{goal:.0%} of a core" if goal < 1 else f"{goal / 1e6:.0f} MB"


def _met(row: Row) -> str:
    return "met" if row.met else "missed"


def main() -> int:
    """Measure what was asked for, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=client.LAB)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--backend",
        action="append",
        choices=["ray", "mp"],
        help="only this one; may be given again",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=["start", "recovery", "cost"],
        help="only this; may be given again",
    )
    args = parser.parse_args()
    inventory = load(args.inventory)
    client.refuse_servers(inventory, "needs its GPUs")
    parts, rows = args.only or ["start", "recovery", "cost"], list[Row]()
    for backend in args.backend or (["mp"] if inventory.ray.off else ["ray", "mp"]):
        if {"start", "recovery"} & set(parts):
            bench = prepare(inventory, backend)
            rows += starts(bench, args.rounds) if "start" in parts else []
            rows += recoveries(bench, args.rounds) if "recovery" in parts else []
    rows += cost(inventory) if "cost" in parts else []
    print(report(rows))
    return 0 if all(each.met for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
