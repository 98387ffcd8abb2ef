"""Numbers of rows, kept as intervals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.batch.driver.intervals import Intervals, to_runs

pytestmark = pytest.mark.processes


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8))),
    st.integers(0, 60),
    st.integers(0, 20),
)
@settings(max_examples=100, deadline=None)
def test_intervals_are_a_set_of_numbers(
    added: list[tuple[int, int]], first: int, extra: int
) -> None:
    """Compared with a plain set."""
    plain: set[int] = set()
    result = Intervals()
    for start, length in added:
        result.add(start, start + length)
        plain |= set(range(start, start + length + 1))

    assert list(result) == to_runs(sorted(plain))
    expected = range(first, first + extra + 1)
    assert result.missing(first, first + extra) == to_runs(
        number for number in expected if number not in plain
    )
    assert result.overlaps(first, first + extra) == any(number in plain for number in expected)
    assert (first in result) == (first in plain)
