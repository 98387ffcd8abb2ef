"""Cost of the launcher as the cluster grows: CPU per node, memory, round trips and output lines.

    python -m benchmarks.scale [--nodes 2,16,64,256] [--rounds 3] [--only "up; check"]

The clusters have 2 to 256 nodes of 8 GPUs. Where nodes report on each other, CPU is per direction
between two. The nodes are those of the unit tests, in memory (`tests/simulated.py`); the commands
are real, only the fleet is replaced. Each figure is from a process of its own, which first runs the
same on two nodes, so that imports do not count; sizes take turns, and the tables show medians. The
time of the simulated nodes is measured for each command and subtracted, SSH is absent
(`benchmarks/ssh_fanout.py` has it), and for a command that waits the clock advances by a second
with each query. Memory is Python's peak since the command began (tracemalloc, in a separate run),
with the nodes' answers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from launcher.cli.main import run_command
from launcher.core.domain import Answer, Argv, Inventory
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from launcher.inventory.load import load
from launcher.ssh.fleet import Line
from tests.command_line import FakeBackgroundCommand
from tests.fakes import FakeTransport
from tests.simulated import Machine, World

SIZES, GPUS, CHANNELS = (2, 16, 64, 256), 8, 16
# times as much CPU per node, or per direction, with FAR nodes as with NEAR
GOAL = 1.3
NEAR, FAR = 16, 256


@dataclass(frozen=True)
class Case:
    """A command, the commands that run before it and do not count, and whether it writes to a
    terminal.

    `pairs`: nodes report on each other, so that the work is per direction between two.
    """

    argv: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    terminal: bool = False
    pairs: bool = False

    def units(self, nodes: int) -> int:
        """Return the number of units of its work: nodes, or directions between two."""
        return nodes * (nodes - 1) if self.pairs else nodes


UP = ("up",)
CASES = {
    "up": Case(UP),
    "up, on a terminal": Case(UP, terminal=True),
    "up again": Case(UP, (UP,)),
    "status": Case(("status",), (UP,)),
    "check": Case(("check", "--no-hub"), (UP,), pairs=True),
    "check-nccl": Case(("check-nccl",), (UP,), pairs=True),
    "check-nccl --log": Case(("check-nccl", "--log", "nccl.log")),
    "down": Case(("down", "--yes"), (UP,)),
}


@dataclass
class Figures:
    """Cost of one command: CPU in seconds without the simulated nodes, bytes, calls of the
    transport, the largest number of commands to one node, output lines.
    """

    cpu: float = 0.0
    memory: int = 0
    trips: int = 0
    commands: int = 0
    lines: int = 0


class Screen(io.StringIO):
    """The output of a command, optionally a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        """Return whether the output is a terminal."""
        return self._terminal


class Nodes(World):
    """Simulated nodes with a rank per GPU in the network check, as real ones have."""

    def probe(self, machine: Machine, *arguments: str) -> str:
        """Return the facts of a node, with a subnet that is large enough for all."""
        return super().probe(machine, *arguments).replace('"prefixlen": 24', '"prefixlen": 16')

    def network(self, machine: Machine, argv: Argv) -> dict[str, Any]:
        """Return the report of a node: each rank measures with its peer on every other node."""
        report = super().network(machine, argv)
        name, peers = machine.node.name, list(report["pair_logs"])
        first = report["ranks"][0]
        report["ranks"] = [
            {**first, "rank": first["rank"] * GPUS + gpu, "local_rank": gpu} for gpu in range(GPUS)
        ]
        report["transfers"] = [
            {**transfer, "local_rank": gpu}
            for transfer in report["transfers"]
            for gpu in range(GPUS)
        ]
        report["pair_logs"] = {
            peer: "".join(
                f"{name}:{100 + gpu}:{200 + gpu} [{gpu}] NCCL INFO Channel 00/0 : {gpu}[{gpu}] ->"
                f" {gpu + GPUS}[{gpu}] [{'send' if name < peer else 'receive'}] via"
                f" NET/IB/{gpu}/GDRDMA\n"
                for gpu in range(GPUS)
            )
            for peer in peers
        }
        report["log"] = "".join(report["pair_logs"].values())
        report["collective"]["ranks"] = GPUS * (len(peers) + 1)
        return report


@dataclass
class Meter:
    """Simulated nodes, their time, and the commands sent to them."""

    world: World
    simulated: float = 0.0
    trips: int = 0
    commands: Counter[str] = field(default_factory=Counter)

    def answers(self, commands: Sequence[Command]) -> list[Answer]:
        """Answer all commands; measure the time, without that of the launcher's standard input."""
        self.trips += 1
        self.commands.update(command.node for command in commands)
        began = time.process_time()
        sent = [
            replace(sent_command, stdin=sent_command.stdin and self._input(sent_command.stdin))
            for sent_command in commands
        ]
        answers = list(FakeTransport(self.world.answer).run(sent))
        self.simulated += time.process_time() - began
        return answers

    def _input(self, stdin: Callable[[], bytes]) -> Callable[[], bytes]:
        def measured() -> bytes:
            began = time.process_time()
            data = stdin()
            self.simulated -= time.process_time() - began
            return data

        return measured


