"""Commands on the machine that hosts the lab cluster, always with a deadline."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from launcher.core.errors import DeadlineError, VlaunchError

Say = Callable[[str], None]

# Debian's administrator PATH, which a plain user's PATH may lack.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run(
    *argv: str,
    timeout: float = 60.0,
    stdin: IO[bytes] | None = None,
    cwd: Path | None = None,
    what: str = "",
) -> str:
    """Run a command and return its standard output.

    Raises VlaunchError with its last lines when it fails, DeadlineError after `timeout` seconds.
    """
    result = attempt(*argv, timeout=timeout, stdin=stdin, cwd=cwd)
    if result.returncode != 0:
        last_lines = (result.stderr.strip() or result.stdout.strip()).splitlines()[-8:]
        raise VlaunchError(
            f"{what or f'`{argv[0]}`'} failed with exit status {result.returncode}",
            evidence=last_lines,
        )
    return result.stdout


def attempt(
    *argv: str, timeout: float = 60.0, stdin: IO[bytes] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail and return its result."""
    try:
        return subprocess.run(
            argv,
            timeout=timeout,
            stdin=stdin if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            env={**os.environ, "PATH": PATH, "LC_ALL": "C.UTF-8"},
            check=False,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(argv, 127, "", f"{argv[0]}: command not found")
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"`{' '.join(argv[:3])}` timed out after {timeout:.0f}s") from None


def await_true(
    condition: Callable[[], bool],
    *,
    what: str,
    timeout: float,
    evidence: Callable[[], str] = lambda: "",
) -> None:
    """Wait until `condition()` is true; raises DeadlineError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"timed out after {timeout:.0f}s waiting for {what}", evidence=evidence()
            )
        time.sleep(0.03)


def tail(path: Path, lines: int = 8) -> str:
    """Return the last lines of a log; empty if it does not exist."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
