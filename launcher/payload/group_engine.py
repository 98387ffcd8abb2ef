"""vLLM's processes on one node, started and ended as a whole. Standard library only.

The engine is a process group of its own. What it prints goes on to our own output, where `docker logs` finds it, and the end of
it is kept: it is the evidence when the engine dies.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_TAIL = 1 << 16  # bytes of the engine's output that are kept
_TELLING = re.compile(
    r"died unexpectedly|fatal error|EngineDeadError|Error:|Exception:|CUDA error|out of memory|Killed|NCCL WARN|"
    r"Connection closed|Connection reset|Segmentation fault|Aborted|timed out"
)
_IDLE, _RUNNING, _STOPPING = "idle", "running", "stopping"


class Engine:
    """One engine at a time. `state` is idle, running or stopping; `last` is the generation that was started last.

    `ended` says how it came to its end, where nobody asked for it. Call `poll` often: it is what drives everything.
    """

    def __init__(self, argv: Sequence[str], grace: float) -> None:
        self.argv, self.grace = list(argv), grace
        self.state, self.last, self.ended = _IDLE, 0, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: threading.Thread | None = None
        self._tail, self._kill_at, self._closed = b"", 0.0, False

    @property
    def evidence(self) -> str:
        """The telling lines that it printed, else its last ones; what came first is the cause of what came then."""
        lines = [line.strip()[:300] for line in re.split(r"[\r\n]+", self._tail.decode(errors="replace")) if line.strip()]
        return "\n".join([line for line in lines if _TELLING.search(line)][:6] or lines[-6:])

    def start(self, generation: int) -> None:
        """Start it; what cannot be started has ended at once."""
        # Logs of an engine that is gone would be read as this one's.
        for path in glob.glob(re.sub("%[hp]", "*", os.environ.get("NCCL_DEBUG_FILE", ""))):
            with contextlib.suppress(OSError):
                os.remove(path)
        self.last, self.ended, self._tail, self._closed = generation, "", b"", False
        try:
            self._process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            self.ended = f"cannot be started: {error}"
            return
        self.state = _RUNNING
        self._printed = threading.Thread(target=self._pass_on, args=(self._process,), daemon=True)
        self._printed.start()

    def stop(self) -> None:
        """Begin to end it: politely first, which lets vLLM free what it holds; `poll` does the rest."""
        if self.state == _RUNNING:
            self._stop()

    def _stop(self) -> None:
        self.state, self._kill_at = _STOPPING, time.monotonic() + self.grace
        # The first process ends the others; only when it has gone are they told themselves.
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def poll(self) -> None:
        """See how it is, and go on ending it."""
        process = self._process
        if process is None:
            reap(0)
            return
        code = process.poll()
        reap(0 if code is not None else process.pid)
        if code is not None and self.state == _RUNNING:
            self.ended = _words(code)
            self._stop()
        if self.state != _STOPPING or (code is None and time.monotonic() < self._kill_at):
            return
        if not _lives(process.pid):
            if self._printed:
                self._printed.join(0.2)
            self._process, self.state = None, _IDLE
        elif time.monotonic() >= self._kill_at:
            _signal(process.pid, signal.SIGKILL)
        elif not self._closed:
            self._closed = True
            _signal(process.pid, signal.SIGTERM)

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """Print what the engine prints, for as long as anything of it lives."""
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        descriptor = process.stdout.fileno()
        while data := os.read(descriptor, 1 << 16):
            if process is self._process:
                self._tail = (self._tail + data)[-_TAIL:]
            with contextlib.suppress(OSError):  # Whoever reads our output may be gone; the engine must not block for it.
                while data:
                    data = data[os.write(sys.stdout.fileno(), data) :]
        process.stdout.close()


def reap(but: int) -> None:
    """Take leave of children that ended, but for one: the first process of a container inherits all orphans."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == but:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)


def _lives(group: int) -> bool:
    """True while a process of the group does more than wait to be reaped."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(path, encoding="utf-8", errors="replace") as file:
                words = file.read().rpartition(")")[2].split()  # state, parent, group: behind the name in brackets
            if int(words[2]) == group and words[0] not in "ZX":
                return True
    return False


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (by hand, or for lack of memory)" if name == "SIGKILL" else "")
