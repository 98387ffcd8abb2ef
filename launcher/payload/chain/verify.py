"""Whether the bytes of a model are still those that were compared when it was copied."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import record
from .files import File, Sum, below

_BLOCK = 4 * 2**20
_SAMPLE = 300  # pieces: they find damage of one in a hundred with 95 % (1 - 0.99^300)
_TELL = 1.0  # seconds


def verify(request: dict[str, Any], tell: Callable[..., None]) -> dict[str, Any]:
    """Compare `files` below `root` with what is known of them: times and inodes of all, and the
    bytes of a sample of their pieces, or of all (`deep`).

    Where nothing was written down, files of Hugging Face's cache are compared with their names
    when all is read; others cannot be. Raises OSError and Unsafe.
    """
    root, deep = request["root"], bool(request.get("deep"))
    known = record.Known(root)
    found: dict[str, list[str]] = {"missing": [], "changed": [], "wrong": [], "unproven": []}
    work = _Work(root, tell)
    pieces: list[tuple[str, int, int, bytes]] = []
    whole: list[File] = []
    for file in (File(*row) for row in request["files"]):
        path = below(root, file.name)
        if not os.path.isfile(path) or os.path.getsize(path) != file.size:
            found["missing"].append(file.name)
        elif there := known.pieces(file, path):
            pieces += [(file.name, *piece) for piece in there]
        elif deep and file.sum:
            whole.append(file)
        elif known.names(file.name) and file.size:
            found["changed"].append(file.name)
        elif file.size:
            found["unproven"].append(file.name)
    if not deep and len(pieces) > _SAMPLE:
        pieces = sorted(random.SystemRandom().sample(pieces, _SAMPLE))
    found["wrong"] = sorted(work.pieces(pieces) | work.files(whole))
    return {**found, "files": len(request["files"]), "bytes": work.read, "seconds": work.seconds}


class _Work:
    """Reads and hashes on all cores; `read` is the bytes so far."""

    def __init__(self, root: str, tell: Callable[..., None]) -> None:
        self._root, self._tell = root, tell
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        self._told = self._began = time.monotonic()
        self.read = 0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return round(time.monotonic() - self._began, 3)

    def pieces(self, pieces: list[tuple[str, int, int, bytes]]) -> set[str]:
        """Return the files of which a piece has other bytes."""
        bad = set()
        for name, size, wrong in self._pool.map(self._piece, pieces):
            self._so_far(size)
            if wrong:
                bad.add(name)
        return bad

    def files(self, files: list[File]) -> set[str]:
        """Return the files whose bytes are not what their publisher's digest says."""
        bad = set()
        for name, size, wrong in self._pool.map(self._file, files):
            self._so_far(size)
            if wrong:
                bad.add(name)
        return bad

    def _so_far(self, count: int) -> None:
        self.read += count
        if time.monotonic() - self._told >= _TELL:
            self._told = time.monotonic()
            self._tell("progress", have=self.read)

    def _piece(self, piece: tuple[str, int, int, bytes]) -> tuple[str, int, bool]:
        name, offset, size, digest = piece
        with open(os.path.join(self._root, name), "rb", buffering=0) as file:
            _forget(file.fileno(), offset, size)
            data = os.pread(file.fileno(), size, offset)
            _forget(file.fileno(), offset, size)
        return name, size, hashlib.sha256(data).digest() != digest

    def _file(self, file: File) -> tuple[str, int, bool]:
        total = Sum(file)
        with open(os.path.join(self._root, file.name), "rb", buffering=0) as source:
            _forget(source.fileno(), 0, 0)
            while data := source.read(_BLOCK):
                total.add(data)
                _forget(source.fileno(), source.tell() - len(data), len(data))
        return file.name, file.size, total.wrong


def _forget(descriptor: int, offset: int, size: int) -> None:
    """Have what is in memory forgotten: before it is read, for the question is what lies on the
    disk, and afterwards, for others need the memory.
    """
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
