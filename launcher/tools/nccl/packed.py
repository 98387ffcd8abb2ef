"""Logs as they lie about: compressed with gzip, bzip2 or xz, or in the UTF-16 that a redirection in
PowerShell writes.
"""

from __future__ import annotations

import bz2
import codecs
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol

_BLOCK = 1 << 20


class Broken(Exception):
    """A compressed log ends early, or is damaged; what came before has been read."""


class _Unpacker(Protocol):
    eof: bool

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Gzip:
    """`zlib`'s object behind the interface of `bz2` and `lzma`, which keep what was not yet read
    themselves.
    """

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


# First bytes: RFC 1952; bzip2's and xz's own formats; byte order marks.
_PACKED: tuple[tuple[bytes, Callable[[], object]], ...] = (
    (b"\x1f\x8b", _Gzip),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\x00", lzma.LZMADecompressor),
)
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ENOUGH = 6


def unpacked(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the text of a log, as it is or unpacked, in blocks of at most 1 MiB where it was
    packed.

    Raises:
        Broken: it is compressed, and ends early or is damaged.
    """
    source = iter(chunks)
    first = b""
    while len(first) < _ENOUGH and (block := next(source, None)) is not None:
        first += block
    everything = chain((first,), source) if first else source
    for magic, make in _PACKED:
        if first.startswith(magic):
            yield from _decompressed(everything, make)  # type: ignore[arg-type]
            return
    if first.startswith(_WIDE):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        for block in everything:
            yield decoder.decode(block).encode("utf-8", "replace")
        return
    yield from everything


def _decompressed(chunks: Iterable[bytes], make: Callable[[], _Unpacker]) -> Iterator[bytes]:
    """Yield what is in one or several members that follow each other."""
    member, begun = make(), False
    try:
        for chunk in chunks:
            data = chunk
            while data or begun:
                begun = True
                said = member.decompress(data, _BLOCK)
                if said:
                    yield said
                data = b""
                if member.eof:
                    data, member, begun = member.unused_data.lstrip(b"\x00"), make(), False
                elif not said:
                    break
    except (zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        raise Broken(str(error)) from None
    if begun:
        raise Broken("it ends early")
