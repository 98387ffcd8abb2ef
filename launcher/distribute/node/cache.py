"""Page cache of a node during a copy: files of a model would displace all that others need.

Linux forgets pages that are on the disk when it is told so, and begins to write those that are not.
"""

from __future__ import annotations

import contextlib
import os
import time

from .source import AHEAD
from .store import Store

_EVERY = 1.0  # seconds


class Cache:
    """Has Linux forget what a copy has read and written: while it runs all but the last `AHEAD`
    bytes, which the next node may be fetching, and at its end all. Files of less than a chunk stay.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        manifest = store.manifest
        self._keep = max(16, AHEAD // manifest.chunk)
        self._done = 0  # how far in the order of arrival
        self._left = [len(manifest.chunks_of(at)) for at in range(len(manifest.files))]

    def follow(self) -> None:
        """Do so while the copy runs; in a thread of its own, for disks may be slow."""
        while True:
            time.sleep(_EVERY)
            self.look()

    def look(self) -> None:
        """Forget what arrived long ago."""
        upto = len(self._store.arrived) - self._keep
        ends: dict[int, int] = {}
        for number in self._store.arrived[self._done : max(0, upto)]:
            at, offset, size = self._store.manifest.place(number)
            ends[at] = max(ends.get(at, 0), offset + size)
            self._left[at] -= 1
        self._done = max(self._done, upto)
        for at, end in ends.items():
            if self._left[at] > 0:
                self._forget(at, end)
            else:
                self._forget(at)

    def forget(self) -> None:
        """Forget all."""
        for at in range(len(self._store.manifest.files)):
            self._forget(at)

    def _forget(self, at: int, end: int = 0) -> None:
        """Forget a file up to `end`, or, after it was written to the disk, all of it."""
        if self._store.manifest.files[at].size < self._store.manifest.chunk:
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self._store.path(at), os.O_RDONLY)
            try:
                if not end:
                    os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, end, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
