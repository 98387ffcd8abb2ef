"""The processes of one engine on this node, started and ended as a whole. Standard library only.

An engine is a session of processes. What it prints goes to a log of its own, which does not grow
without end. The telling lines since
the engine was last well are kept: they are the evidence when it dies.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from . import cause, children

MARK = "VLAUNCH_ENGINE"  # in the environment of all that belongs to an engine
ENDS = "vlaunch agent: the engine "  # in the log, before how it ended
BEGINS = "vlaunch agent: starting the engine"  # in the log: what is above is of another engine
_LOG = 64 << 20  # bytes of a log until it is put aside
_LINES, _WIDTH = 60, 400
_CATCH_UP = 2.0  # seconds in which a loaded node has read what an engine had printed
IDLE, RUNNING, STOPPING = "idle", "running", "stopping"
_ACCESS = re.compile(r'"(?:GET|POST) /\S* HTTP/1\.[01]"')
_COUNTERS = re.compile(r"throughput: [\d.]+ tokens/s")


class Engine:
    """One engine at a time.

    `state` is idle, running or stopping; `last` is the generation that was started last.

    `ended` says how it came to its end, where nobody asked for it. Call `poll` often: it is what
    drives everything.
    """

    def __init__(self, name: str, log: str) -> None:
        self.name, self.log = name, log
        self.state, self.last, self.ended = IDLE, 0, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: threading.Thread | None = None
        self._telling: list[str] = []
        self._tail: deque[str] = deque(maxlen=6)
        self._before = ""
        self._grace = self._kill_at = 0.0
        self._told = False

    @property
    def evidence(self) -> str:
        """The exception that ended it and the first telling lines that it printed since it was
        well, else its last ones.
        """
        raised = cause.find(self._telling)
        first = self._telling[raised.first : raised.last + 1] if raised else []
        return "\n".join(list(dict.fromkeys([*first, *self._telling]))[:6] or self._tail)

    @property
    def cause(self) -> str:
        """The engine's first error since it was well; empty where it printed none."""
        return cause.root(self._telling)

    def well(self) -> None:
        """Say that it works: what looked like an error until now was none that mattered."""
        self._telling = []

    def start(self, generation: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it; what cannot be started has ended at once."""
        environment = {**os.environ, **env, MARK: mark(f"{self.name}.{generation}")}
        # Logs of an engine that is gone would be read as this one's.
        for path in glob.glob(re.sub("%[hp]", "*", environment.get("NCCL_DEBUG_FILE", ""))):
            with contextlib.suppress(OSError):
                os.remove(path)
        self.last, self.ended, self._told = generation, "", False
        self._telling = []
        self._tail.clear()
        self._write(f"{BEGINS} (generation {generation})\n".encode())
        try:
            self._process = children.spawn(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self.ended = f"cannot be started: {argv[0]}: {error.strerror}"
            self._write(f"vlaunch agent: {self.ended}\n".encode())
            return
        self.state = RUNNING
        self._printed = threading.Thread(target=self._pass_on, args=(self._process,), daemon=True)
        self._printed.start()

    def stop(self, grace: float) -> None:
        """Begin to end it: politely first, which lets vLLM free what it holds; `poll` does the
        rest.
        """
        if self.state == RUNNING:
            self._grace = grace
            self._stop()

    def _stop(self) -> None:
        self.state, self._kill_at = STOPPING, time.monotonic() + self._grace
        # The first process ends the others; only when it has gone are they told themselves.
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
                # one that was frozen would never hear of it
                self._process.send_signal(signal.SIGCONT)

    def poll(self) -> None:
        """See how it is, and go on ending it."""
        process = self._process
        if process is None:
            return
        code = process.poll()
        if code is not None and self.state == RUNNING:
            self._note_end(process, code)
        if self.state == STOPPING and (code is not None or time.monotonic() >= self._kill_at):
            self._end_what_is_left(process)

    def _note_end(self, process: subprocess.Popen[bytes], code: int) -> None:
        """Note that its first process has ended by itself, and begin to end the others."""
        if self._printed:
            # Its last words; whoever else holds the pipe may be silent for long.
            self._printed.join(0.2 if any(self._left(process.pid)) else _CATCH_UP)
        self.ended = _words(code)
        self._write(f"{ENDS}{self.ended}\n".encode())
        self._stop()

    def _end_what_is_left(self, process: subprocess.Popen[bytes]) -> None:
        """Tell what lives of it to end, once; later make it."""
        left = list(self._left(process.pid))
        if not left and process.returncode is not None:
            children.forget(process)
            self._process, self.state = None, IDLE
        elif time.monotonic() >= self._kill_at:
            _signal(left, signal.SIGKILL)
        elif not self._told:
            self._told = True
            _signal(left, signal.SIGTERM)

    @property
    def pid(self) -> int | None:
        """The first process, whose number is that of the session; None when nothing runs."""
        return self._process.pid if self._process else None

    def _left(self, session: int) -> Iterator[int]:
        """Find what lives of it, also what has left the session."""
        words = f"{MARK}={mark(f'{self.name}.{self.last}')}"
        for pid, own in _processes():
            if own == session or (own != os.getsid(0) and _carries(pid, words)):
                yield pid

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """Write down what the engine prints, for as long as anything of it lives."""
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        descriptor, half = process.stdout.fileno(), b""
        while data := os.read(descriptor, 1 << 16):
            self._write(data)
            *lines, half = re.split(rb"[\r\n]+", half + data)
            half = half[-_WIDTH:]
            if process is self._process:
                for line in lines:
                    self._keep(line.decode(errors="replace").strip()[:_WIDTH])
        self._keep(half.decode(errors="replace").strip())  # its last words
        process.stdout.close()

    def _keep(self, line: str) -> None:
        if not line:
            return
        if not _ACCESS.search(line) and not _COUNTERS.search(line):  # our own questions cause these
            self._tail.append(line)
        if len(self._telling) < _LINES and cause.telling(line, self._before):
            self._telling.append(line)
        self._before = line

    def _write(self, data: bytes) -> None:
        """Append to the log; a disk that is full must not end the engine."""
        with contextlib.suppress(OSError):
            if os.path.exists(self.log) and os.path.getsize(self.log) > _LOG:
                os.replace(self.log, self.log + ".1")
            os.makedirs(os.path.dirname(self.log), exist_ok=True)
            with open(self.log, "ab") as file:
                file.write(data)


def lives(pid: int) -> bool:
    """Return False only for a process that is certainly gone."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def mark(what: str) -> str:
    """Return the value of MARK for what belongs to something of this agent: others may see the same
    processes.
    """
    return f"{os.getpid()}.{what}"


def marked(what: str) -> list[int]:
    """Return the processes that carry such a mark in their environment."""
    return carrying(f"{MARK}={mark(what)}")


def carrying(words: str) -> list[int]:
    """Return the processes in whose environment `NAME=value` stands."""
    return [pid for pid, _ in _processes() if _carries(pid, words)]


def in_session(session: int) -> list[int]:
    """Return the living processes of a session."""
    return [pid for pid, own in _processes() if own == session]


def ray_workers(pids: Iterable[int]) -> list[int]:
    """Return which of some processes still are workers of Ray: a number may be another's by now."""
    return [pid for pid in pids if title(pid).startswith("ray::")]


def kill(pids: Sequence[int]) -> None:
    """End processes at once."""
    _signal(pids, signal.SIGKILL)


def title(pid: int) -> str:
    """Return what a process calls itself."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(200).replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _processes() -> Iterator[tuple[int, int]]:
    """Yield number and session of each process that does more than wait to be reaped."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # state, parent, group, session: behind the name in brackets
                words = file.read().rpartition(")")[2].split()
            if words[0] not in "ZX":
                yield int(name), int(words[3])
        except (OSError, ValueError, IndexError):
            continue


def _carries(pid: int, words: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return words.encode() in file.read().split(b"\0")
    except OSError:
        return False


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (
        " (by hand, or for lack of memory)" if name == "SIGKILL" else ""
    )
