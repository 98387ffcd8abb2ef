"""A small Debian 13 with podman, which `make machine-exports` builds beside the practice image."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/var/cache/vlaunch-lab/debian13")
MISSING = "is not there: `make machine-exports` brings it"


def program(name: str) -> Path | None:
    """Return where a program of it is; None where it is not."""
    path = ROOT / "usr" / "bin" / name
    return path if path.exists() else None
