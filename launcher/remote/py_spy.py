"""Download py-spy's wheel on the control machine, with the user's pip configuration."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from launcher.errors import VlaunchError
from launcher.remote.wheels import run
from launcher.tools.image import pip_download
from launcher.tools.py_spy import VERSION, Build, unpack

_PYTHON, _GLIBC_MINOR = "3.12", 17  # any would do: the wheels are for all
_PATIENT = ("--retries", "1", "--timeout", "10")  # a cluster works without


def fetch(build: Build, cache: Path, *, timeout: float = 60.0) -> bytes:
    """Return the program for a machine, from the cache when its wheel is there.

    Raises VlaunchError where it can be neither found there nor downloaded.
    """
    kept = cache / f"py_spy-{VERSION}-{build.machine}.whl"
    if kept.exists() and (program := _read(kept, build)):
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".downloading-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"py-spy=={VERSION} --hash=sha256:{build.wheel}\n")
        pip = pip_download(_PYTHON, build.machine, _GLIBC_MINOR)
        files = ("--require-hashes", "--requirement", str(requirements), "--dest", folder)
        try:
            run((*pip, *_PATIENT, *files), {"PIP_REQUIRE_VIRTUALENV": "0"}, timeout)
            (wheel,) = Path(folder).glob("*.whl")
        except (subprocess.SubprocessError, ValueError) as error:
            raise _failure(error, build) from None
        wheel.rename(kept)
    return unpack(kept.read_bytes(), build)


def _read(kept: Path, build: Build) -> bytes | None:
    try:
        return unpack(kept.read_bytes(), build)
    except (OSError, VlaunchError):  # damaged
        return None


def _failure(error: Exception, build: Build) -> VlaunchError:
    output = error.stdout if isinstance(error, subprocess.CalledProcessError) else ""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    return VlaunchError(
        f"cannot download py-spy {VERSION} for {build.machine}",
        evidence=lines[-2:],
        hint="without an index, run on a machine that has one `pip download --no-deps"
        f" --platform manylinux2014_{build.machine} --dest wheels py-spy=={VERSION}`, copy the"
        " folder here, and set `PIP_FIND_LINKS` to it and `PIP_NO_INDEX=1`",
    )
