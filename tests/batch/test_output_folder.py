"""The local output folder of a batch job; the command's tests cover ownership."""

from __future__ import annotations

import pytest

from launcher.batch.output_folder import format_size


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (24 * 2**20, "25.2 MB"),
        (3 * 10**9, "3.0 GB"),
    ],
)
def test_sizes(count: int, expected: str) -> None:
    """In decimal units."""
    assert format_size(count) == expected
