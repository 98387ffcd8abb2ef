"""Fault injection: let a lab host's containers run out of memory, with control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import VlaunchError
from launcher.lab.layout import Host

# the separate memory hierarchy of cgroup v1
_APART = Path("/sys/fs/cgroup/memory")
_UNIFIED = Path("/sys/fs/cgroup")


def squeeze(
    host: Host, *, spare: int = 64 << 20, hog: int = 512 << 20, seconds: float = 8.0
) -> int | None:
    """Leave a host's containers `spare` bytes of memory while another program takes `hog` bytes.

    The kernel then kills processes. Returns their number, without those whose container exited with
    them; None where this machine does not account the containers' memory.
    """
    group = _group(host)
    if group is None:
        return None
    folder, limit, unlimited, used, killed = group
    own = folder / "hog"  # in cgroup v2, a group with subgroups may contain no process
    own.mkdir(exist_ok=True)
    before = _kills(folder, killed)
    blocks = f"[bytearray(b'x' * (1 << 20)) for _ in range({hog >> 20})]"
    program = f"import time; time.sleep(0.5); blocks = {blocks}; time.sleep({seconds})"
    try:
        _limit(folder, limit, used, spare)
        with subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.DEVNULL
        ) as process:
            try:
                with suppress(ProcessLookupError):
                    (own / "cgroup.procs").write_text(str(process.pid))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=seconds + 10)
            finally:
                process.kill()
    finally:
        (folder / limit).write_text(unlimited)
        # the group stays busy for a moment after its process exits; `lab down` removes it
        with suppress(OSError):
            own.rmdir()
    return max(0, _kills(folder, killed) - before)


def relieve(host: Host) -> None:
    """Remove the limit of an interrupted `squeeze`."""
    if (group := _group(host)) is not None:
        folder, limit, unlimited, _, _ = group
        (folder / limit).write_text(unlimited)


def _limit(folder: Path, limit: str, used: str, spare: int) -> None:
    """Limit a group to its current use plus `spare` bytes; more when the kernel cannot reclaim
    enough (cgroup v1).
    """
    for factor in (1, 2, 4):
        try:
            (folder / limit).write_text(str(_count(folder / "memory.stat", used) + factor * spare))
        except OSError as error:
            refused = error
        else:
            return
    raise VlaunchError(f"the memory of `{folder}` cannot be limited: {refused.strerror}")


def _group(host: Host) -> tuple[Path, str, str, str, str] | None:
    """Return the control group of a host's containers, and its names of the limit, of no limit, of
    use and of kills.
    """
    old, new = _APART / host.lab / host.name, _UNIFIED / host.lab / host.name
    if (old / "memory.limit_in_bytes").exists():
        return old, "memory.limit_in_bytes", "-1", "total_rss", "memory.oom_control"
    if (new / "memory.max").exists():
        return new, "memory.max", "max", "anon", "memory.events"
    return None


def _kills(folder: Path, name: str) -> int:
    # each group counts only its own
    return sum(_count(Path(path) / name, "oom_kill") for path, _, _ in os.walk(folder))


def _count(path: Path, name: str) -> int:
    try:
        fields = path.read_text().split()
    except OSError:  # the container has just exited
        return 0
    return int(fields[fields.index(name) + 1]) if name in fields else 0
