"""Programs that the agent starts, and the orphans that it inherits as a container's first process.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

_FILES = 65536  # open at a time; Ray opens some for each worker and for each other node
_lock = threading.Lock()
_own: set[int] = set()


def allow_files() -> None:
    """Raise the soft limit on open files, 1024 with Docker 29, for all programs that are started.

    A process may raise it as far as the hard limit; `docker run --ulimit` fails above the daemon's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def spawn(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program that whoever calls will wait for: `reap` leaves it alone until `forget`."""
    with _lock:  # it may have ended before its number is known
        process = subprocess.Popen(argv, **options)
        _own.add(process.pid)
    return process


def forget(process: subprocess.Popen[bytes]) -> None:
    """Say that a program has been waited for: its number may be another's from now on."""
    with _lock:
        _own.discard(process.pid)


def run(argv: Sequence[str], timeout: float, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a short program; return its exit code and what it printed.

    127: it is not there; 124: it took too long.
    """
    try:
        process = spawn(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
        )
    except OSError as error:
        return 127, str(error)
    try:
        out, _ = process.communicate(timeout=timeout)
        return process.returncode, out.decode(errors="replace")
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 124, f"{argv[0]} did not end within {timeout:g} s"
    finally:
        forget(process)


def reap() -> None:
    """Take leave of orphans that have ended; nobody else waits for them."""
    while True:
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        with _lock:
            if child is None or child.si_pid in _own:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.si_pid, os.WNOHANG)
