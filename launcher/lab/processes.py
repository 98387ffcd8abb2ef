"""Processes of lab hosts, identified by their environment and namespaces."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.lab import layout, machine
from launcher.lab.layout import Host

_PROC = Path("/proc")
_NETNS = Path("/run/netns")
_SETTLED = "sleep"  # the program that `host.sh` finally executes


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Process as seen from the machine."""

    pid: int
    name: str
    marker: str  # "VLAUNCH_LAB=name/host", or empty
    netns: int  # inode of its network namespace
    pids: tuple[int, ...]  # its process ids, from the outermost to the innermost namespace

    @property
    def is_init(self) -> bool:
        """True for the init process of a host; those of containers have no marker."""
        return bool(self.marker) and len(self.pids) > 1 and self.pids[-1] == 1


def init_pid(host: Host) -> int | None:
    """Return the process id of a host's init process; None when the host is off."""
    return next((p.pid for p in _all_processes() if p.marker == host.marker and p.is_init), None)


def is_booted(host: Host) -> bool:
    """Return True if a host's init process runs its final program; an earlier exec(2) can hide it
    from `init_pid`.
    """
    return any(
        p.marker == host.marker and p.is_init and p.name == _SETTLED for p in _all_processes()
    )


def lab_processes(name: str) -> list[Process]:
    """Return all processes with a lab's marker or in the network of one of its hosts."""
    networks = set(_network_inodes(name))
    marker_prefix = layout.marker(name)
    return [
        p for p in _all_processes() if p.marker.startswith(marker_prefix) or p.netns in networks
    ]


def host_processes(host: Host) -> list[Process]:
    """Return all processes of a host, including those of containers."""
    try:
        inode = (_NETNS / host.netns).stat().st_ino
    except OSError:
        inode = -1
    return [p for p in _all_processes() if p.marker == host.marker or p.netns == inode]


def kill_processes(processes: list[Process], *, timeout: float = 30.0) -> None:
    """Kill processes and wait until they are gone; killing init kills the whole host."""
    for process in sorted(processes, key=lambda p: not p.is_init):
        send_signal(process.pid, signal.SIGKILL)
    pids = [process.pid for process in processes]
    machine.await_true(
        lambda: not any(_is_alive(pid) for pid in pids),
        what="the exit of the hosts' processes",
        timeout=timeout,
    )


def send_signal(pid: int, signal_number: signal.Signals) -> None:
    """Send a signal to a process, if it still exists."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return


def _is_alive(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _network_inodes(name: str) -> Iterator[int]:
    for path in _NETNS.glob(f"{name}-*"):
        with suppress(OSError):
            if layout.is_netns(path.name, name):
                yield path.stat().st_ino


def _all_processes() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (process := _read_process(entry)) is not None:
            yield process


def _read_process(directory: Path) -> Process | None:
    try:
        # The name first: exec(2) briefly empties the environment before it sets the new name.
        status = (directory / "status").read_text()
        environment = (directory / "environ").read_bytes()
        netns = (directory / "ns/net").stat().st_ino
    except OSError:
        return None
    marker = next(
        (entry for entry in environment.split(b"\0") if entry.startswith(b"VLAUNCH_LAB=")), b""
    )
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return Process(
        pid=int(directory.name),
        name=fields["Name"].strip(),
        marker=marker.decode(errors="replace"),
        netns=netns,
        pids=tuple(int(pid) for pid in fields.get("NSpid", directory.name).split()),
    )


def memory(pid: int) -> int:
    """Return the private memory of a process in bytes; 0 if it has exited."""
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    private = (line.split()[1] for line in text.splitlines() if line.startswith("Private_"))
    return sum(int(kilobytes) * 1024 for kilobytes in private)
