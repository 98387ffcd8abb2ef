"""Search for a process by a unique argument, without starting another process."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

_numbers = itertools.count()


def unique_seconds() -> str:
    """Return a number of seconds for `sleep` that identifies the process: long, and used once."""
    return f"86{os.getpid()}.{next(_numbers)}"


def alive(argument: str) -> list[str]:
    """Return the command lines of processes with exactly this argument."""
    command_lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if argument in arguments:
                command_lines.append(" ".join(arguments))
    return command_lines


def appears(argument: str, *, within: float = 120.0) -> bool:
    """Wait until such a process runs."""
    return awaited(lambda: bool(alive(argument)), within=within)


def disappears(argument: str, *, within: float = 120.0) -> bool:
    """Wait until no such process runs."""
    return awaited(lambda: not alive(argument), within=within)


def awaited(condition: Callable[[], bool], *, within: float = 120.0) -> bool:
    """Wait until the condition is true; False on timeout."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
