"""Prometheus' programs, unpacked by `make machine` or installed."""

from __future__ import annotations

import shutil
from pathlib import Path

_UNPACKED = Path(__file__).parents[1] / ".venv" / "prometheus" / "usr" / "bin"


def program(name: str) -> str | None:
    """Return the path of `prometheus` or `promtool`; None if it is missing."""
    unpacked = _UNPACKED / name
    return str(unpacked) if unpacked.exists() else shutil.which(name)
