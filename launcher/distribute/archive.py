"""Tar archives of unknown origin, read in bounded memory and time."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, Final

# What reading a broken or hostile archive raises.
ERRORS: Any = OSError, EOFError, RecursionError, ValueError
ERRORS += tarfile.TarError, lzma.LZMAError, zlib.error
_AT_ONCE: Final = 2 << 20  # bytes: `tarfile` reads a header of any size in one piece
_PACKED: Any = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))


class TooLarge(ValueError):
    """An archive unpacks to more than may be read."""


def is_archive(file: IO[bytes]) -> bool:
    """True for a tar archive, and for a file that gzip, bzip2 or xz has packed."""
    start = file.read(512)
    file.seek(0)
    return start[257:262] == b"ustar" or any(start.startswith(magic) for magic, _ in _PACKED)


def members(file: IO[bytes], most: int) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Yield the plain files of an archive, of which `most` bytes are unpacked; raises `ERRORS`."""
    start = file.read(6)
    file.seek(0)
    unpack = next((unpack for magic, unpack in _PACKED if start.startswith(magic)), None)
    bounded: Any = _Bounded(unpack(file) if unpack else file, most)
    with tarfile.open(fileobj=bounded, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]
            if (content := archive.extractfile(member) if member.isreg() else None) is not None:
                yield member, content


class _Bounded:
    """A file of which only the beginning may be read, in small pieces."""

    def __init__(self, inner: IO[bytes], most: int) -> None:
        self._inner, self._most = inner, most
        self.tell, self.seekable = inner.tell, inner.seekable

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _AT_ONCE:
            raise TooLarge(f"it has a header of {size} bytes")
        if self.tell() + size > self._most:
            self.seek(self._most + 1)
        return self._inner.read(size)

    def seek(self, place: int) -> None:
        if place > self._most:
            raise TooLarge(f"it unpacks to more than {self._most >> 20} MiB")
        self._inner.seek(place)
