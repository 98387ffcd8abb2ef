"""Waits for other threads and programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 120.0


def until(true: Callable[[], object], what: str, extra: Callable[[], object] = str) -> None:
    """Wait until a condition holds; on timeout show `more`."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}\n{extra()}"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    """Return whether a process runs, zombies excluded."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False
