"""Chunks of a copy on one node: their states, their bytes on the disk, and a journal from which an
interrupted copy resumes.

Chunks are written into parts below `.vlaunch`, and a journal lists them. These and the chunks of
earlier files count only after a comparison with the source's digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Iterator

from .files import STATE, CopyManifest, open_plain, safe_path, state_folder
from .record import DigestRecords
from .wire import HAVE, PROVE, WANT


class ChunkStore:
    """The chunks of one node; `arrived` lists those that can be served, in order of arrival.

    Each of the `streams` has a condition of its own, because a shared one would wake all waiting
    threads for each chunk. Raises UnsafeName, and OSError of the disk.
    """

    def __init__(
        self, root: str, manifest: CopyManifest, records: DigestRecords, streams: int = 1
    ) -> None:
        self.root, self.manifest = root, manifest
        self.states = bytearray([WANT]) * manifest.chunk_count
        self.digests = bytearray(32 * manifest.chunk_count)
        self.arrived: list[int] = []
        self.read_position = 0  # position of the foremost reader in `arrived`
        self.lock = threading.Lock()
        self._conditions = [threading.Condition(self.lock) for _ in range(streams)]
        self.reader_moved = threading.Condition(self.lock)  # `read_position` has changed
        self.present_bytes = 0  # of all present chunks
        self.received = self.sent = 0
        self._records = records
        self._journal = -1
        # True: a file under its final name; False: a part.
        self.in_place = [self._is_stored(index) for index in range(len(manifest.files))]

    def load_state(self, *, source: bool) -> None:
        """Set the states of existing chunks. A source's files are trusted; others must be compared,
        unless the file is named by its digest and was compared before.
        """
        for index, file in enumerate(self.manifest.files):
            if not self.in_place[index]:
                continue
            digests = self._records.find_digests(file, self.path(index), self.manifest.chunk_size)
            for number, digest in enumerate(digests, self.manifest.first_chunks[index]):
                self._set_digest(number, digest)
                if source or file.digest:
                    self._set_present(number)
            if not source and not (digests and file.digest):
                self._set_states(index, PROVE)
        if not source:
            self._resume()

    def _is_stored(self, index: int) -> bool:
        path = safe_path(self.root, self.manifest.files[index].name)
        try:
            status = os.stat(path)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self.manifest.files[index].size

    def path(self, index: int) -> str:
        """Return the current path of a file's bytes."""
        if self.in_place[index]:
            return safe_path(self.root, self.manifest.files[index].name)
        return os.path.join(self.root, STATE, "parts", str(index))

    def stream_condition(self, number: int) -> threading.Condition:
        """Return the condition of a chunk's stream, or of the stream with this number."""
        return self._conditions[number % len(self._conditions)]

    def count_missing(self, stream: int, streams: int) -> int:
        """Count the missing chunks of a stream."""
        states = self.states[stream::streams]
        return len(states) - states.count(HAVE)

    def is_complete(self) -> bool:
        """True when all chunks are present."""
        return self.states.count(HAVE) == self.manifest.chunk_count

    def digest(self, number: int) -> bytes:
        """Return a chunk's digest; zeros where unknown."""
        return bytes(self.digests[32 * number : 32 * number + 32])

    def add_chunk(self, number: int, digest: bytes) -> None:
        """Add a chunk that matches its digest."""
        with self.lock:
            self._set_digest(number, digest)
            self._set_present(number)
            self.stream_condition(number).notify_all()

    def write_chunk(self, number: int, data: memoryview, digest: bytes, handle: FileHandle) -> None:
        """Write a chunk that matches its digest."""
        index, offset, _ = self.manifest.locate_chunk(number)
        if self.in_place[index]:
            self._refetch_file(index)
        descriptor = handle.open(index, write=True)
        while data:
            count = os.pwrite(descriptor, data, offset)
            data, offset = data[count:], offset + count
        if self._journal < 0:
            self._begin_journal()
        os.write(self._journal, b"%d\n" % number)
        self.add_chunk(number, digest)

    def verify_chunk(
        self, number: int, digest: bytes, handle: FileHandle, buffer: memoryview
    ) -> bool:
        """Compare a chunk on the disk with the source's digest; a different one becomes missing."""
        index, _, _ = self.manifest.locate_chunk(number)
        if self.states[number] != PROVE:  # a different chunk has reset the whole file
            return False
        if self.digest(number) == digest or self._read_digest(number, handle, buffer) == digest:
            return self._accept_chunk(number, digest)
        if self.in_place[index]:
            self._refetch_file(index)
        with self.lock:
            self.states[number] = WANT
        return False

    def _accept_chunk(self, number: int, digest: bytes) -> bool:
        """Add a chunk of the disk, unless a different one has reset its file."""
        with self.lock:
            if self.states[number] != PROVE:
                return False
            self._set_digest(number, digest)
            self._set_present(number)
            self.stream_condition(number).notify_all()
        return True

    def _read_digest(self, number: int, handle: FileHandle, buffer: memoryview) -> bytes:
        """Return the digest of a chunk on the disk."""
        index, offset, size = self.manifest.locate_chunk(number)
        try:
            count = os.preadv(handle.open(index), [buffer[:size]], offset)
        except FileNotFoundError:
            return b""
        return hashlib.sha256(buffer[:count]).digest()

    def recheck_chunk(self, number: int) -> bool:
        """Read a chunk again; True when it matches its digest."""
        if not 0 <= number < self.manifest.chunk_count or self.states[number] != HAVE:
            return True
        handle, buffer = FileHandle(self), memoryview(bytearray(self.manifest.chunk_size))
        try:
            return self._read_digest(number, handle, buffer) == self.digest(number)
        finally:
            handle.close()

    def root_digest(self) -> str:
        """Return the digest of all digests: equal for equal copies."""
        return hashlib.sha256(self.digests).hexdigest()

    def _refetch_file(self, index: int) -> None:
        """Have a file with a different chunk fetched completely, into a part."""
        with self.lock:
            if not self.in_place[index]:
                return
            self.in_place[index] = False
            for number in self.manifest.file_chunks(index):
                if self.states[number] == HAVE:
                    self.present_bytes -= self.manifest.locate_chunk(number)[2]
                self.states[number] = WANT
                self.digests[32 * number : 32 * number + 32] = bytes(32)

    def _set_digest(self, number: int, digest: bytes) -> None:
        self.digests[32 * number : 32 * number + 32] = digest

    def _set_present(self, number: int) -> None:
        if self.states[number] != HAVE:
            self.states[number] = HAVE
            self.present_bytes += self.manifest.locate_chunk(number)[2]
            self.arrived.append(number)

    def _set_states(self, index: int, state: int) -> None:
        for number in self.manifest.file_chunks(index):
            self.states[number] = state

    def _resume(self) -> None:
        """Have the chunks of an interrupted copy of these files compared; discard other copies'."""
        journal = os.path.join(self.root, STATE, "journal")
        written: list[bytes] = []
        try:
            with open(open_plain(journal, os.O_RDONLY), "rb") as file:
                written = file.read().split(b"\n")
        except FileNotFoundError:
            pass
        if not written or written[0] != self.manifest.identity.encode():
            discard_parts(self.root)
            return
        for line in written[1:]:
            number = int(line) if line.isdigit() else self.manifest.chunk_count
            if number >= self.manifest.chunk_count:
                continue  # an incomplete or damaged line
            index, _, _ = self.manifest.locate_chunk(number)
            if not self.in_place[index] and os.path.isfile(self.path(index)):
                self.states[number] = PROVE

    def _begin_journal(self) -> None:
        with self.lock:
            if self._journal >= 0:
                return
            path = os.path.join(self.root, STATE, "journal")
            descriptor = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            if os.fstat(descriptor).st_size == 0:
                os.write(descriptor, self.manifest.identity.encode() + b"\n")
            else:
                os.write(descriptor, b"\n")  # ends an incomplete line
            self._journal = descriptor


class FileHandle:
    """Open file of one thread, which no other thread closes."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._at: tuple[int, bool, bool] | None = None
        self._descriptor = -1

    def open(self, index: int, *, write: bool = False) -> int:
        """Return a descriptor of a file at its current path; `write` creates a part."""
        target = (index, write, self._store.in_place[index])
        if target != self._at:
            self.close()
            path = self._store.path(index)
            if write:
                state_folder(self._store.root, "parts")
                self._descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
                os.ftruncate(self._descriptor, self._store.manifest.files[index].size)
            else:
                self._descriptor = os.open(path, os.O_RDONLY)
            self._at = target
        return self._descriptor

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._at, self._descriptor = None, -1


def discard_parts(root: str) -> int:
    """Remove the parts of an incomplete copy, and return the freed bytes."""
    state = os.path.join(root, STATE)
    freed = 0
    for path in list(_leftover_paths(state)):
        with contextlib.suppress(FileNotFoundError):
            freed += os.stat(path).st_blocks * 512
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.join(state, "parts"))
    return freed


def _leftover_paths(state: str) -> Iterator[str]:
    yield os.path.join(state, "journal")
    with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(state, "parts")) as parts:
        for part in parts:
            yield part.path
