"""Download the wheels of the practice image, for its Python, from the indexes of pip.

torch for CPUs, which pip's default index does not have, may also come from PyTorch's own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from importlib import resources
from pathlib import Path

from launcher.core.errors import VlaunchError
from launcher.lab import machine
from launcher.lab.machine import Say
from launcher.tools.image import pip_download

PYTHON = "3.11"  # Debian 12's own
_GLIBC_MINOR = 36
_TIMEOUT = 1800.0
_PYTORCH = "https://download.pytorch.org/whl/cpu"


def lock() -> str:
    """Return the pinned wheels, one `name==version` a line, with the hashes that each may have."""
    return resources.files("launcher.lab").joinpath("wheels.lock").read_text()


def pins() -> str:
    """Return the pinned wheels without their hashes."""
    return re.sub(r" --hash=\S+", "", lock())


def ensure(cache: Path, say: Say) -> Path:
    """Return the directory of the wheels, downloading them where the cache lacks them.

    Raises VlaunchError with pip's last lines when a wheel cannot be had.
    """
    wheels = cache / f"wheels-{hashlib.sha256(pins().encode()).hexdigest()[:12]}"
    if wheels.exists():
        return wheels
    say(
        "downloading the wheels of the practice image: 0.5 GB, which takes a minute at 100 Mbit/s;"
        " they are kept for the next time"
    )
    partial = cache / f"building-{os.getpid()}-wheels"
    partial.mkdir()
    (partial / "wheels.lock").write_text(lock())
    try:
        torch = next(pin for pin in pins().splitlines() if pin.startswith("torch=="))
        locked = ("--require-hashes", "--requirement", str(partial / "wheels.lock"))
        # pip goes on without an index that it cannot reach.
        for files in ((torch, "--extra-index-url", _PYTORCH, "--retries", "1"), locked):
            machine.run(
                *_download(partial, *files), timeout=_TIMEOUT, what="downloading the wheels"
            )
    except VlaunchError as error:
        shutil.rmtree(partial)
        error.hint = error.hint or (
            "the wheels come from the indexes of this machine's pip: `pip config list`; for torch,"
            f" add {_PYTORCH} or a folder: `pip config set global.find-links DIR`"
        )
        raise
    partial.rename(wheels)
    for old in cache.glob("wheels-*"):
        if old != wheels:
            shutil.rmtree(old)
    return wheels


def _download(directory: Path, *what: str) -> tuple[str, ...]:
    """Return the argv that downloads wheels for the image; what is there already is taken."""
    pip = pip_download(PYTHON, os.uname().machine, _GLIBC_MINOR)
    return (*pip, "--quiet", "--dest", str(directory), "--find-links", str(directory), *what)
