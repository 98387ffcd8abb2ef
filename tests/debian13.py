"""A small Debian 13 with podman, built by `make machine-exports` beside the lab image."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/var/cache/vlaunch-lab/debian13")
MISSING = "is not there: `make machine-exports` brings it"


def program(name: str) -> Path | None:
    """Return the path of one of its programs; None if it is missing."""
    path = ROOT / "usr" / "bin" / name
    return path if path.exists() else None
