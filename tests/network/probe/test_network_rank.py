"""Which pairs meet in which round, and when ranks begin."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
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


class FakeLane:
    """A lane that counts its uses and takes as long as a test wants."""

    device = "cpu"

    def __init__(self, *args: object, reduce: Callable[[], object]) -> None:
        self.reduce = lambda _: reduce()
        self.settle = self.abort = lambda: None


@pytest.mark.parametrize("behaviour", ["works", "fails", "hangs"])
def test_a_rank_warms_up_before_pairs_are_timed(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    """In a group of its own; what fails or hangs there is left to the first pair to report."""
    hang, uses = threading.Event(), list[tuple[object, ...]]()

    def reduce() -> None:
        if behaviour == "fails":
            raise RuntimeError("no interface")
        if behaviour == "hangs":
            hang.wait(20)

    def lane(*args: object) -> FakeLane:
        uses.append(args[1:])
        return FakeLane(reduce=reduce)

    monkeypatch.setitem(payload.lanes.LANES, "gloo", lane)
    rank = SimpleNamespace(
        args=SimpleNamespace(backend="gloo", node_rank=1),
        torch=SimpleNamespace(
            distributed=SimpleNamespace(HashStore=lambda: "store"), ones=lambda *_, device: device
        ),
        ips=["10.0.0.1", "10.0.0.2"],
    )
    payload.rank.Rank.warm_up(rank, 0.2)
    hang.set()

    assert uses == [("store", 0, 1, 0.2, "10.0.0.2")]
