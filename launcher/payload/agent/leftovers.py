"""Shared memory that engines left behind: a killed one cannot remove its segments, and its
container lives on.

Only for a /dev/shm that is the container's own: of another's processes nobody here knows what they
have open. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time

_SHM = "/dev/shm"
_AGE = 60.0  # seconds; what is younger may be between its making and its first use


def sweep(folder: str = _SHM, age: float = _AGE) -> int:
    """Remove files that no living process has open or mapped; return how many bytes that freed."""
    used, freed, before = _used(folder), 0, time.time() - age
    with contextlib.suppress(OSError):
        for each in os.scandir(folder):
            with contextlib.suppress(OSError):
                found = each.stat(follow_symlinks=False)
                if (
                    each.is_file(follow_symlinks=False)
                    and found.st_mtime < before
                    and each.path not in used
                ):
                    os.remove(each.path)
                    freed += found.st_size
    return freed


def _used(folder: str) -> set[str]:
    """Return the files of a folder that some process has open or mapped."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{name}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"/proc/{name}/fd/{entry}"))
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{name}/maps", encoding="utf-8", errors="replace") as maps,
        ):
            for line in maps:
                _, at, path = line.rstrip("\n").partition(folder + "/")
                if at:
                    found.add(f"{folder}/{path}")
    return found
