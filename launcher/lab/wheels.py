"""Download the wheels of the practice image: for the image's Python, from wherever this machine's
pip looks.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from launcher.errors import VlaunchError
from launcher.lab import machine
from launcher.lab.machine import Say

PYTHON = "3.11"  # Debian 12's own


def lock() -> str:
    """Return the pinned wheels, one `name==version` a line."""
    return resources.files("launcher.lab").joinpath("wheels.lock").read_text()


def ensure(cache: Path, say: Say) -> Path:
    """Return the directory of the wheels, downloading them where the cache lacks them.

    Raises VlaunchError with pip's last lines when a wheel cannot be had.
    """
    pins = lock()
    wheels = cache / f"wheels-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"
    if wheels.exists():
        return wheels
    say("downloading the wheels of the practice image (0.5 GB)")
    partial = cache / f"building-{os.getpid()}-wheels"
    partial.mkdir()
    (partial / "wheels.lock").write_text(pins)
    try:
        machine.run(*_download(partial), timeout=1800, what="downloading the wheels")
    except VlaunchError as error:
        shutil.rmtree(partial)
        error.hint = (
            "the wheels come from wherever this machine's pip looks (`pip config list`); "
            "a `torch` with `+cpu` in its version needs PyTorch's CPU index in PIP_EXTRA_INDEX_URL"
        )
        raise
    partial.rename(wheels)
    for old in cache.glob("wheels-*"):
        if old != wheels:
            shutil.rmtree(old)
    return wheels


def _download(directory: Path) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *(
            "--python-version",
            PYTHON,
            "--implementation",
            "cp",
            "--abi",
            f"cp{PYTHON.replace('.', '')}",
        ),
        *("--abi", "abi3", "--abi", "none"),
        *(word for platform in platforms(os.uname().machine) for word in ("--platform", platform)),
        *("--dest", str(directory), "--requirement", str(directory / "wheels.lock")),
    )


def platforms(cpu: str) -> Iterator[str]:
    """Yield every wheel platform that Debian 12 (glibc 2.36) can load; pip does not derive the
    older from the newest.
    """
    yield from (f"manylinux_2_{minor}_{cpu}" for minor in range(36, 4, -1))
    yield from (f"manylinux{year}_{cpu}" for year in ("2014", "2010", "1"))
    yield f"linux_{cpu}"
