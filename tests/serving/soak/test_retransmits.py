"""Kernels' counters of retransmitted segments, and their differences between two reads."""

from __future__ import annotations

import subprocess

import pytest

from launcher.core.domain import Answer
from launcher.serving.soak import retransmits

FIRST, OTHER = "10.0.0.1:40000", "10.0.0.2:29500"


def answer(sent: int, again: int, *connections: tuple[str, str, int], node: str = "a") -> Answer:
    """Return a node's answer: the kernel's counters, and the output of `ss`."""
    lines = [
        "Tcp: RtoAlgorithm OutSegs RetransSegs InErrs",
        f"Tcp: 1 {sent} {again} 0",
    ]
    for local, peer, count in connections:
        field = f" retrans:0/{count}" if count else ""
        lines += [
            f"ESTAB 0      0      {local} {peer}",
            f"\t cubic wscale:7,7 rto:204{field} dsack:1",
        ]
    return Answer(node=node, code=0, out="\n".join([*lines, ""]))


def counters(*args: object) -> retransmits.TcpCounters:
    """Return the counters read from a node's answer."""
    return retransmits.parse_counters([answer(*args)])["a"]  # type: ignore[arg-type]


def test_counters_of_a_node_and_its_connections_are_read() -> None:
    """Addresses may be mapped to IPv6, and have a zone."""
    result = counters(100, 7, (FIRST, OTHER, 5), ("[::ffff:10.0.0.1]:8000", "10.0.0.9%eth0:5", 0))

    assert (result.sent, result.retransmitted) == (100, 7)
    assert result.connections == {
        (FIRST, OTHER): 5,
        ("[::ffff:10.0.0.1]:8000", "10.0.0.9%eth0:5"): 0,
    }


@pytest.mark.parametrize("out", ["", "Tcp: OutSegs\n", "Tcp: OutSegs RetransSegs\nTcp: x 1\n"])
def test_an_answer_without_counters_is_none(out: str) -> None:
    """Output may be empty or malformed."""
    assert retransmits.parse_counters([Answer(node="a", code=1, out=out)]) == {}


def test_pairs_of_nodes_are_identified_by_their_local_addresses() -> None:
    """Connections to other hosts and within a node are in no pair."""
    outside, local = "192.0.2.1:5", "127.0.0.1:6"
    mapped = "[::ffff:10.0.0.2]:8000"
    before = {"a": counters(100, 5, (FIRST, OTHER, 3)), "b": counters(50, 0, (OTHER, FIRST, 0))}
    after = {
        "a": counters(
            300,
            25,
            (FIRST, OTHER, 10),
            ("10.0.0.1:7", mapped, 4),
            (FIRST, outside, 9),
            (local, local, 1),
        ),
        "b": counters(60, 0, (OTHER, FIRST, 0), (local, local, 2)),
    }
    nodes, pairs = retransmits.compare_counters(before, after)

    assert nodes == {"a": (20, 200), "b": (0, 10)}
    assert pairs == {("a", "b"): 7 + 4}


def test_a_node_that_rebooted_has_no_difference() -> None:
    """Nor has a node that does not answer."""
    before = {"a": counters(100, 5), "b": counters(100, 5)}

    assert retransmits.compare_counters(before, {"a": counters(3, 0)}) == ({}, {})


def test_the_command_runs_on_this_machine() -> None:
    """Its real output is read."""
    (command,) = retransmits.query_counters(["a"])
    process = subprocess.run(command.argv, capture_output=True, text=True, check=True)
    result = retransmits.parse_counters([Answer(node="a", code=0, out=process.stdout)])["a"]

    assert result.sent >= result.retransmitted >= 0
