"""Let a practice host's containers run out of memory, by the kernel's own accounts (control
groups).
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import VlaunchError
from launcher.lab.layout import Host

# where the kernel accounts memory apart from the rest (cgroup v1)
_APART = Path("/sys/fs/cgroup/memory")
_UNIFIED = Path("/sys/fs/cgroup")


def squeeze(
    host: Host, *, spare: int = 64 << 20, hog: int = 512 << 20, seconds: float = 8.0
) -> int | None:
    """Leave a host's containers `spare` bytes of memory, and let a program beside them take `hog`
    bytes for a while.

    The kernel then ends processes. Returns how many, but for those whose container has ended with
    them; None where this machine does not account the containers' memory.
    """
    group = _group(host)
    if group is None:
        return None
    folder, limit, unlimited, held, killed = group
    own = folder / "hog"  # a group that has groups may hold no process of its own in cgroup v2
    own.mkdir(exist_ok=True)
    before = _kills(folder, killed)
    take = f"[bytearray(b'x' * (1 << 20)) for _ in range({hog >> 20})]"
    program = f"import time; time.sleep(0.5); held = {take}; time.sleep({seconds})"
    try:
        _limit(folder, limit, held, spare)
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
        # the group of a process that has just ended stays busy for a moment; `lab down` removes it
        with suppress(OSError):
            own.rmdir()
    return max(0, _kills(folder, killed) - before)


def relieve(host: Host) -> None:
    """Lift the limit of a `squeeze` that was cut off."""
    if (group := _group(host)) is not None:
        folder, limit, unlimited, _, _ = group
        (folder / limit).write_text(unlimited)


def _limit(folder: Path, limit: str, held: str, spare: int) -> None:
    """Limit a group to what it holds and `spare` bytes; more when the kernel cannot get it down to
    that (cgroup v1).
    """
    for factor in (1, 2, 4):
        try:
            (folder / limit).write_text(str(_count(folder / "memory.stat", held) + factor * spare))
        except OSError as error:
            refused = error
        else:
            return
    raise VlaunchError(f"the memory of `{folder}` cannot be limited: {refused.strerror}")


def _group(host: Host) -> tuple[Path, str, str, str, str] | None:
    """Return the control group of a host's containers, and what limit, no limit, use and kills are
    called there.
    """
    old, new = _APART / host.lab / host.name, _UNIFIED / host.lab / host.name
    if (old / "memory.limit_in_bytes").exists():
        return old, "memory.limit_in_bytes", "-1", "total_rss", "memory.oom_control"
    if (new / "memory.max").exists():
        return new, "memory.max", "max", "anon", "memory.events"
    return None


def _kills(folder: Path, name: str) -> int:
    # each group counts its own
    return sum(_count(Path(path) / name, "oom_kill") for path, _, _ in os.walk(folder))


def _count(path: Path, name: str) -> int:
    try:
        words = path.read_text().split()
    except OSError:  # the group of a container that has just ended
        return 0
    return int(words[words.index(name) + 1]) if name in words else 0
