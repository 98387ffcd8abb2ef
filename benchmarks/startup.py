"""Start-up of the command: CPU of `vlaunch --help` and of an offline dry run.

    python benchmarks/startup.py [--rounds 15]

The reference is an interpreter that does nothing. The figures are user + system time of the
process, and wall time. The commands take turns, so that a busy moment of the machine affects all of
them; the table shows medians. The goal is 150 ms of CPU for `--help`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VLAUNCH = str(Path(sys.executable).parent / "vlaunch")
COMMANDS = {
    "`python -c pass`": (sys.executable, "-c", "pass"),
    "`vlaunch --help`": (VLAUNCH, "--help"),
    "`vlaunch up --dry-run --offline`": (
        VLAUNCH,
        "up",
        str(ROOT / "inventory" / "example.yaml"),
        "--dry-run",
        "--offline",
    ),
}
GOAL = ("`vlaunch --help`", 150.0)


def measure(argv: tuple[str, ...]) -> tuple[float, float]:
    """Run a command and return its CPU and wall time in milliseconds; raises CalledProcessError."""
    began = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    # keeps Popen from waiting for it again
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, argv)
    return (usage.ru_utime + usage.ru_stime) * 1000, (time.monotonic() - began) * 1000


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for argv in COMMANDS.values():
        measure(argv)  # warms byte code and the page cache
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, argv in COMMANDS.items():
            times[name].append(measure(argv))
    cpu = {name: statistics.median(timing[0] for timing in runs) for name, runs in times.items()}
    wall = {name: statistics.median(timing[1] for timing in runs) for name, runs in times.items()}
    idle_command = next(iter(COMMANDS))
    print(f"Start-up, {rounds} rounds, median (lowest–highest):\n")
    print("| command | CPU ms | wall ms | CPU against an idle interpreter |\n|---|---|---|---|")
    for name, runs in times.items():
        low, high = min(timing[0] for timing in runs), max(timing[0] for timing in runs)
        print(
            f"| {name} | {cpu[name]:.0f} ({low:.0f}–{high:.0f}) | {wall[name]:.0f} |"
            f" {cpu[name] / cpu[idle_command]:.1f}× |"
        )
    name, limit = GOAL
    print(
        f"\nGoal: {name} below {limit:.0f} ms of CPU: {cpu[name]:.0f} ms,"
        f" {'met' if cpu[name] < limit else 'missed'}"
    )


if __name__ == "__main__":
    main()
