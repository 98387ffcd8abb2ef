"""Lines of a file or a part of it, read in blocks: memory stays below the limit for any line
length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .storage import Location

EXCERPT_LENGTH = 4096  # characters of a row shown in an error row
BLOCK = 1 << 20
FAR_BLOCK = 8 << 20  # each read from an object store is a request
COMPRESSED_BLOCK = 64 << 10  # Arrow's own block: after an error, it returns nothing of a read
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line over the limit: its beginning and its length."""

    head: bytes
    length: int


def compression_codec(path: str) -> str | None:
    """Return pyarrow's codec for a file's suffix."""
    bare = path.partition("?")[0] if "://" in path else path
    return {"gz": "gzip", "zst": "zstd"}.get(bare.rpartition(".")[2].lower())


def read_blocks(location: Location, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield a file's bytes, decompressed by its suffix; of a plain file, those from `start` to
    `end`.

    Raises:
        OSError: it cannot be read, or is not compressed as its suffix says.
    """
    size = BLOCK if location.local else FAR_BLOCK
    codec = compression_codec(location.address)
    if codec is not None:
        yield from read_compressed(location, codec)
        return
    with location.open_input() as file:
        file.seek(start)
        remaining = (file.size() if end is None else end) - start
        while remaining > 0 and (block := file.read(min(size, remaining))):
            remaining -= len(block)
            yield block


def read_compressed(location: Location, codec: str) -> Iterator[bytes]:
    """Yield a file's decompressed bytes, in blocks that lose little before a damaged part.

    Raises:
        OSError: it cannot be read, or is damaged or cut off; names the last complete line.
    """
    newlines = 0
    with location.filesystem.open_input_stream(
        location.path, compression=codec, buffer_size=BLOCK
    ) as stream:
        try:
            while block := stream.read(COMPRESSED_BLOCK):
                newlines += block.count(b"\n")
                yield block
        except (OSError, ValueError) as error:
            raise OSError(f"readable up to line {newlines:,}; then {codec}: {error}") from error


def strip_bom(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Remove a UTF-8 byte order mark."""
    first = next(parts, b"")
    yield first.removeprefix(BOM)
    yield from parts


def split_lines(parts: Iterator[bytes], limit: int) -> Iterator[bytes | LongLine]:
    """Yield lines without newlines, including a last one without; no empty last line."""
    rest = b""
    for part in parts:
        following = part
        while following:
            pieces = (rest + following).split(b"\n")
            rest, following = pieces.pop(), b""
            for piece in pieces:
                yield piece if len(piece) <= limit else LongLine(piece[:EXCERPT_LENGTH], len(piece))
            if len(rest) > limit:
                long, following = skip_line(rest, parts)
                rest = b""
                yield long
    if rest:
        yield rest if len(rest) <= limit else LongLine(rest[:EXCERPT_LENGTH], len(rest))


def skip_line(start: bytes, parts: Iterator[bytes]) -> tuple[LongLine, bytes]:
    """Read past the end of a long line; return its beginning and the rest of the last block."""
    head, length = start[:EXCERPT_LENGTH], len(start)
    for part in parts:
        newline = part.find(b"\n")
        if newline >= 0:
            return LongLine(head, length + newline), part[newline + 1 :]
        length += len(part)
    return LongLine(head, length), b""


def excerpt(raw: Any) -> str:
    """Return a row as shown in an error row: cut, with escapes for invalid UTF-8."""
    if isinstance(raw, bytes):
        return raw[:EXCERPT_LENGTH].decode("utf-8", "backslashreplace")[:EXCERPT_LENGTH]
    return str(raw)[:EXCERPT_LENGTH].encode("utf-8", "backslashreplace").decode()[:EXCERPT_LENGTH]
