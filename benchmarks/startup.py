"""Start-up of the command: CPU of `vlaunch --help` and of an offline dry run, against an
interpreter that does nothing.

    python benchmarks/startup.py [--rounds 15]

What is counted is user + system time of the process, and wall time beside it. The commands take
turns, so that a busy moment of the machine meets all of them; medians are shown. The goal is 150 ms
of CPU for `--help`.
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
    """Run a command and return its CPU and wall time in milliseconds; raises CalledProcessError
    when it fails.
    """
    began = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    # so that Popen does not wait for it again
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
        measure(argv)  # byte code and the page cache are warm for all
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, argv in COMMANDS.items():
            found[name].append(measure(argv))
    cpu = {name: statistics.median(each[0] for each in runs) for name, runs in found.items()}
    wall = {name: statistics.median(each[1] for each in runs) for name, runs in found.items()}
    nothing = next(iter(COMMANDS))
    print(f"Start-up, {rounds} rounds, median (lowest–highest):\n")
    print("| command | CPU ms | wall ms | CPU against an idle interpreter |\n|---|---|---|---|")
    for name, runs in found.items():
        low, high = min(each[0] for each in runs), max(each[0] for each in runs)
        print(
            f"| {name} | {cpu[name]:.0f} ({low:.0f}–{high:.0f}) | {wall[name]:.0f} |"
            f" {cpu[name] / cpu[nothing]:.1f}× |"
        )
    name, limit = GOAL
    print(
        f"\nGoal: {name} below {limit:.0f} ms of CPU: {cpu[name]:.0f} ms,"
        f" {'met' if cpu[name] < limit else 'missed'}"
    )


if __name__ == "__main__":
    main()
