"""Child programs of the agent, and orphans that it inherits as PID 1 of its container.

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

_MAX_OPEN_FILES = 65536  # for one process; Ray opens some for each worker and for each other node
_lock = threading.Lock()
_awaited_pids: set[int] = set()


def raise_file_limit() -> None:
    """Raise the soft limit on open files (1024 with Docker 29) for all child programs.

    A process may raise it up to the hard limit; `docker run --ulimit` fails above the daemon's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def spawn(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program that the caller waits for: `reap` leaves its exit code until `forget`."""
    with _lock:  # it may have ended before its PID is known
        process = subprocess.Popen(argv, **options)
        _awaited_pids.add(process.pid)
    return process


def forget(process: subprocess.Popen[bytes]) -> None:
    """Release a program after waiting for it: its PID may be reused."""
    with _lock:
        _awaited_pids.discard(process.pid)


def run(argv: Sequence[str], timeout: float, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a short program; return its exit code and output.

    127: not found; 124: timed out.
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
        return 124, f"{argv[0]} did not exit within {timeout:g} s"
    finally:
        forget(process)


def reap() -> None:
    """Reap exited orphans; any behind a program that `spawn` started wait until `forget`."""
    while True:
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        with _lock:
            if child is None or child.si_pid in _awaited_pids:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.si_pid, os.WNOHANG)
