"""This process, told from all others that ever were, so that a later one on this machine can say
that it is dead.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def own() -> str:
    """Return what tells this process from all others; empty where the system does not say
    enough.
    """
    place = _place()
    return f"{place}:{os.getpid()}:{_start(os.getpid())}" if place else ""


def dead(text: str) -> bool:
    """Return True when `text`, from `own`, is about this machine, since its last start, and that
    process is no more.

    Of other machines, and of other containers of this one, nothing is known.
    """
    place, _, rest = text.rpartition(":")[0].rpartition(":")
    started = text.rpartition(":")[2]
    if not place or place != _place() or not rest.isascii() or not rest.isdigit():
        return False
    return _start(int(rest)) != started


def _place() -> str:
    """Return the machine's present run, and which processes are seen: a container sees others than
    its host.

    Where other users' processes are hidden (`hidepid` of /proc) one that lives would pass for a
    dead one: nothing is known.
    """
    try:
        (_PROC / "1/stat").read_bytes()
        run = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{run}:{(_PROC / 'self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return ""


def _start(pid: int) -> str:
    """Return when a process began, in ticks since the machine did (proc(5)); empty when there is
    none.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return rest[19] if len(rest) > 19 and rest[0] not in ("Z", "X") else ""
