"""Shared memory left behind by killed engines, which cannot remove their segments.

For a /dev/shm that belongs to this container alone: in a shared one, files that processes outside
the container have open would look unused.
"""

from __future__ import annotations

import contextlib
import os
import time

_SHM = "/dev/shm"
_MIN_AGE = 60.0  # seconds; a younger file may be between its creation and its first use


def remove_leftovers(folder: str = _SHM, min_age: float = _MIN_AGE) -> None:
    """Remove files that no living process has open or mapped."""
    used, before = _used_files(folder), time.time() - min_age
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                file = entry.stat(follow_symlinks=False)
                old = entry.is_file(follow_symlinks=False) and file.st_mtime < before
                if old and entry.path not in used:
                    os.remove(entry.path)


def _used_files(folder: str) -> set[str]:
    """Return the files of a folder that a process has open or mapped."""
    used = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    used.add(os.readlink(entry.path))
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
            paths = (line.rstrip("\n").partition(f"{folder}/")[2] for line in maps)
            used |= {f"{folder}/{path}" for path in paths if path}
    return used
