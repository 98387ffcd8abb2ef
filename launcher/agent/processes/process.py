"""Processes of one engine on this node, started and stopped as a whole.

An engine is a session of processes. Its output goes to a bounded log of its own. The relevant lines
since the engine was last well are the evidence when it dies.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ... import upstream
from .. import cause
from . import children, watchdog

MARK = "VLAUNCH_ENGINE"  # in the environment of all processes of an engine
ENDS = "vlaunch agent: the engine "  # in the log, before how it ended
BEGINS = "vlaunch agent: starting the engine"  # in the log: lines above are of another engine
_LOG = 64 << 20  # bytes of a log until it is put aside
_LINES, _WIDTH = 60, 400
_CATCH_UP = 2.0  # seconds for a loaded node to read an engine's last output
IDLE, RUNNING, STOPPING = "idle", "running", "stopping"
# requests of our own, and lines that come with them
# An engine's process that died before the first one, which ends in order then.
_EXITS = re.compile(upstream.any_of("vllm.worker-exit-code", "vllm.core-exit-code"))
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_MEMORY_EVENTS = "/sys/fs/cgroup/memory.events"  # of this container, with version 2
_NOISE = re.compile(rf'"(?:GET|POST) /\S* HTTP/1\.[01]"|{upstream.text("vllm.throughput-line")}')


class LocalEngine:
    """One engine at a time.

    `state` is idle, running or stopping; `last` is the generation started last, `argv` its command;
    `ended` is how it exited, unless it was stopped. `poll` drives everything: call it often.
    """

    def __init__(self, name: str, log: str) -> None:
        self.name, self.log = name, log
        self.state, self.last, self.ended = IDLE, 0, ""
        self.argv: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._telling: list[str] = []
        self._tail: deque[str] = deque(maxlen=6)
        self._before = ""
        self._grace = self._kill_at = 0.0
        self._terminated = False
        self._oom_kills = 0

    @property
    def evidence(self) -> str:
        """The fatal exception and first relevant lines since it was well, else the last lines."""
        raised = cause.find_exception(self._telling)
        first = self._telling[raised.first : raised.last + 1] if raised else []
        return "\n".join(list(dict.fromkeys([*first, *self._telling]))[:6] or self._tail)

    @property
    def cause(self) -> str:
        """First error of the engine since it was well; empty without one."""
        return cause.root_cause(self._telling)

    @property
    def pid(self) -> int | None:
        """PID of the first process, which is also the session's id; None if nothing runs."""
        return self._process.pid if self._process else None

    def mark_healthy(self) -> None:
        """Record that it works: earlier lines that looked like an error did not matter."""
        self._telling = []

    def start(self, generation: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it, with vLLM's watchdog; a program that cannot be started counts as exited."""
        self.last, self.ended, self._terminated, self._telling = generation, "", False, []
        self._tail.clear()
        self._oom_kills = _count_oom_kills()
        environment = {**os.environ, **env, MARK: self._mark}
        # No folder of its own: the SSH user could not remove a folder of the container's user.
        folder = os.path.dirname(self.log)
        watchdog.remove_old(folder)
        self.argv = watchdog.add_option(argv, folder)
        # Logs of an engine that is gone would be read as this one's.
        for path in glob.glob(re.sub("%[hp]", "*", environment.get("NCCL_DEBUG_FILE", ""))):
            with contextlib.suppress(OSError):
                os.remove(path)
        self._append(f"{BEGINS} (generation {generation})\n".encode())
        try:
            self._process = children.spawn(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self.ended = f"cannot be started: {argv[0]}: {error.strerror}"
            self._append(f"vlaunch agent: {self.ended}\n".encode())
            return
        self.state = RUNNING
        self._reader = threading.Thread(target=self._log_output, args=(self._process,), daemon=True)
        self._reader.start()

    def stop(self, grace: float) -> None:
        """Begin to stop it, politely first, so that vLLM frees its resources; see `poll`."""
        process = self._process
        if self.state != RUNNING or process is None:
            return
        self.state, self._grace, self._kill_at = STOPPING, grace, time.monotonic() + grace
        # The first process ends the others; they get a signal only when it has gone.
        if process.returncode is None:
            kill([process.pid], signal.SIGTERM)
            kill([process.pid], signal.SIGCONT)  # a frozen one would never get the first

    def poll(self) -> None:
        """Notice its exit, and continue stopping it."""
        process = self._process
        if process is None:
            return
        code = process.poll()
        if code is not None and self.state == RUNNING:
            if self._reader:  # its last words; another holder of the pipe may be silent for long
                self._reader.join(0.2 if self._living_processes(process.pid) else _CATCH_UP)
            self.ended = _describe_exit(code)
            if code >= 0 and (match := _EXITS.search("\n".join([*self._telling, *self._tail]))):
                name, number = filter(None, match.groups())
                self.ended += f": its process {name} {_describe_exit(int(number))}"
            if _count_oom_kills() > self._oom_kills:
                self.ended += ": the kernel killed a process of this container for lack of memory"
            self._append(f"{ENDS}{self.ended}\n".encode())
            self.stop(self._grace)
        late = time.monotonic() >= self._kill_at
        if self.state != STOPPING or (code is None and not late):
            return
        remaining = self._living_processes(process.pid)
        if not remaining and code is not None:
            children.forget(process)
            self._process, self.state = None, IDLE
        elif late:
            kill(remaining)
        elif not self._terminated:
            self._terminated = True
            kill(remaining, signal.SIGTERM)

    @property
    def _mark(self) -> str:
        return mark_value(f"{self.name}.{self.last}")

    def _living_processes(self, session: int) -> list[int]:
        """Return its living processes, including those that have left the session."""
        own_session, variable = os.getsid(0), f"{MARK}={self._mark}"
        return [
            pid
            for pid, pid_session, _ in _processes()
            if pid_session == session
            or (pid_session != own_session and _has_variable(pid, variable))
        ]

    def _log_output(self, process: subprocess.Popen[bytes]) -> None:
        """Log the engine's output, as long as any process of it lives."""
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        descriptor, half = process.stdout.fileno(), b""
        while data := os.read(descriptor, 1 << 16):
            self._append(data)
            *lines, half = re.split(rb"[\r\n]+", half + data)
            half = half[-_WIDTH:]
            if process is self._process:
                for line in lines:
                    self._keep_line(line)
        self._keep_line(half)  # its last words
        process.stdout.close()

    def _keep_line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").strip()[:_WIDTH]
        if not line:
            return
        if not _NOISE.search(line):
            self._tail.append(line)
            if len(self._telling) < _LINES and cause.is_relevant(line, self._before):
                self._telling.append(line)
        self._before = line

    def _append(self, data: bytes) -> None:
        """Append to the log; a full disk must not stop the engine."""
        with contextlib.suppress(OSError):
            if os.path.exists(self.log) and os.path.getsize(self.log) > _LOG:
                os.replace(self.log, self.log + ".1")
            os.makedirs(os.path.dirname(self.log), exist_ok=True)
            with open(self.log, "ab") as file:
                file.write(data)


def is_alive(pid: int) -> bool:
    """False only for a process that is certainly gone."""
    return os.path.exists(f"/proc/{pid}")


def mark_value(suffix: str) -> str:
    """Return this agent's value of MARK: other agents may see the same processes."""
    return f"{os.getpid()}.{suffix}"


def find_marked(suffix: str) -> list[int]:
    """Return the processes with this mark in their environment."""
    return find_with_variable(f"{MARK}={mark_value(suffix)}")


def find_with_variable(variable: str) -> list[int]:
    """Return the processes whose environment has `NAME=value`."""
    return [pid for pid, *_ in _processes() if _has_variable(pid, variable)]


def stopped_processes(session: int | None, pids: Collection[int]) -> list[str]:
    """Return the PID and title of processes, by session or PID, that a signal has stopped."""
    return [
        f"process {pid} ({process_title(pid).strip()[:40]})"
        for pid, pid_session, is_stopped in _processes()
        if is_stopped and (pid_session == session or pid in pids)
    ]


def session_pids(session: int) -> list[int]:
    """Return the living processes of a session."""
    return [pid for pid, pid_session, _ in _processes() if pid_session == session]


def ray_workers(pids: Iterable[int]) -> list[int]:
    """Return those of some processes that still are workers of Ray: a PID may be reused."""
    return [pid for pid in pids if process_title(pid).startswith("ray::")]


def busy_ray_workers() -> list[int]:
    """Return Ray's workers with a task or actor, also those of batch jobs and their drivers."""
    titles = ((pid, process_title(pid)) for pid, *_ in _processes())
    return [pid for pid, title in titles if title.startswith("ray::") and "ray::IDLE" not in title]


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def process_title(pid: int) -> str:
    """Return a process's command line, or its own title."""
    return _read_proc(pid, "cmdline")[:200].replace(b"\0", b" ").decode(errors="replace")


def _processes() -> Iterator[tuple[int, int, bool]]:
    """Yield the PID and session of each process that is not a zombie, and if it is stopped."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        # state, parent, group, session: behind the name in brackets
        fields = _read_proc(int(name), "stat").rpartition(b")")[2].split()
        if len(fields) > 3 and fields[0] not in (b"Z", b"X"):
            yield int(name), int(fields[3]), fields[0] in (b"T", b"t")


def _has_variable(pid: int, variable: str) -> bool:
    return variable.encode() in _read_proc(pid, "environ").split(b"\0")


def _read_proc(pid: int, name: str) -> bytes:
    """Return a file of /proc; empty for a process that is gone, or is another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    hint = " (by hand, or for lack of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by {names.get(-code, f'signal {-code}')}{hint}"


def _count_oom_kills() -> int:
    """Return how many processes of this container the kernel has killed for lack of memory."""
    try:
        with open(_MEMORY_EVENTS, "rb") as file:
            match = _OOM_KILLS.search(file.read())
    except OSError:
        return 0
    return int(match[1]) if match else 0
