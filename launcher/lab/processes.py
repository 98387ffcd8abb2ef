"""Find and end what runs on practice hosts, told by what the kernel knows of each process:
environment and namespaces.
"""

from __future__ import annotations

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
_SETTLED = "sleep"  # the last program that `host.sh` becomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as the machine sees it."""

    pid: int
    name: str
    marker: str  # "VLAUNCH_LAB=name/host", or "" when it has none
    netns: int  # the inode that names its network namespace
    pids: tuple[int, ...]  # its process ids, from the machine's view down to its own

    @property
    def is_init(self) -> bool:
        """True for the first process of a host: containers' first processes carry no marker."""
        return bool(self.marker) and len(self.pids) > 1 and self.pids[-1] == 1


def init_of(host: Host) -> int | None:
    """Return the process id of a host's first process, None when the host is off."""
    return next((p.pid for p in _all() if p.marker == host.marker and p.is_init), None)


def booted(host: Host) -> bool:
    """Tell whether a host's first process has become what it stays: before that, an exec(2) can
    hide it from `init_of`.
    """
    return any(p.marker == host.marker and p.is_init and p.name == _SETTLED for p in _all())


def of_lab(name: str) -> list[Process]:
    """Return every process of a lab: started for it, or in the network of one of its hosts."""
    networks = set(_network_inodes(name))
    wanted = layout.marker(name)
    return [p for p in _all() if p.marker.startswith(wanted) or p.netns in networks]


def on_host(host: Host) -> list[Process]:
    """Return every process in a host's network, containers included."""
    try:
        inode = (_NETNS / host.netns).stat().st_ino
    except OSError:
        inode = -1
    return [p for p in _all() if p.marker == host.marker or p.netns == inode]


def end(processes: list[Process], *, timeout: float = 30.0) -> None:
    """Kill processes and wait until they are gone; a host's first process takes all of the host
    with it.
    """
    for process in sorted(processes, key=lambda p: not p.is_init):
        kill(process.pid, signal.SIGKILL)
    pids = [process.pid for process in processes]
    machine.await_true(
        lambda: not any(_alive(pid) for pid in pids),
        what="the end of the hosts' processes",
        timeout=timeout,
    )


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have gone meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _alive(pid: int) -> bool:
    """Tell whether a process still runs; one that only waits to be buried does not."""
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


def _all() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (process := _read(entry)) is not None:
            yield process


def _read(entry: Path) -> Process | None:
    try:
        # The name first: a program that has its new name and an environment is past exec(2), which
        # empties it for a moment.
        status = (entry / "status").read_text()
        environment = (entry / "environ").read_bytes()
        netns = (entry / "ns/net").stat().st_ino
    except OSError:
        return None
    marker = next(
        (word for word in environment.split(b"\0") if word.startswith(b"VLAUNCH_LAB=")), b""
    )
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return Process(
        pid=int(entry.name),
        name=fields["Name"].strip(),
        marker=marker.decode(errors="replace"),
        netns=netns,
        pids=tuple(int(pid) for pid in fields.get("NSpid", entry.name).split()),
    )


def memory(pid: int) -> int:
    """Return the bytes of memory that a process shares with no other, 0 when it has gone."""
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    private = (line.split()[1] for line in text.splitlines() if line.startswith("Private_"))
    return sum(int(kilobytes) * 1024 for kilobytes in private)
