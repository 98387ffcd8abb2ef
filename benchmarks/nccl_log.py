"""Reading a log of NCCL: megabytes a second of `nccl_log.read`, against a loop that
only splits it into lines.

    python benchmarks/nccl_log.py [--megabytes 200] [--rounds 3]

The log is what 64 nodes of 8 GPUs write with NCCL_DEBUG=INFO, in which most lines are channels:
half of them as they are, the others behind Ray's prefix in colour, vLLM's, or a time stamp that is
on no other line. Both read the same file block by block and take turns; what is counted is user +
system time, and medians are shown. The goal is 50 MB/s.
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


def lines(chance: random.Random) -> Iterator[str]:
    """Yield lines of a log without end."""
    at = 0
    while True:
        at += 1
        node, gpu, channel = (
            chance.randrange(NODES),
            chance.randrange(GPUS),
            chance.randrange(CHANNELS),
        )
        rank, pid = node * GPUS + gpu, 1000 + gpu
        other = (rank + GPUS) % (NODES * GPUS)
        kind = chance.random()
        if kind < 0.3:
            said = (
                f"Channel {channel:02d}/0 : {rank}[{gpu}] -> {other}[{gpu}] [send] via"
                f" NET/IB/{gpu}/GDRDMA"
            )
        elif kind < 0.5:
            said = (
                f"Channel {channel:02d}/0 : {other}[{gpu}] -> {rank}[{gpu}] [receive] via"
                f" NET/IB/{gpu}/GDRDMA"
            )
        elif kind < 0.9:
            near = node * GPUS + (gpu + 1) % GPUS
            said = (
                f"Channel {channel:02d}/0 : {rank}[{gpu}] -> {near}[{near % GPUS}] via"
                " P2P/CUMEM/read"
            )
        elif kind < 0.95:
            said = f"Trees [0] {rank}/-1/-1->{rank}->{other} [1] -1/-1/-1->{rank}->{other}"
        else:
            said = (
                f"ncclCommInitRank comm 0x{pid:x} rank {rank} nranks 512 cudaDev {gpu} busId 1b000"
                " commId 0x9a1 - Init START"
            )
        prefix = chance.choice(
            (
                "",
                "",
                "",
                f"\x1b[36m(RayWorkerProc pid={pid}, ip=10.0.0.{node})\x1b[0m ",
                f"(Worker_TP{gpu} pid={pid}) ",
                (
                    "2026-01-01"
                    f" 10:{at // 60_000_000:02d}:{at // 1_000_000 % 60:02d}.{at % 1_000_000:06d} "
                ),
            )
        )
        yield f"{prefix}gpu{node:02d}:{pid}:{pid + 50} [{gpu}] NCCL INFO {said}\n"


def write(path: Path, size: int) -> None:
    """Write a log of about `size` bytes."""
    source = lines(random.Random(7))
    with path.open("w") as file:
        while file.tell() < size:
            file.writelines(next(source) for _ in range(10_000))


def blocks(path: Path) -> Iterator[bytes]:
    """Yield a file block by block."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def split_only(path: Path) -> int:
    """Count the bytes of the lines, and do nothing else."""
    with path.open("rb") as file:
        return sum(len(line) for line in file)


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl.log"
        write(path, given.megabytes * 1_000_000)
        megabytes = path.stat().st_size / 1e6
        ways: dict[str, Callable[[], object]] = {
            "loop over the lines": lambda: split_only(path),
            "`nccl.read`": lambda: nccl_log.parse_log(blocks(path)),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(given.rounds):
            for name, way in ways.items():
                began = time.process_time()
                way()
                found[name].append(megabytes / (time.process_time() - began))
        reading = nccl_log.parse_log(blocks(path))
    speed = {name: statistics.median(each) for name, each in found.items()}
    loop, read = speed.values()
    print(
        f"A log of {megabytes:.0f} MB, {reading.lines} lines, {len(reading.links)} links;"
        f" {given.rounds} rounds, median:\n"
    )
    print("| reader | MB per CPU second (lowest–highest) | time against the loop |\n|---|---|---|")
    for name, each in found.items():
        print(
            f"| {name} | {speed[name]:.0f} ({min(each):.0f}–{max(each):.0f}) |"
            f" {loop / speed[name]:.1f}× |"
        )
    print(
        f"\nGoal: `nccl.read` at {GOAL:.0f} MB/s or more: {read:.0f} MB/s,"
        f" {'met' if read >= GOAL else 'missed'}"
    )
    sys.exit(0 if read >= GOAL else 1)


if __name__ == "__main__":
    main()
