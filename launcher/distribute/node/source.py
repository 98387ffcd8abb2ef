"""Reader of the node that has the files: reads each once, computes the digests of its chunks, and
compares it with its publisher's digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time

from .files import Sum
from .store import Store
from .wire import HAVE

READ_AHEAD = 256 * 2**20  # bytes read beyond what has been passed on: they are still in memory then
_FOLLOW_INTERVAL = 1.0  # seconds


class SourceAltered(Exception):
    """A file is not what was published, or changed while it was read."""


class SourceReader:
    """Reader of a store that is the source. `alone`: no node fetches from it."""

    def __init__(self, store: Store, *, alone: bool = False) -> None:
        self._store, self._alone = store, alone
        self._buffer = memoryview(bytearray(store.manifest.chunk))

    def run(self) -> None:
        """Read all files; raises Altered and OSError."""
        for at, file in enumerate(self._store.manifest.files):
            if not self._store.whole[at]:
                raise SourceAltered(f"{file.name} is gone, or has another size")
            if not self._is_recorded(at):
                self._read_file(at)

    def _is_recorded(self, at: int) -> bool:
        states = self._store.states
        return all(states[number] == HAVE for number in self._store.manifest.chunks_of(at))

    def _read_file(self, at: int) -> None:
        store = self._store
        file, total = store.manifest.files[at], Sum(store.manifest.files[at])
        with open(store.path(at), "rb", buffering=0) as source:
            before = os.fstat(source.fileno())
            for number in store.manifest.chunks_of(at):
                self._wait_for_room()
                view = self._buffer[: store.manifest.place(number)[2]]
                self._fill(source.fileno(), view, file.name)
                total.add(view)
                store.have(number, hashlib.sha256(view).digest())
            after = os.fstat(source.fileno())
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise SourceAltered(f"{file.name} changed while it was read")
        if total.wrong:
            raise SourceAltered(
                f"{file.name} is not what was published: its digest is not {file.sum[:12]}…"
            )

    def _fill(self, descriptor: int, view: memoryview, name: str) -> None:
        while view:
            count = os.readv(descriptor, [view])
            if not count:
                raise SourceAltered(f"{name} became shorter while it was read")
            view = view[count:]

    def _wait_for_room(self) -> None:
        store = self._store
        most = max(16, READ_AHEAD // store.manifest.chunk)
        with store.lock:
            while not self._alone and len(store.arrived) - store.passed > most:
                store.room.wait(1.0)


class PageCache:
    """Has Linux forget what a copy has read and written: while it runs all but the last `AHEAD`
    bytes, which the next node may be fetching, and at its end all. Files of less than a chunk stay.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        manifest = store.manifest
        self._window = max(16, READ_AHEAD // manifest.chunk)
        self._done = 0  # how far in the order of arrival
        self._chunks_left = [len(manifest.chunks_of(at)) for at in range(len(manifest.files))]

    def follow(self) -> None:
        """Do so while the copy runs; in a thread of its own, for disks may be slow."""
        while True:
            time.sleep(_FOLLOW_INTERVAL)
            self.forget_old()

    def forget_old(self) -> None:
        """Forget what arrived long ago."""
        upto = len(self._store.arrived) - self._window
        ends: dict[int, int] = {}
        for number in self._store.arrived[self._done : max(0, upto)]:
            at, offset, size = self._store.manifest.place(number)
            ends[at] = max(ends.get(at, 0), offset + size)
            self._chunks_left[at] -= 1
        self._done = max(self._done, upto)
        for at, end in ends.items():
            if self._chunks_left[at] > 0:
                self._forget(at, end)
            else:
                self._forget(at)

    def forget_all(self) -> None:
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
