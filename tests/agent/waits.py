"""Waiting for what other threads and programs do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 20.0


def until(true: Callable[[], object], what: str, extra: Callable[[], object] = str) -> None:
    """Wait until something holds; `more` is what to show when it does not."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}\n{extra()}"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    """True unless a process is gone or waits to be reaped."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False
