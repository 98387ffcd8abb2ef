"""Progress of a batch job as text."""

from __future__ import annotations

import pytest

from launcher.batch import progress_text
from launcher.batch.driver.progress import Progress
from launcher.core import sizes


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.4, "0s"),
        (59.9, "59s"),
        (61, "1m 01s"),
        (3600, "1h 00m"),
        (7384, "2h 03m"),
        (90000, "1d 1h"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    """Two units suffice."""
    assert sizes.format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.25, "0.25"), (25.34, "25.3"), (253.4, "253"), (1912.7, "1,913")]
)
def test_rates(value: float, expected: str) -> None:
    """Only significant digits."""
    assert sizes.format_rate(value) == expected


def test_uncounted_rows() -> None:
    """A question mark."""
    assert progress_text.progress_line(Progress(state="reading")) == "0 of ? rows"


def test_a_single_error_is_singular() -> None:
    """For readers."""
    assert "1 error" in progress_text.progress_line(Progress(rows=3, errors=1)).split(", ")


def test_a_finished_job_has_no_eta() -> None:
    """Only a running one has."""
    assert "left" not in progress_text.progress_line(Progress(state="finishing", rows=3, eta=9.0))
