"""What the launcher takes as the cluster grows: CPU per node (or, where nodes tell of each other,
per direction between two), memory, round trips and lines on the screen, for 2 to 256 nodes of 8
GPUs.

    python -m benchmarks.scale [--nodes 2,16,64,256] [--rounds 3] [--only "up; check"]

The nodes are those of the unit tests, in memory (`tests/simulated.py`); the commands are run as
people run them, only the fleet is another one. Each figure is from a process of its own, which
first runs the same on two nodes, so that imports are not counted; sizes take turns, and medians are
shown. What the simulated nodes take to answer is measured for each command and left out, SSH is not
there at all (`benchmarks/ssh_fanout.py` has it), and a command that waits sees the clock go on by a
second with each look. Memory is the most that Python held at once since the command began
(tracemalloc, in a run that counts nothing else), the nodes' answers included.
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
from tests.command_line import FakeHeld
from tests.fakes import FakeTransport
from tests.simulated import Machine, World

SIZES, GPUS, CHANNELS = (2, 16, 64, 256), 8, 16
# times as much CPU per node, or per direction, with FAR nodes as with NEAR
GOAL = 1.3
NEAR, FAR = 16, 256


@dataclass(frozen=True)
class Case:
    """A command line, those that are run before it and not counted, and whether it is watched on a
    terminal.

    `pairs`: nodes tell it of each other node, so that its work is each direction between two.
    """

    words: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    terminal: bool = False
    pairs: bool = False

    def units(self, nodes: int) -> int:
        """Return how many things its work is about: nodes, or directions between two."""
        return nodes * (nodes - 1) if self.pairs else nodes


UP = ("up",)
CASES = {
    "up": Case(UP),
    "up, on a terminal": Case(UP, terminal=True),
    "up again": Case(UP, (UP,)),
    "status": Case(("status",), (UP,)),
    "check": Case(("check", "--no-hub"), (UP,), pairs=True),
    "check-nccl": Case(("check-nccl",), (UP,), pairs=True),
    "check-nccl --from-log": Case(("check-nccl", "--from-log", "nccl.log")),
    "down": Case(("down", "--yes"), (UP,)),
}


@dataclass
class Figures:
    """What one command took: CPU in seconds without that of the simulated nodes, bytes, calls of
    the transport, the most commands that one node was sent, lines on the screen.
    """

    cpu: float = 0.0
    memory: int = 0
    trips: int = 0
    commands: int = 0
    lines: int = 0


class Screen(io.StringIO):
    """Where a command writes; it may take this for a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        """Return whether colours and a live display are wanted."""
        return self._terminal


class Nodes(World):
    """Simulated nodes with a rank per GPU in the network check, as real ones have."""

    def probe(self, machine: Machine, *words: str) -> str:
        """Return what a node is made of; all are in one subnet, however many they are."""
        return super().probe(machine, *words).replace('"prefixlen": 24', '"prefixlen": 16')

    def network(self, machine: Machine, words: Argv) -> dict[str, Any]:
        """Return the report of a node: each rank of it measures with its like on every other."""
        said = super().network(machine, words)
        name, peers = machine.node.name, list(said["pair_logs"])
        first = said["ranks"][0]
        said["ranks"] = [
            {**first, "rank": first["rank"] * GPUS + gpu, "local_rank": gpu} for gpu in range(GPUS)
        ]
        said["transfers"] = [
            {**each, "local_rank": gpu} for each in said["transfers"] for gpu in range(GPUS)
        ]
        said["pair_logs"] = {
            peer: "".join(
                f"{name}:{100 + gpu}:{200 + gpu} [{gpu}] NCCL INFO Channel 00/0 : {gpu}[{gpu}] ->"
                f" {gpu + GPUS}[{gpu}] [{'send' if name < peer else 'receive'}] via"
                f" NET/IB/{gpu}/GDRDMA\n"
                for gpu in range(GPUS)
            )
            for peer in peers
        }
        said["log"] = "".join(said["pair_logs"].values())
        said["collective"]["ranks"] = GPUS * (len(peers) + 1)
        return said


