"""What kernels say of segments that were sent again."""

from __future__ import annotations

import subprocess

import pytest

from launcher.model import Answer
from launcher.soak import retransmits

ONE, OTHER = "10.0.0.1:40000", "10.0.0.2:29500"


def told(sent: int, again: int, *connections: tuple[str, str, int], node: str = "a") -> Answer:
    """Return an answer, as `ss` prints it."""
    lines = [
        "Tcp: RtoAlgorithm OutSegs RetransSegs InErrs",
        f"Tcp: 1 {sent} {again} 0",
    ]
    for local, peer, count in connections:
        told = f" retrans:0/{count}" if count else ""
        lines += [
            f"ESTAB 0      0      {local} {peer}",
            f"\t cubic wscale:7,7 rto:204{told} dsack:1",
        ]
    return Answer(node=node, code=0, out="\n".join([*lines, ""]))


def counters(*args: object) -> retransmits.Counters:
    """Return what is read of an answer."""
    found = retransmits.read(told(*args))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_counters_are_read() -> None:
    """Of the node, and of each of its connections."""
    found = counters(100, 7, (ONE, OTHER, 5), ("[::ffff:10.0.0.1]:8000", "10.0.0.9%eth0:5", 0))

    assert (found.sent, found.again) == (100, 7)
    assert found.connections == {
        (ONE, OTHER): 5,
        ("[::ffff:10.0.0.1]:8000", "10.0.0.9%eth0:5"): 0,
    }


@pytest.mark.parametrize("out", ["", "Tcp: OutSegs\n", "Tcp: OutSegs RetransSegs\nTcp: x 1\n"])
def test_what_has_no_counters(out: str) -> None:
    """Is not known."""
    assert retransmits.read(Answer(node="a", code=1, out=out)) is None


def test_pairs_are_told_by_the_addresses_that_nodes_use() -> None:
    """Whatever network they are in; what goes elsewhere, or stays on a node, is in no pair."""
    outside, here = "192.0.2.1:5", "127.0.0.1:6"
    mapped = "[::ffff:10.0.0.2]:8000"
    before = {"a": counters(100, 5, (ONE, OTHER, 3)), "b": counters(50, 0, (OTHER, ONE, 0))}
    after = {
        "a": counters(
            300, 25, (ONE, OTHER, 10), ("10.0.0.1:7", mapped, 4), (ONE, outside, 9), (here, here, 1)
        ),
        "b": counters(60, 0, (OTHER, ONE, 0), (here, here, 2)),
    }
    found = retransmits.compare(before, after)

    assert found.nodes == {"a": (20, 200), "b": (0, 10)}
    assert found.pairs == {("a", "b"): 7 + 4}


def test_a_node_that_started_anew_has_no_count() -> None:
    """Nor has one that does not answer."""
    before = {"a": counters(100, 5), "b": counters(100, 5)}

    assert retransmits.compare(before, {"a": counters(3, 0)}).nodes == {}


def test_this_machine_is_asked() -> None:
    """By the same words as nodes."""
    (command,) = retransmits.ask(["a"])
    done = subprocess.run(command.argv, capture_output=True, text=True, check=True)
    found = retransmits.read(Answer(node="a", code=0, out=done.stdout))

    assert found is not None and found.sent >= found.again >= 0