def fleet(meter: Meter) -> type[Any]:
    """Return a replacement of `Fleet`."""

    class Simulated(contextlib.AbstractContextManager["Simulated"]):
        def __init__(self, inventory: Inventory, **_: object) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def connect(self, nodes: Iterable[str] | None = None) -> dict[str, ConnectError]:
            return {}

        def hold(self, command: Command) -> FakeBackgroundCommand:
            meter.commands[command.node] += 1
            return FakeBackgroundCommand([Line(node=command.node, text="locked")])

        def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
            yield from meter.answers(commands)

    return Simulated


def inventory(nodes: int) -> str:
    """Return an inventory with a line for each node."""
    lines = "".join(
        f"  - {{host: gpu{at:03d}, ip: 10.0.{at // 250}.{at % 250 + 1}, gpus: {GPUS}}}\n"
        for at in range(1, nodes + 1)
    )
    return f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\nnodes:\n{lines}"


def nccl_log(nodes: int) -> str:
    """Return NCCL's log of all ranks: rank, devices and links, in a ring through all nodes for each
    channel.
    """
    ranks = nodes * GPUS
    lines = []
    for rank in range(ranks):
        node, gpu = divmod(rank, GPUS)
        prefix = f"gpu{node + 1:03d}:{1000 + gpu}:{1050 + gpu} [{gpu}] NCCL INFO"
        lines += [
            (
                f"{prefix} ncclCommInitRank comm 0x{1000 + gpu:x} rank {rank} nranks {ranks}"
                f" cudaDev {gpu} busId 1b000 commId 0x9a1 - Init START"
            ),
            (
                f"{prefix} NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO];"
                f" OOB eth0:10.0.0.{node}"
            ),
        ]
        next_rank = (rank + 1) % ranks
        for channel in range(CHANNELS):
            via = "P2P/CUMEM" if next_rank // GPUS == node else f"NET/IB/{channel % 2}/GDRDMA"
            suffix = "" if next_rank // GPUS == node else " [send]"
            lines.append(
                f"{prefix} Channel {channel:02d}/0 : {rank}[{gpu}] ->"
                f" {next_rank}[{next_rank % GPUS}]{suffix} via {via}"
            )
            if gpu == 0:
                previous = (rank - 1) % ranks
                lines.append(
                    f"{prefix} Channel {channel:02d}/0 : {previous}[{previous % GPUS}] -> {rank}[0]"
                    f" [receive] via NET/IB/{channel % 2}/GDRDMA"
                )
    return "\n".join(lines) + "\n"


def measure(case: Case, nodes: int, *, memory: bool = False) -> Figures:
    """Run a command in this process and return its cost; with `memory` only the peak and the
    counts, because tracing costs time.

    Raises:
        RuntimeError: a command failed; with its output.
    """
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name, _isolated(Path(name)):
        path = Path(name) / "inventory.yaml"
        path.write_text(inventory(nodes))
        if "nccl.log" in case.argv:
            (Path(name) / "nccl.log").write_text(nccl_log(nodes))
        world = Nodes(load(path))
        for argv in case.before:
            _run(world, argv)
        gc.collect()
        gc.freeze()
        try:
            return _run(world, case.argv, terminal=case.terminal, memory=memory)
        finally:
            gc.unfreeze()


