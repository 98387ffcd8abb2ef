"""Sets of row numbers as bitmaps, lowest bit first."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BITS = 64
WORD = np.dtype("<u8")


class Words(NamedTuple):
    """Words of a bitmap that are not zero: their positions in ascending order, and their bits."""

    positions: npt.NDArray[np.uint64]
    bits: npt.NDArray[np.uint64]

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return count_bits(self.bits.tobytes())


def to_words(numbers: list[int]) -> Words:
    """Return the bitmap of row numbers (at least one, ascending, none negative)."""
    rows = np.array(numbers, WORD)
    positions, starts = np.unique(rows // BITS, return_index=True)
    bits = np.left_shift(np.ones_like(rows), rows % BITS)
    return Words(positions, np.bitwise_or.reduceat(bits, starts))


def compress_words(words: Words) -> bytes:
    """Return words as zlib data: the gaps between their positions, then their bits."""
    gaps = np.diff(words.positions, prepend=WORD.type(0))
    return zlib.compress(np.stack([gaps, words.bits]).astype(WORD).tobytes())


def decompress_words(data: bytes) -> Words:
    """Return the words of `compress_words`.

    Raises:
        ValueError: the data is damaged.
    """
    try:
        gaps, bits = np.frombuffer(zlib.decompress(data), WORD).reshape(2, -1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return Words(np.cumsum(gaps, dtype=WORD), bits)


def count_bits(bitmap: bytes) -> int:
    """Return the number of rows in a bitmap."""
    return int.from_bytes(bitmap, "little").bit_count()


def row_numbers(bitmap: bytes, first: int) -> Iterator[int]:
    """Yield the row numbers of a bitmap that begins with the byte of row `first`."""
    start = first // 8 * 8
    for number, byte in zip(range(start, start + 8 * len(bitmap), 8), bitmap, strict=True):
        if byte:
            yield from (number + bit for bit in range(8) if byte >> bit & 1)


class RowSet:
    """Set of the row numbers below `size`: 125 MB per billion."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.words = np.zeros(-(-size // BITS), WORD)

    def add(self, words: Words) -> bool:
        """Add rows, and return True; add none if any is in the set or not below `size`."""
        positions, bits = words
        last = int(positions[-1]) * BITS + int(bits[-1]).bit_length() - 1
        if last >= self.size or (self.words[positions] & bits).any():
            return False
        self.words[positions] |= bits
        return True

    def missing(self, first: int, last: int) -> bytes:
        """Return the bitmap of the numbers from `first` to `last` that are not in the set, from the
        byte of `first` on; empty if there are none.
        """
        if last < first:
            return b""
        bitmap = ~self.words.view(np.uint8)[first // 8 : last // 8 + 1]
        bitmap[0] &= 0xFF << first % 8 & 0xFF
        bitmap[-1] &= 0xFF >> 7 - last % 8
        return bitmap.tobytes() if bitmap.any() else b""