@dataclass
class Meter:
    """Simulated nodes, what they took to answer, and what they were asked."""

    world: World
    simulated: float = 0.0
    trips: int = 0
    commands: Counter[str] = field(default_factory=Counter)

    def answers(self, commands: Sequence[Command]) -> list[Answer]:
        """Answer all commands; the time that takes is counted, but for what the launcher makes of
        standard input.
        """
        self.trips += 1
        self.commands.update(command.node for command in commands)
        began = time.process_time()
        sent = [replace(each, stdin=each.stdin and self._input(each.stdin)) for each in commands]
        answers = list(FakeTransport(self.world.answer).run(sent))
        self.simulated += time.process_time() - began
        return answers

    def _input(self, stdin: Callable[[], bytes]) -> Callable[[], bytes]:
        def made() -> bytes:
            began = time.process_time()
            data = stdin()
            self.simulated -= time.process_time() - began
            return data

        return made


def fleet(meter: Meter) -> type[Any]:
    """Return what stands where `Fleet` does."""

    class Simulated(contextlib.AbstractContextManager["Simulated"]):
        def __init__(self, inventory: Inventory, **_: object) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def connect(self, nodes: Iterable[str] | None = None) -> dict[str, ConnectError]:
            return {}

        def hold(self, command: Command) -> FakeHeld:
            meter.commands[command.node] += 1
            return FakeHeld([Line(node=command.node, text="locked")])

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
    """Return NCCL's log of all ranks: each tells of its rank, its devices and its links, in a ring
    through all nodes for each channel.
    """
    ranks = nodes * GPUS
    lines = []
    for rank in range(ranks):
        node, gpu = divmod(rank, GPUS)
        who = f"gpu{node + 1:03d}:{1000 + gpu}:{1050 + gpu} [{gpu}] NCCL INFO"
        lines += [
            (
                f"{who} ncclCommInitRank comm 0x{1000 + gpu:x} rank {rank} nranks {ranks} cudaDev"
                f" {gpu} busId 1b000 commId 0x9a1 - Init START"
            ),
            f"{who} NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.{node}",
        ]
        after = (rank + 1) % ranks
        for channel in range(CHANNELS):
            via = "P2P/CUMEM" if after // GPUS == node else f"NET/IB/{channel % 2}/GDRDMA"
            way = "" if after // GPUS == node else " [send]"
            lines.append(
                f"{who} Channel {channel:02d}/0 : {rank}[{gpu}] -> {after}[{after % GPUS}]{way}"
                f" via {via}"
            )
            if gpu == 0:
                there = (rank - 1) % ranks
                lines.append(
                    f"{who} Channel {channel:02d}/0 : {there}[{there % GPUS}] -> {rank}[0]"
                    f" [receive] via NET/IB/{channel % 2}/GDRDMA"
                )
    return "\n".join(lines) + "\n"


