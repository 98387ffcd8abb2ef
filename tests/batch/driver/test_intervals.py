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
    added: list[tuple[int, int]], first: int, more: int
) -> None:
    """Compared with a plain set."""
    plain: set[int] = set()
    found = Intervals()
    for start, length in added:
        found.add(start, start + length)
        plain |= set(range(start, start + length + 1))

    assert list(found) == to_runs(sorted(plain))
    wanted = range(first, first + more + 1)
    assert found.missing(first, first + more) == to_runs(
        number for number in wanted if number not in plain
    )
    assert found.overlaps(first, first + more) == any(number in plain for number in wanted)
    assert (first in found) == (first in plain)
