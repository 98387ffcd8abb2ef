"""Which pairs meet in which round, and when ranks begin."""

from __future__ import annotations

import io
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


@pytest.mark.parametrize(
    ("word", "lost"), [("go", []), ("go ", []), ("go b", [2, 3]), ("go b,c", [2, 3, 4, 5])]
)
def test_a_rank_begins_without_the_nodes_that_did_not_come(
    payload: SimpleNamespace, word: str, lost: list[int]
) -> None:
    """All ranks of them, so that nobody waits for one."""
    said: list[dict[str, object]] = []
    rank = SimpleNamespace(
        names=["a", "b", "c"],
        per_node=2,
        lost=[],
        called=str,
        told=SimpleNamespace(say=lambda **what: said.append(what)),
    )
    payload.rank.Rank.let_go(rank, io.StringIO(f"{word}\n"))

    assert (rank.lost, len(said)) == (lost, 1 if lost else 0)


@pytest.mark.parametrize(
    ("word", "why"),
    [("no the head did not open x", "the head did not open x"), ("", "its probe ended")],
)
def test_a_rank_that_cannot_meet_the_others_says_why(
    payload: SimpleNamespace, word: str, why: str
) -> None:
    """In its parent's words."""
    with pytest.raises(payload.work.Failed, match=why):
        payload.rank.Rank.let_go(SimpleNamespace(), io.StringIO(word))
