"""Reader of the source's files: reads each once, computes the digests of its chunks, and compares
it with its publisher's digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time

from .files import PublisherDigest
from .store import ChunkStore
from .wire import HAVE

READ_AHEAD = 256 * 2**20  # bytes read before they are served: few enough for the page cache
_FOLLOW_INTERVAL = 1.0  # seconds


class SourceAltered(Exception):
    """A file differs from its publisher's digest, or changed while it was read."""


class SourceReader:
    """Reader of the source's store. `alone`: no node fetches from it."""

    def __init__(self, store: ChunkStore, *, alone: bool = False) -> None:
        self._store, self._alone = store, alone
        self._buffer = memoryview(bytearray(store.manifest.chunk_size))

    def run(self) -> None:
        """Read all files; raises SourceAltered and OSError."""
        for index, file in enumerate(self._store.manifest.files):
            if not self._store.in_place[index]:
                raise SourceAltered(f"{file.name} is gone, or has another size")
            if not self._is_recorded(index):
                self._read_file(index)

    def _is_recorded(self, index: int) -> bool:
        states = self._store.states
        return all(states[number] == HAVE for number in self._store.manifest.file_chunks(index))

    def _read_file(self, index: int) -> None:
        store = self._store
        file, digest = store.manifest.files[index], PublisherDigest(store.manifest.files[index])
        with open(store.path(index), "rb", buffering=0) as source:
            before = os.fstat(source.fileno())
            for number in store.manifest.file_chunks(index):
                self._wait_for_room()
                view = self._buffer[: store.manifest.locate_chunk(number)[2]]
                self._fill(source.fileno(), view, file.name)
                digest.update(view)
                store.add_chunk(number, hashlib.sha256(view).digest())
            after = os.fstat(source.fileno())
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise SourceAltered(f"{file.name} changed while it was read")
        if digest.mismatch:
            raise SourceAltered(
                f"{file.name} is not what was published: its digest is not {file.digest[:12]}…"
            )

    def _fill(self, descriptor: int, view: memoryview, name: str) -> None:
        while view:
            count = os.readv(descriptor, [view])
            if not count:
                raise SourceAltered(f"{name} became shorter while it was read")
            view = view[count:]

    def _wait_for_room(self) -> None:
        store = self._store
        most = max(16, READ_AHEAD // store.manifest.chunk_size)
        with store.lock:
            while not self._alone and len(store.arrived) - store.read_position > most:
                store.reader_moved.wait(1.0)


class PageCache:
    """Removal of a copy's files from the page cache: while the copy runs all but the last
    READ_AHEAD bytes, which the next node may be fetching; at its end all. Files smaller than a
    chunk stay.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        manifest = store.manifest
        self._window = max(16, READ_AHEAD // manifest.chunk_size)
        self._done = 0  # position in the order of arrival
        indexes = range(len(manifest.files))
        self._chunks_left = [len(manifest.file_chunks(index)) for index in indexes]

    def follow(self) -> None:
        """Drop chunks while the copy runs; in a thread of its own, because disks may be slow."""
        while True:
            time.sleep(_FOLLOW_INTERVAL)
            self.forget_old()

    def forget_old(self) -> None:
        """Drop all but the most recent chunks."""
        limit = len(self._store.arrived) - self._window
        ends: dict[int, int] = {}
        for number in self._store.arrived[self._done : max(0, limit)]:
            index, offset, size = self._store.manifest.locate_chunk(number)
            ends[index] = max(ends.get(index, 0), offset + size)
            self._chunks_left[index] -= 1
        self._done = max(self._done, limit)
        for index, end in ends.items():
            if self._chunks_left[index] > 0:
                self._forget(index, end)
            else:
                self._forget(index)

    def forget_all(self) -> None:
        """Drop all files."""
        for index in range(len(self._store.manifest.files)):
            self._forget(index)

    def _forget(self, index: int, end: int = 0) -> None:
        """Drop a file up to `end`; without it the whole file, after a flush to the disk."""
        if self._store.manifest.files[index].size < self._store.manifest.chunk_size:
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self._store.path(index), os.O_RDONLY)
            try:
                if not end:
                    os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, end, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
