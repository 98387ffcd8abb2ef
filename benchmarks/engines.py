"""The processes of servers' engines, seen from the machine that the practice hosts run on: found,
frozen, thawed.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

from launcher.agent.process import MARK
from launcher.lab import processes
from launcher.lab.layout import Host

# How Ray names the processes of vLLM's actors: they are Ray's children, and nothing tells whose
# server they belong to.
_RAY = re.compile(r"ray::\S*(?:RayWorker|EngineCore)")
_AGENT = "vlaunch_agent"


def of_server(hosts: Iterable[Host], name: str = "default") -> list[int]:
    """Return the processes of a server's engine on all hosts, by the machine's numbers; all that
    Ray runs counts as its own.
    """
    everything = [each.pid for host in hosts for each in processes.host_processes(host)]
    # By the session: vLLM's workers write their title over their environment.
    own = {
        session
        for pid in everything
        if _marked(pid, name) and (session := _session(pid)) is not None
    }
    return [
        pid for pid in everything if _session(pid) in own or _RAY.match(command_line(pid) or "")
    ]


def agent(host: Host) -> int | None:
    """Return the agent of a host's container, None when none runs."""
    # The first process of a container: only containers have a third level of numbers, the
    # machine's, the host's, their own.
    found = (
        each for each in processes.host_processes(host) if len(each.pids) > 2 and each.pids[-1] == 1
    )
    return next((each.pid for each in found if _AGENT in (command_line(each.pid) or "")), None)


def freeze(pids: Iterable[int]) -> None:
    """Stop processes where they are, as a debugger does."""
    for pid in pids:
        processes.send_signal(pid, signal.SIGSTOP)


def thaw(pids: Iterable[int]) -> None:
    """Let frozen processes go on; nothing happens to others."""
    for pid in pids:
        processes.send_signal(pid, signal.SIGCONT)


def command_line(pid: int) -> str | None:
    """Return the command line of a process, None when it has ended."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return None


def used(pid: int) -> float:
    """Return how many seconds of CPU a process has used, its threads' included.

    Raises OSError when it has gone.
    """
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Return the bytes of memory that a process holds. Raises OSError when it has gone."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _marked(pid: int, name: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    mark = next((word.decode() for word in words if word.startswith(f"{MARK}=".encode())), "")
    # As `process.mark` makes it: whose agent, the server's name, the generation.
    _, *found = mark.split(".")
    return len(found) == 2 and found[0] == name


def _session(pid: int) -> int | None:
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[3]
        )
    except (OSError, IndexError):
        return None
