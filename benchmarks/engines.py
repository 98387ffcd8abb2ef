"""Processes of servers' engines, as the machine of the lab hosts sees them: find, freeze, thaw."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

from launcher.agent.processes.process import MARK
from launcher.lab import processes
from launcher.lab.layout import Host

# Ray's names of vLLM's actor processes. They are Ray's children; nothing ties them to a server.
_RAY = re.compile(r"ray::\S*(?:RayWorker|EngineCore)")
_AGENT = "vlaunch_agent"


def find_engine_pids(hosts: Iterable[Host], name: str = "default") -> list[int]:
    """Return the pids of a server's engine on all hosts, as this machine counts them; includes
    every process of Ray's actors.
    """
    pids = [process.pid for host in hosts for process in processes.host_processes(host)]
    # Sessions identify the workers: vLLM overwrites their environment with their title.
    sessions = {
        session
        for pid in pids
        if _is_marked(pid, name) and (session := _session_id(pid)) is not None
    }
    return [
        pid for pid in pids if _session_id(pid) in sessions or _RAY.match(command_line(pid) or "")
    ]


def find_agent(host: Host) -> int | None:
    """Return the pid of the agent in a host's container, None when none runs."""
    # The first process of a container. Only containers have a third level of pids: the machine's,
    # the host's, their own.
    first_processes = (
        process
        for process in processes.host_processes(host)
        if len(process.pids) > 2 and process.pids[-1] == 1
    )
    return next(
        (process.pid for process in first_processes if _AGENT in (command_line(process.pid) or "")),
        None,
    )


def freeze(pids: Iterable[int]) -> None:
    """Stop processes, as a debugger does."""
    for pid in pids:
        processes.send_signal(pid, signal.SIGSTOP)


def thaw(pids: Iterable[int]) -> None:
    """Continue frozen processes; others do not change."""
    for pid in pids:
        processes.send_signal(pid, signal.SIGCONT)


def command_line(pid: int) -> str | None:
    """Return the command line of a process, None when it has exited."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return None


def read_cpu_seconds(pid: int) -> float:
    """Return the seconds of CPU that a process has used, with its threads. Raises OSError when it
    has exited.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes. Raises OSError when it has exited."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _is_marked(pid: int, name: str) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    mark = next(
        (variable.decode() for variable in variables if variable.startswith(f"{MARK}=".encode())),
        "",
    )
    # `process.mark` joins the agent, the server's name and the generation.
    _, *parts = mark.split(".")
    return len(parts) == 2 and parts[0] == name


def _session_id(pid: int) -> int | None:
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[3]
        )
    except (OSError, IndexError):
        return None
