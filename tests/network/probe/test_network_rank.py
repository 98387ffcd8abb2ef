"""Pairs of the rounds, and the start of ranks."""

from __future__ import annotations

import datetime
import io
import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 31, 32])
def test_rounds_of_pairs(payload: SimpleNamespace, count: int) -> None:
    """Every pair once, every node at most once per round, in the fewest rounds."""
    rounds = payload.rank.tournament(count)
    pairs = [pair for item in rounds for pair in item]

    assert sorted(pairs) == [(low, high) for low in range(count) for high in range(low + 1, count)]
    assert all(len({node for pair in item for node in pair}) == 2 * len(item) for item in rounds)
    assert len(rounds) == (0 if count == 1 else count - 1 + count % 2)


@pytest.mark.parametrize(
    ("label", "lost"), [("go", []), ("go ", []), ("go b", [2, 3]), ("go b,c", [2, 3, 4, 5])]
)
def test_a_rank_starts_without_missing_nodes(
    payload: SimpleNamespace, label: str, lost: list[int]
) -> None:
    """Without all of their ranks, so that none is awaited."""
    messages: list[dict[str, object]] = []
    rank = SimpleNamespace(
        lost=[],
        ranks_of={"b": [2, 3], "c": [4, 5]}.get,
        format_ranks=str,
        events=SimpleNamespace(send=lambda **fields: messages.append(fields)),
    )
    payload.rank.ProbeRank.await_release(rank, io.StringIO(f"{label}\n"))

    assert (rank.lost, len(messages)) == (lost, 1 if lost else 0)


@pytest.mark.parametrize(
    ("label", "why"),
    [("no the head did not open x", "the head did not open x"), ("", "its probe ended")],
)
def test_a_failed_rendezvous_has_a_reason(payload: SimpleNamespace, label: str, why: str) -> None:
    """The parent's."""
    with pytest.raises(payload.work.RankError, match=why):
        payload.rank.ProbeRank.await_release(SimpleNamespace(), io.StringIO(label))


class FakeStore:
    """A store with some keys; a wait for any other key takes its whole timeout."""

    def __init__(self, *keys: str) -> None:
        self.keys = dict.fromkeys(keys, "1")

    def wait(self, keys: list[str], limit: datetime.timedelta) -> None:
        if not self.check(keys):
            time.sleep(limit.total_seconds())
            raise RuntimeError("wait timeout after 20ms")

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value


@pytest.mark.parametrize(
    ("text", "at_once"), [("", False), ("lost b\n", False), ("lost b\nlost c\n", True)]
)
def test_the_head_does_not_wait_for_exited_ranks(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, text: str, at_once: bool
) -> None:
    """Of four nodes, b and c are missing: rank 0 continues once it knows, else at the timeout."""
    monkeypatch.setattr(payload.rank, "TICK", 0.02)
    args = SimpleNamespace(
        nodes="a=x,b=y,c=z,d=v", child=0, ranks_per_node=1, node_rank=0, node="a"
    )
    rank = payload.rank.ProbeRank(args, SimpleNamespace())
    rank.store = FakeStore("arrived/rendezvous/0", "arrived/rendezvous/3")
    rank.follow_parent(io.StringIO(text))
    arrived = {other: f"arrived/rendezvous/{other}" for other in range(4)}
    timeout = 60.0 if at_once else 0.2
    began = time.monotonic()
    rank.count_arrived("rendezvous", arrived, timeout)
    took = time.monotonic() - began

    assert json.loads(rank.store.keys["over/rendezvous"]) == [1, 2]
    assert (took < timeout) is at_once


def test_a_rank_that_exited_after_the_rendezvous(payload: SimpleNamespace) -> None:
    """Its pairs will fail, and name it."""
    rank = SimpleNamespace(dead={1}, lost=[], store=FakeStore("x/0", "x/1"))
    payload.rank.ProbeRank.count_arrived(rank, "x", {0: "x/0", 1: "x/1"}, 1.0)

    assert json.loads(rank.store.keys["over/x"]) == []


@pytest.mark.parametrize("met", [True, False])
def test_a_rank_stops_at_its_parents_request(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, met: bool
) -> None:
    """Unless it has met the others, and can measure."""
    ends, text = list[int](), list[dict[str, object]]()
    monkeypatch.setattr(payload.rank, "exit_now", ends.append)
    rank = SimpleNamespace(
        met=met, events=SimpleNamespace(send=lambda **fields: text.append(fields))
    )
    payload.rank.ProbeRank.follow_parent(rank, io.StringIO("no stopped: rank 7 ended\n"))

    assert (ends, text) == (([], []) if met else ([1], [{"error": "stopped: rank 7 ended"}]))


class FakeLane:
    """A lane that counts its uses and takes the time that a test sets."""

    device = "cpu"

    def __init__(self, *args: object, reduce: Callable[[], object]) -> None:
        self.reduce = lambda _: reduce()
        self.settle = self.abort = lambda: None


@pytest.mark.parametrize("behaviour", ["works", "fails", "hangs"])
def test_a_rank_warms_up_before_pairs_are_timed(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    """In its own group; errors and hangs are left to the first pair to report."""
    hang, uses = threading.Event(), list[tuple[object, ...]]()

    def reduce() -> None:
        if behaviour == "fails":
            raise RuntimeError("no interface")
        if behaviour == "hangs":
            hang.wait(60)

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
    payload.rank.ProbeRank.warm_up(rank, 0.2)
    hang.set()

    assert uses == [("store", 0, 1, 0.2, "10.0.0.2")]
