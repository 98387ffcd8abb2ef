"""Parser of NCCL's log: megabytes per second of `nccl_log.parse_log`, compared with a loop over
lines.

    python benchmarks/nccl_log.py [--megabytes 200] [--rounds 3]

The log is that of 64 nodes with 8 GPUs at NCCL_DEBUG=INFO. Most lines are channels: half of them
without a prefix, the others behind Ray's prefix in colour, vLLM's, or a unique time stamp. Both
readers read the same file block by block and take turns; the figure is user + system time, median
of the rounds. The goal is 50 MB/s.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.network import nccl_log

NODES, GPUS, CHANNELS = 64, 8, 16
GOAL = 50.0


def log_lines(rng: random.Random) -> Iterator[str]:
    """Yield lines of a log, endlessly."""
    index = 0
    while True:
        index += 1
        node, gpu, channel = (
            rng.randrange(NODES),
            rng.randrange(GPUS),
            rng.randrange(CHANNELS),
        )
        rank, pid = node * GPUS + gpu, 1000 + gpu
        other = (rank + GPUS) % (NODES * GPUS)
        kind = rng.random()
        if kind < 0.3:
            message = (
                f"Channel {channel:02d}/0 : {rank}[{gpu}] -> {other}[{gpu}] [send] via"
                f" NET/IB/{gpu}/GDRDMA"
            )
        elif kind < 0.5:
            message = (
                f"Channel {channel:02d}/0 : {other}[{gpu}] -> {rank}[{gpu}] [receive] via"
                f" NET/IB/{gpu}/GDRDMA"
            )
        elif kind < 0.9:
            neighbour = node * GPUS + (gpu + 1) % GPUS
            message = (
                f"Channel {channel:02d}/0 : {rank}[{gpu}] -> {neighbour}[{neighbour % GPUS}] via"
                " P2P/CUMEM/read"
            )
        elif kind < 0.95:
            message = f"Trees [0] {rank}/-1/-1->{rank}->{other} [1] -1/-1/-1->{rank}->{other}"
        else:
            message = (
                f"ncclCommInitRank comm 0x{pid:x} rank {rank} nranks 512 cudaDev {gpu} busId 1b000"
                " commId 0x9a1 - Init START"
            )
        second, microsecond = divmod(index, 1_000_000)
        minute, second = divmod(second, 60)
        prefix = rng.choice(
            (
                "",
                "",
                "",
                f"\x1b[36m(RayWorkerProc pid={pid}, ip=10.0.0.{node})\x1b[0m ",
                f"(Worker_TP{gpu} pid={pid}) ",
                f"2026-01-01 10:{minute:02d}:{second:02d}.{microsecond:06d} ",
            )
        )
        yield f"{prefix}gpu{node:02d}:{pid}:{pid + 50} [{gpu}] NCCL INFO {message}\n"


def write_log(path: Path, size: int) -> None:
    """Write a log of about `size` bytes."""
    source = log_lines(random.Random(7))
    with path.open("w") as file:
        while file.tell() < size:
            file.writelines(next(source) for _ in range(10_000))


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file block by block."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def count_line_bytes(path: Path) -> int:
    """Count the bytes of the lines."""
    with path.open("rb") as file:
        return sum(len(line) for line in file)


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl.log"
        write_log(path, options.megabytes * 1_000_000)
        megabytes = path.stat().st_size / 1e6
        readers: dict[str, Callable[[], object]] = {
            "loop over the lines": lambda: count_line_bytes(path),
            "`nccl.read`": lambda: nccl_log.parse_log(read_blocks(path)),
        }
        speeds: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(options.rounds):
            for name, reader in readers.items():
                began = time.process_time()
                reader()
                speeds[name].append(megabytes / (time.process_time() - began))
        reading = nccl_log.parse_log(read_blocks(path))
    speed = {name: statistics.median(values) for name, values in speeds.items()}
    loop, read = speed.values()
    print(
        f"A log of {megabytes:.0f} MB, {reading.lines} lines, {len(reading.links)} links;"
        f" {options.rounds} rounds, median:\n"
    )
    print("| reader | MB per CPU second (lowest–highest) | time against the loop |\n|---|---|---|")
    for name, values in speeds.items():
        print(
            f"| {name} | {speed[name]:.0f} ({min(values):.0f}–{max(values):.0f}) |"
            f" {loop / speed[name]:.1f}× |"
        )
    print(
        f"\nGoal: `nccl.read` at {GOAL:.0f} MB/s or more: {read:.0f} MB/s,"
        f" {'met' if read >= GOAL else 'missed'}"
    )
    sys.exit(0 if read >= GOAL else 1)


if __name__ == "__main__":
    main()