def measure(case: Case, nodes: int, *, memory: bool = False) -> Figures:
    """Run a command in this process and return what it took; with `memory` only that and what can
    be counted, for watching it costs time.

    Raises:
        RuntimeError: a command failed; with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name, _here(Path(name)):
        path = Path(name) / "inventory.yaml"
        path.write_text(inventory(nodes))
        if "nccl.log" in case.words:
            (Path(name) / "nccl.log").write_text(nccl_log(nodes))
        world = Nodes(load(path))
        for words in case.before:
            _run(world, words)
        gc.collect()
        gc.freeze()
        try:
            return _run(world, case.words, terminal=case.terminal, memory=memory)
        finally:
            gc.unfreeze()


@contextlib.contextmanager
def _here(folder: Path) -> Iterator[None]:
    """Stand in a folder that is also home, so that nothing of this machine is read or written."""
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
    world: World, words: Sequence[str], *, terminal: bool = False, memory: bool = False
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
        code = run_command(list(words))
        took = time.process_time() - began - meter.simulated
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
        tracemalloc.stop()
    said = out.getvalue() + err.getvalue()
    if code != 0:
        raise RuntimeError(f"{' '.join(words)}: exit {code}\n{said[-2000:]}")
    return Figures(
        cpu=took,
        memory=peak,
        trips=meter.trips,
        commands=max(meter.commands.values(), default=0),
        lines=said.count("\n"),
    )


def apart(name: str, nodes: int, *, memory: bool) -> Figures:
    """Measure a case in a process of its own."""
    words = ["--case", name, "--nodes", str(nodes), *(["--memory"] if memory else [])]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise SystemExit(f"{name} with {nodes} nodes failed:\n{ran.stderr[-2000:]}")
    return Figures(**json.loads(ran.stdout))


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
    given = parser.parse_args()
    sizes = [int(word) for word in given.nodes.split(",")]
    if given.case:
        measure(CASES[given.case], 2)
        print(json.dumps(asdict(measure(CASES[given.case], sizes[0], memory=given.memory))))
        return
    names = [word.strip() for word in given.only.split(";") if word.strip()] or list(CASES)
    found = {}
    for name in names:
        found[name] = rounds(name, sizes, given.rounds)
    sys.exit(table(found, sizes, given.rounds))


def rounds(name: str, sizes: Sequence[int], times: int) -> dict[int, list[Figures]]:
    """Return what a case took with each size, round by round; the memory is in each."""
    memory = {size: apart(name, size, memory=True).memory for size in sizes}
    found: dict[int, list[Figures]] = {size: [] for size in sizes}
    for _ in range(times):
        for size in sizes:
            one = replace(apart(name, size, memory=False), memory=memory[size])
            found[size].append(one)
            print(f"{name}, {size} nodes: {one.cpu:.3f} s", file=sys.stderr)
    return found


def table(found: dict[str, dict[int, list[Figures]]], sizes: Sequence[int], times: int) -> int:
    """Print the medians and how they grow; return the exit code."""
    near = NEAR if NEAR in sizes else sizes[0]
    far = FAR if FAR in sizes else sizes[-1]
    growth = {name: _growth(CASES[name], rows, near, far) for name, rows in found.items()}
    nodes = " | ".join(map(str, sizes))
    print(f"CPU of the launcher, median of {times} rounds; nodes of {GPUS} GPUs:\n")
    print(
        f"| nodes | {nodes} | {far} against {near} (lowest–highest) |\n"
        f"|---|{'---|' * (len(sizes) + 1)}"
    )
    for name, rows in found.items():
        per, scale = ("direction, µs", 1e6) if CASES[name].pairs else ("node, ms", 1e3)
        each = " | ".join(
            f"{_cpu(rows[size]) * scale / CASES[name].units(size):.1f}" for size in sizes
        )
        low, middle, high = growth[name]
        print(f"| `{name}`, per {per} | {each} | {middle:.2f}× ({low:.2f}–{high:.2f}) |")
    print("\nMost memory (MB), calls of the transport, most commands to a node, lines shown:\n")
    print(f"| nodes | {nodes} | calls | commands | lines |\n|---|{'---|' * (len(sizes) + 3)}")
    for name, rows in found.items():
        each = " | ".join(f"{rows[size][0].memory / 1e6:.1f}" for size in sizes)
        counts = [
            _span([getattr(rows[size][0], what) for size in sizes])
            for what in ("trips", "commands", "lines")
        ]
        if CASES[name].terminal:
            counts[-1] = "redrawn"
        print(f"| `{name}` | {each} | {' | '.join(counts)} |")
    over = [name for name in found if growth[name][1] > GOAL]
    print(
        f"\nGoal: CPU per node, or per direction between two, with {far} nodes ≤ {GOAL}× that with"
        f" {near}: {'missed by ' + ', '.join(over) if over else 'met'}"
    )
    return 1 if over else 0


def _cpu(rows: Sequence[Figures]) -> float:
    return statistics.median(each.cpu for each in rows)


def _growth(
    case: Case, rows: dict[int, list[Figures]], near: int, far: int
) -> tuple[float, float, float]:
    """Return how many times the CPU per node or direction grows: lowest, median and highest of the
    rounds.
    """
    ratios = sorted(
        (b.cpu / case.units(far)) / (a.cpu / case.units(near))
        for a, b in zip(rows[near], rows[far], strict=True)
    )
    return ratios[0], statistics.median(ratios), ratios[-1]


def _span(counts: Sequence[int]) -> str:
    """Return one number where all are the same, else all of them."""
    return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))


if __name__ == "__main__":
    main()
