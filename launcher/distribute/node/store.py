"""Chunks of a copy on one node: their states, their bytes on the disk, and a journal with which an
interrupted copy continues.

Chunks are written into parts below `.vlaunch`, and a journal names those that were. What it names,
and what lay there before, counts only once it has been compared with the source's digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Iterator

from .files import STATE, Manifest, below, open_plain, state_folder
from .record import Known
from .wire import HAVE, PROVE, WANT


class ChunkStore:
    """The chunks of one node. `arrived` is the numbers of those that can be served, as they came.

    Whoever waits for one of the `streams` waits at `ready`: many are woken too often where all wait
    for the same. Raises OSError for what the disk refuses, and Unsafe.
    """

    def __init__(self, root: str, manifest: Manifest, known: Known, streams: int = 1) -> None:
        self.root, self.manifest = root, manifest
        self.states = bytearray([WANT]) * manifest.chunks
        self.digests = bytearray(32 * manifest.chunks)
        self.arrived: list[int] = []
        self.read_position = 0  # how far in `arrived` the foremost reader is
        self.lock = threading.Lock()
        self._conditions = [threading.Condition(self.lock) for _ in range(streams)]
        self.reader_moved = threading.Condition(self.lock)  # `passed` has moved
        self.present_bytes = 0  # of chunks that are there
        self.received = self.sent = 0
        self._records = known
        self._journal = -1
        # Whether a file lies under its own name, or is a part.
        self.in_place = [self._is_stored(at) for at in range(len(manifest.files))]

    def load_state(self, *, source: bool) -> None:
        """Look at what lies there already. A source is believed; whatever is elsewhere has to be
        compared, unless its name is its digest and it was compared before.
        """
        for at, file in enumerate(self.manifest.files):
            if not self.in_place[at]:
                continue
            digests = self._records.digests(file, self.path(at), self.manifest.chunk)
            for number, digest in enumerate(digests, self.manifest.first[at]):
                self._set_digest(number, digest)
                if source or file.sum:
                    self._set_present(number)
            if not source and not (digests and file.sum):
                self._set_states(at, PROVE)
        if not source:
            self._resume()

    def _is_stored(self, at: int) -> bool:
        path = below(self.root, self.manifest.files[at].name)
        try:
            now = os.stat(path)
        except OSError:
            return False
        return stat.S_ISREG(now.st_mode) and now.st_size == self.manifest.files[at].size

    def path(self, at: int) -> str:
        """Return where a file's bytes lie now."""
        if self.in_place[at]:
            return below(self.root, self.manifest.files[at].name)
        return os.path.join(self.root, STATE, "parts", str(at))

    def stream_condition(self, number: int) -> threading.Condition:
        """Return where to wait for a chunk, or for those of a stream by its number."""
        return self._conditions[number % len(self._conditions)]

    def count_missing(self, stream: int, streams: int) -> int:
        """Return how many chunks of a stream are not there yet."""
        return len(range(stream, self.manifest.chunks, streams)) - self.states[
            stream::streams
        ].count(HAVE)

    def is_complete(self) -> bool:
        """True when all chunks are there."""
        return self.states.count(HAVE) == self.manifest.chunks

    def digest(self, number: int) -> bytes:
        """Return what is known of a chunk's digest; zeros where nothing is."""
        return bytes(self.digests[32 * number : 32 * number + 32])

    def add_chunk(self, number: int, digest: bytes) -> None:
        """A chunk is there, as the digest says."""
        with self.lock:
            self._set_digest(number, digest)
            self._set_present(number)
            self.stream_condition(number).notify_all()

    def write_chunk(self, number: int, data: memoryview, digest: bytes, hand: FileHandle) -> None:
        """Keep a chunk whose digest was right."""
        at, offset, _ = self.manifest.place(number)
        if self.in_place[at]:
            self._refetch_file(at)
        descriptor = hand.open(at, write=True)
        while data:
            count = os.pwrite(descriptor, data, offset)
            data, offset = data[count:], offset + count
        if self._journal < 0:
            self._begin_journal()
        os.write(self._journal, b"%d\n" % number)
        self.add_chunk(number, digest)

    def verify_chunk(
        self, number: int, digest: bytes, hand: FileHandle, buffer: memoryview
    ) -> bool:
        """Compare bytes that lie here with a digest; what differs is wanted from now on."""
        at, _, _ = self.manifest.place(number)
        if self.states[number] != PROVE:  # another chunk has shown that the file is another one
            return False
        if self.digest(number) == digest or self._read_digest(number, hand, buffer) == digest:
            return self._accept_chunk(number, digest)
        if self.in_place[at]:
            self._refetch_file(at)
        with self.lock:
            self.states[number] = WANT
        return False

    def _accept_chunk(self, number: int, digest: bytes) -> bool:
        """A chunk that lies here counts, unless its file has turned out to be another one."""
        with self.lock:
            if self.states[number] != PROVE:
                return False
            self._set_digest(number, digest)
            self._set_present(number)
            self.stream_condition(number).notify_all()
        return True

    def _read_digest(self, number: int, hand: FileHandle, buffer: memoryview) -> bytes:
        """Return the digest of the bytes that lie here."""
        at, offset, size = self.manifest.place(number)
        try:
            count = os.preadv(hand.open(at), [buffer[:size]], offset)
        except FileNotFoundError:
            return b""
        return hashlib.sha256(buffer[:count]).digest()

    def recheck_chunk(self, number: int) -> bool:
        """Read a chunk again, of which somebody has got other bytes; True when they are right."""
        if not 0 <= number < self.manifest.chunks or self.states[number] != HAVE:
            return True
        hand, buffer = FileHandle(self), memoryview(bytearray(self.manifest.chunk))
        try:
            return self._read_digest(number, hand, buffer) == self.digest(number)
        finally:
            hand.close()

    def root_digest(self) -> str:
        """Return the digest over all digests: equal for copies that are equal."""
        return hashlib.sha256(self.digests).hexdigest()

    def _refetch_file(self, at: int) -> None:
        """A file that lies here is another one: all of it is fetched into a part."""
        with self.lock:
            if not self.in_place[at]:
                return
            self.in_place[at] = False
            for number in self.manifest.chunks_of(at):
                if self.states[number] == HAVE:
                    self.present_bytes -= self.manifest.place(number)[2]
                self.states[number] = WANT
                self.digests[32 * number : 32 * number + 32] = bytes(32)

    def _set_digest(self, number: int, digest: bytes) -> None:
        self.digests[32 * number : 32 * number + 32] = digest

    def _set_present(self, number: int) -> None:
        if self.states[number] != HAVE:
            self.states[number] = HAVE
            self.present_bytes += self.manifest.place(number)[2]
            self.arrived.append(number)

    def _set_states(self, at: int, state: int) -> None:
        for number in self.manifest.chunks_of(at):
            self.states[number] = state

    def _resume(self) -> None:
        """Have what an interrupted copy of the same files wrote compared, and drop any other's."""
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
            number = int(line) if line.isdigit() else self.manifest.chunks
            if number >= self.manifest.chunks:
                continue  # a line that was cut off, or damaged
            at, _, _ = self.manifest.place(number)
            if not self.in_place[at] and os.path.isfile(self.path(at)):
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
                os.write(descriptor, b"\n")  # ends a line that was cut off
            self._journal = descriptor


class FileHandle:
    """One thread's open file: the descriptor of no other thread is closed under it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._at: tuple[int, bool, bool] | None = None
        self._descriptor = -1

    def open(self, at: int, *, write: bool = False) -> int:
        """Return a descriptor of a file, as it lies now; a part is made when it is written."""
        wanted = (at, write, self._store.whole[at])
        if wanted != self._at:
            self.close()
            path = self._store.path(at)
            if write:
                state_folder(self._store.root, "parts")
                self._descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
                os.ftruncate(self._descriptor, self._store.manifest.files[at].size)
            else:
                self._descriptor = os.open(path, os.O_RDONLY)
            self._at = wanted
        return self._descriptor

    def close(self) -> None:
        """Close what is open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._at, self._descriptor = None, -1


def discard_parts(root: str) -> int:
    """Remove what an unfinished copy left, and return how many bytes that were."""
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
        for each in parts:
            yield each.path
