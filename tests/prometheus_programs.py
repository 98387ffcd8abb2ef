"""Prometheus' own programs, as `make machine` unpacks them from Debian's package, or as the machine
has them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_UNPACKED = Path(__file__).parents[1] / ".venv" / "prometheus" / "usr" / "bin"


def program(name: str) -> str | None:
    """Return where `prometheus` or `promtool` is; None where it is not."""
    unpacked = _UNPACKED / name
    return str(unpacked) if unpacked.exists() else shutil.which(name)
