"""Child programs of the agent, and orphans that it inherits as a container's first process.

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
    """Raise the soft limit on open files (1024 with Docker 29) for all child programs.

    A process may raise it up to the hard limit; `docker run --ulimit` fails above the daemon's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def spawn(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program that the caller waits for: `reap` skips it until `forget`."""
    with _lock:  # it may have ended before its number is known
        process = subprocess.Popen(argv, **options)
        _own.add(process.pid)
    return process


def forget(process: subprocess.Popen[bytes]) -> None:
    """Release a program after waiting for it: its PID may be reused."""
    with _lock:
        _own.discard(process.pid)


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
    """Reap orphans that have exited; nothing else waits for them."""
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
