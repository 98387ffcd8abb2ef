"""Download the wheels of the practice image: for the image's Python, from wherever this machine's
pip looks. torch for CPUs, which pip's default index does not have, comes from PyTorch's own where
pip finds none.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from importlib import resources
from pathlib import Path

from uv import find_uv_bin

from launcher.errors import VlaunchError
from launcher.lab import machine
from launcher.lab.machine import Say
from launcher.tools.image import wheel_platforms

PYTHON = "3.11"  # Debian 12's own
_GLIBC_MINOR = 36
_TIMEOUT = 1800.0


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
        _torch(partial, say)
        machine.run(
            *_download(partial, "--require-hashes", "--requirement", str(partial / "wheels.lock")),
            timeout=_TIMEOUT,
            what="downloading the wheels",
        )
    except VlaunchError as error:
        shutil.rmtree(partial)
        error.hint = error.hint or (
            "the wheels come from wherever this machine's pip looks: `pip config list`"
        )
        raise
    partial.rename(wheels)
    for old in cache.glob("wheels-*"):
        if old != wheels:
            shutil.rmtree(old)
    return wheels


def _torch(directory: Path, say: Say) -> None:
    """Download torch for CPUs from where pip is told to look, or else from PyTorch's index.

    Raises VlaunchError when neither has it.
    """
    pin = next(line for line in pins().splitlines() if line.startswith("torch=="))
    usual = _download(directory, pin)
    done = machine.attempt(*usual, timeout=_TIMEOUT)
    if done.returncode == 0:
        return
    what = f"downloading {pin}"
    if "No matching distribution" not in done.stderr:
        machine.run(*usual, timeout=_TIMEOUT, what=what)
        return
    index = _pytorch_index(directory, pin)
    say(f"pip finds no {pin} where it is told to look: it comes from {index}")
    machine.run(*usual, "--index-url", index, timeout=_TIMEOUT, what=what)


def _pytorch_index(directory: Path, pin: str) -> str:
    """Ask uv, which knows PyTorch's indexes, where torch for CPUs is.

    Raises VlaunchError when it cannot say.
    Source: https://docs.astral.sh/uv/guides/integration/pytorch/
    """
    asked = directory / "torch.in"
    asked.write_text(f"{pin}\n")
    try:
        said = machine.run(
            *(find_uv_bin(), "pip", "compile", "--quiet", "--no-deps", "--no-header"),
            *("--emit-index-annotation", "--torch-backend", "cpu", "--python-version", PYTHON),
            str(asked),
            what=f"asking uv where {pin} is",
        )
    except VlaunchError as error:
        error.hint = (
            f"put {pin} where pip finds it: `pip config set global.find-links DIR`, or its index"
            " into `extra-index-url` of /etc/pip.conf"
        )
        raise
    finally:
        asked.unlink()
    found = re.search(r"# from (\S+)", said)
    if found is None:
        raise VlaunchError(f"uv does not say where {pin} is", evidence=said.splitlines()[-3:])
    return found[1]


def _download(directory: Path, *what: str) -> tuple[str, ...]:
    """Return the argv that downloads wheels for the image; what is there already is taken."""
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
        *(
            word
            for platform in wheel_platforms(os.uname().machine, _GLIBC_MINOR)
            for word in ("--platform", platform)
        ),
        *("--dest", str(directory), "--find-links", str(directory), *what),
    )
