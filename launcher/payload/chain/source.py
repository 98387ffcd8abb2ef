"""The node that has the files, or to which they are being downloaded: reads each once, from its
beginning to its end, and tells the digests of its chunks and whether it is what was published.
"""

from __future__ import annotations

import hashlib
import os
import time

from .files import Sum
from .store import Store
from .wire import HAVE

AHEAD = 256 * 2**20  # bytes read beyond what has been passed on: they are still in memory then
_LOOK = 0.3  # seconds between two looks at what is being downloaded


class Altered(Exception):
    """A file is not what was published, or changed while it was read."""


class Reader:
    """Reads the files of a store that is the source. `read` is the bytes so far.

    `growing`: a file that is not there yet will be; otherwise that is an error. `alone`: nobody
    will fetch anything.
    """

    def __init__(self, store: Store, *, growing: bool = False, alone: bool = False) -> None:
        self._store, self._growing, self._alone = store, growing, alone
        self._buffer = memoryview(bytearray(store.manifest.chunk))
        self.read = 0

    def run(self) -> None:
        """Read all files; raises Altered and OSError."""
        left = [at for at in range(len(self._store.manifest.files)) if not self._known(at)]
        while left:
            there = [at for at in left if self._is_there(at)]
            for at in there:
                self._file(at)
            left = [at for at in left if at not in set(there)]
            if left and not there:
                if not self._growing:
                    name = self._store.manifest.files[left[0]].name
                    raise Altered(f"{name} is gone, or has another size")
                time.sleep(_LOOK)

    def _known(self, at: int) -> bool:
        states = self._store.states
        return all(states[number] == HAVE for number in self._store.manifest.chunks_of(at))

    def _is_there(self, at: int) -> bool:
        store = self._store
        file = store.manifest.files[at]
        path = os.path.join(store.root, file.name)
        # Downloaders give a file its name when it is whole.
        store.whole[at] = os.path.isfile(path) and os.path.getsize(path) == file.size
        return store.whole[at]

    def _file(self, at: int) -> None:
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
                self.read += len(view)
            after = os.fstat(source.fileno())
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise Altered(f"{file.name} changed while it was read")
        if total.wrong:
            raise Altered(
                f"{file.name} is not what was published: its digest is not {file.sum[:12]}…"
            )

    def _fill(self, descriptor: int, view: memoryview, name: str) -> None:
        while view:
            count = os.readv(descriptor, [view])
            if not count:
                raise Altered(f"{name} became shorter while it was read")
            view = view[count:]

    def _wait_for_room(self) -> None:
        store = self._store
        most = max(16, AHEAD // store.manifest.chunk)
        with store.lock:
            while not self._alone and len(store.arrived) - store.passed > most:
                store.room.wait(1.0)