@contextlib.contextmanager
def _isolated(folder: Path) -> Iterator[None]:
    """Change to a folder that is also the home, so that no file of this machine is used."""
    homes = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"), str(folder))
    before = Path.cwd()
    with mock.patch.dict(os.environ, homes | {"COLUMNS": "100", "TERM": "xterm-256color"}):
        os.environ.pop("VLAUNCH_INVENTORY", None)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _run(
    world: World, argv: Sequence[str], *, terminal: bool = False, memory: bool = False
) -> Figures:
    meter, out, err = Meter(world), Screen(terminal=terminal), Screen(terminal=terminal)
    ticks = itertools.count()
    waits = {"clock": lambda: float(next(ticks)), "sleep": lambda _: None}
    with (
        mock.patch("launcher.ssh.fleet.Fleet", fleet(meter)),
        mock.patch.dict("launcher.app.apply.apply.__kwdefaults__", waits),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        if memory:
            tracemalloc.start()
        began = time.process_time()
        code = run_command(list(argv))
        took = time.process_time() - began - meter.simulated
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
        tracemalloc.stop()
    output = out.getvalue() + err.getvalue()
    if code != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit {code}\n{output[-2000:]}")
    return Figures(
        cpu=took,
        memory=peak,
        trips=meter.trips,
        commands=max(meter.commands.values(), default=0),
        lines=output.count("\n"),
    )


def measure_in_process(name: str, nodes: int, *, memory: bool) -> Figures:
    """Measure a case in a process of its own."""
    arguments = ["--case", name, "--nodes", str(nodes), *(["--memory"] if memory else [])]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise SystemExit(f"{name} with {nodes} nodes failed:\n{result.stderr[-2000:]}")
    return Figures(**json.loads(result.stdout))


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default=",".join(map(str, SIZES)), help="sizes, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="COMMANDS", help="by semicolons")
    parser.add_argument("--case", choices=CASES, help="measure this one here; print JSON")
    parser.add_argument("--memory", action="store_true", help="with --case: memory, not CPU")
    options = parser.parse_args()
    sizes = [int(part) for part in options.nodes.split(",")]
    if options.case:
        measure(CASES[options.case], 2)
        print(json.dumps(asdict(measure(CASES[options.case], sizes[0], memory=options.memory))))
        return
    names = [part.strip() for part in options.only.split(";") if part.strip()] or list(CASES)
    results = {}
    for name in names:
        results[name] = run_rounds(name, sizes, options.rounds)
    sys.exit(table(results, sizes, options.rounds))


def run_rounds(name: str, sizes: Sequence[int], times: int) -> dict[int, list[Figures]]:
    """Return the cost of a case for each size, by round, with the peak memory."""
    memory = {size: measure_in_process(name, size, memory=True).memory for size in sizes}
    results: dict[int, list[Figures]] = {size: [] for size in sizes}
    for _ in range(times):
        for size in sizes:
            figures = replace(measure_in_process(name, size, memory=False), memory=memory[size])
            results[size].append(figures)
            print(f"{name}, {size} nodes: {figures.cpu:.3f} s", file=sys.stderr)
    return results


def table(results: dict[str, dict[int, list[Figures]]], sizes: Sequence[int], times: int) -> int:
    """Print the medians and their growth; return the exit code."""
    near = NEAR if NEAR in sizes else sizes[0]
    far = FAR if FAR in sizes else sizes[-1]
    growth = {name: _growth(CASES[name], rows, near, far) for name, rows in results.items()}
    nodes = " | ".join(map(str, sizes))
    print(f"CPU of the launcher, median of {times} rounds; nodes of {GPUS} GPUs:\n")
    print(
        f"| nodes | {nodes} | {far} against {near} (lowest–highest) |\n"
        f"|---|{'---|' * (len(sizes) + 1)}"
    )
    for name, rows in results.items():
        per, scale = ("direction, µs", 1e6) if CASES[name].pairs else ("node, ms", 1e3)
        cells = " | ".join(
            f"{_cpu(rows[size]) * scale / CASES[name].units(size):.1f}" for size in sizes
        )
        low, middle, high = growth[name]
        print(f"| `{name}`, per {per} | {cells} | {middle:.2f}× ({low:.2f}–{high:.2f}) |")
    print("\nMost memory (MB), calls of the transport, most commands to a node, lines shown:\n")
    print(f"| nodes | {nodes} | calls | commands | lines |\n|---|{'---|' * (len(sizes) + 3)}")
    for name, rows in results.items():
        cells = " | ".join(f"{rows[size][0].memory / 1e6:.1f}" for size in sizes)
        counts = [
            _span([getattr(rows[size][0], field) for size in sizes])
            for field in ("trips", "commands", "lines")
        ]
        if CASES[name].terminal:
            counts[-1] = "redrawn"
        print(f"| `{name}` | {cells} | {' | '.join(counts)} |")
    over = [name for name in results if growth[name][1] > GOAL]
    print(
        f"\nGoal: CPU per node, or per direction between two, with {far} nodes ≤ {GOAL}× that with"
        f" {near}: {'missed by ' + ', '.join(over) if over else 'met'}"
    )
    return 1 if over else 0


def _cpu(rows: Sequence[Figures]) -> float:
    return statistics.median(figures.cpu for figures in rows)


def _growth(
    case: Case, rows: dict[int, list[Figures]], near: int, far: int
) -> tuple[float, float, float]:
    """Return the growth of the CPU per node or direction: lowest, median and highest of the
    rounds.
    """
    ratios = sorted(
        (b.cpu / case.units(far)) / (a.cpu / case.units(near))
        for a, b in zip(rows[near], rows[far], strict=True)
    )
    return ratios[0], statistics.median(ratios), ratios[-1]


def _span(counts: Sequence[int]) -> str:
    """Return one number when all are equal, else all of them."""
    return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))


if __name__ == "__main__":
    main()
