"""Formatting of sizes."""

from __future__ import annotations

import pytest

from launcher.core.sizes import format_decimal_size


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
def test_sizes_of_a_jobs_files(count: int, expected: str) -> None:
    """In decimal units."""
    assert format_decimal_size(count) == expected
