"""Which pairs meet in which round."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 31, 32])
def test_every_pair_meets_once_and_nobody_twice_a_round(
    payload: SimpleNamespace, count: int
) -> None:
    """In as few rounds as can be."""
    rounds = payload.rank.tournament(count)
    pairs = [pair for each in rounds for pair in each]

    assert sorted(pairs) == [(low, high) for low in range(count) for high in range(low + 1, count)]
    assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in rounds)
    assert len(rounds) == (0 if count == 1 else count - 1 + count % 2)
