"""Sets of row numbers as bitmaps."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.batch.driver import bitmap

pytestmark = pytest.mark.processes

SIZE = 300
NUMBERS = st.sets(st.integers(0, SIZE + 20), min_size=1)


@given(st.lists(NUMBERS), st.integers(0, SIZE - 1), st.integers(-1, 200))
@settings(max_examples=200, deadline=None)
def test_bitmaps_are_sets_of_numbers(added: list[set[int]], first: int, extra: int) -> None:
    """By comparison with a set: numbers are added together or, if one is invalid, not at all."""
    plain: set[int] = set()
    result = bitmap.RowSet(SIZE)
    for numbers in added:
        new = max(numbers) < SIZE and not plain & numbers
        words = bitmap.to_words(sorted(numbers))
        assert words.row_count == len(numbers)
        assert result.add(words) is new
        plain |= numbers if new else set()
    last = min(first + extra, SIZE - 1)
    missing = result.missing(first, last)

    expected = [number for number in range(first, last + 1) if number not in plain]
    assert list(bitmap.row_numbers(missing, first)) == expected
    assert bitmap.count_bits(missing) == len(expected)
    assert bool(missing) is bool(expected)


@given(st.sets(st.integers(0, 2**40), min_size=1))
@settings(max_examples=100, deadline=None)
def test_compressed_words_are_the_same(numbers: set[int]) -> None:
    """Also numbers that are far apart."""
    words = bitmap.to_words(sorted(numbers))
    again = bitmap.decompress_words(bitmap.compress_words(words))
    assert all(map(np.array_equal, again, words))


@pytest.mark.parametrize("data", [b"", b"text", zlib.compress(b"x" * 24)])
def test_damaged_words_are_rejected(data: bytes) -> None:
    """By zlib's checksum, or by their size."""
    with pytest.raises(ValueError, match=r".+"):
        bitmap.decompress_words(data)
    whole = bytearray(bitmap.compress_words(bitmap.to_words([*range(0, 9_999, 7)])))
    whole[len(whole) // 2] ^= 1
    with pytest.raises(ValueError, match=r".+"):
        bitmap.decompress_words(bytes(whole))


def test_scattered_rows_take_few_bytes() -> None:
    """Less than a byte each; a run of rows next to none."""
    scattered = [*range(0, 100_000, 10)]
    assert len(bitmap.compress_words(bitmap.to_words(scattered))) < len(scattered)
    assert len(bitmap.compress_words(bitmap.to_words([*range(7, 10_007)]))) < 100
