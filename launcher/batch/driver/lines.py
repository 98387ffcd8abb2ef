"""Lines of a file, or of a part of it, as bytes and in blocks: a line of any length costs no more
memory than the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .places import Place

SHOWN = 4096  # as much of a row as an error row shows
BLOCK = 1 << 20
FAR_BLOCK = 8 << 20  # each read of an object store is a request of its own
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Long:
    """A line over the limit: how it begins, and its length."""

    head: bytes
    length: int


def compression(path: str) -> str | None:
    """The codec of a file by its ending, as pyarrow names it."""
    bare = path.partition("?")[0] if "://" in path else path
    return {"gz": "gzip", "zst": "zstd"}.get(bare.rpartition(".")[2].lower())


def blocks(place: Place, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed by its ending, or those from `start` to `end` of a
    plain one.

    Raises:
        OSError: it cannot be read, or is not compressed as its ending says.
    """
    size = BLOCK if place.local else FAR_BLOCK
    codec = compression(place.where)
    if codec is not None:
        with place.filesystem.open_input_stream(
            place.path, compression=codec, buffer_size=BLOCK
        ) as stream:
            yield from iter(lambda: stream.read(BLOCK), b"")
        return
    with place.open_input() as file:
        file.seek(start)
        left = (file.size() if end is None else end) - start
        while left > 0 and (block := file.read(min(size, left))):
            left -= len(block)
            yield block


def unmarked(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Leave out the mark with which some programs begin UTF-8 files."""
    first = next(parts, b"")
    yield first.removeprefix(BOM)
    yield from parts


def lines(parts: Iterator[bytes], limit: int) -> Iterator[bytes | Long]:
    """Yield lines without their newline; a last one without a newline counts, an empty rest does
    not.
    """
    rest = b""
    for part in parts:
        following = part
        while following:
            pieces = (rest + following).split(b"\n")
            rest, following = pieces.pop(), b""
            for piece in pieces:
                yield piece if len(piece) <= limit else Long(piece[:SHOWN], len(piece))
            if len(rest) > limit:
                long, following = passed(rest, parts)
                rest = b""
                yield long
    if rest:
        yield rest if len(rest) <= limit else Long(rest[:SHOWN], len(rest))


def passed(begun: bytes, parts: Iterator[bytes]) -> tuple[Long, bytes]:
    """Read past the end of a long line, keeping only its beginning; return it and what follows in
    the last block.
    """
    head, length = begun[:SHOWN], len(begun)
    for part in parts:
        at = part.find(b"\n")
        if at >= 0:
            return Long(head, length + at), part[at + 1 :]
        length += len(part)
    return Long(head, length), b""


def shown(raw: Any) -> str:
    """A row as an error row shows it: cut, and with escapes for what is not UTF-8."""
    if isinstance(raw, bytes):
        return raw[:SHOWN].decode("utf-8", "backslashreplace")[:SHOWN]
    return str(raw)[:SHOWN].encode("utf-8", "backslashreplace").decode()[:SHOWN]
