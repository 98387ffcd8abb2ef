"""Download py-spy's wheel on the control machine, with the user's pip configuration."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from launcher.cluster.wheels import run
from launcher.core.errors import VlaunchError
from launcher.tools.image import pip_download
from launcher.tools.py_spy import VERSION, Build, unpack

_PYTHON, _GLIBC_MINOR = "3.12", 17  # the wheels support all Pythons; glibc 2.17 is manylinux2014
_LIMITS = ("--retries", "1", "--timeout", "10")  # fail soon: a cluster works without py-spy


def fetch(build: Build, cache: Path, *, timeout: float = 60.0) -> bytes:
    """Return the program for a machine, from its wheel in the cache, or downloaded.

    Raises VlaunchError when the download fails.
    """
    cached = cache / f"py_spy-{VERSION}-{build.machine}.whl"
    if cached.exists() and (program := _read(cached, build)):
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".downloading-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"py-spy=={VERSION} --hash=sha256:{build.wheel}\n")
        pip = pip_download(_PYTHON, build.machine, _GLIBC_MINOR)
        files = ("--require-hashes", "--requirement", str(requirements), "--dest", folder)
        try:
            run((*pip, *_LIMITS, *files), {"PIP_REQUIRE_VIRTUALENV": "0"}, timeout)
            (wheel,) = Path(folder).glob("*.whl")
        except (subprocess.SubprocessError, ValueError) as error:
            raise _failure(error, build) from None
        wheel.rename(cached)
    return unpack(cached.read_bytes(), build)


def _read(wheel: Path, build: Build) -> bytes | None:
    try:
        return unpack(wheel.read_bytes(), build)
    except (OSError, VlaunchError):  # damaged
        return None


def _failure(error: Exception, build: Build) -> VlaunchError:
    output = error.stdout if isinstance(error, subprocess.CalledProcessError) else ""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    return VlaunchError(
        f"cannot download py-spy {VERSION} for {build.machine}",
        evidence=lines[-2:],
        hint="if this machine has no index, run `pip download --no-deps --platform"
        f" manylinux2014_{build.machine} --dest wheels py-spy=={VERSION}` on one that has, copy the"
        " folder here, and set `PIP_FIND_LINKS` to it and `PIP_NO_INDEX=1`",
    )
