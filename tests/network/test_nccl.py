"""Logs of NCCL as a stream: any bytes, cut anywhere, in a bounded amount of memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.network import nccl
from launcher.network.nccl import Reading
from tests.network.logs import BAD, LINK, LOGS, read, said

SOUP = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [line for log in LOGS for line in log.read_bytes().splitlines(keepends=True)]
        ),
        st.sampled_from(
            [
                b"\n",
                b"\r\n",
                b"NCCL INFO ",
                b"NCCL WARN ",
                b" via ",
                b"NET/",
                b"Channel 00/0 : ",
                b"0[0] -> 1[1]",
                b"9" * 5000,
            ]
        ),
    ),
    max_size=12,
).map(b"".join)


@settings(max_examples=150, deadline=None)
@given(SOUP, st.lists(st.integers(0, 2000), max_size=6))
def test_no_bytes_are_too_strange_and_blocks_do_not_matter(log: bytes, cuts: list[int]) -> None:
    """Any bytes are read, and cutting them anywhere changes nothing."""
    at = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]

    assert nccl.read(log[a:b] for a, b in pairwise(at)) == nccl.read([log])


def announced(host: str) -> bytes:
    """The line in which a host says that it is rank 0."""
    return (
        f"{host}:5:6 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1"
        " commId 0x1 - Init\n".encode()
    )


@settings(max_examples=30, deadline=None)
@given(SOUP, st.integers(1, 7))
# Two hosts announce the same rank, and the first one says so again: the first word counts, and not
# the last.
@example(announced("a") + announced("b") + announced("a"), 1)
def test_counting_in_portions_does_not_matter(log: bytes, soon: int) -> None:
    """How many lines are counted before they are understood changes nothing."""
    before = nccl._SOON
    whole = nccl.read([log])
    try:
        nccl._SOON = soon

        assert nccl.read([log]) == whole
    finally:
        nccl._SOON = before


@pytest.mark.parametrize(
    "bad", [b"", b"\n", b"\x00" * 4096, bytes(range(256)) * 64, b"\x1f\x8b\x08" + b"\xff" * 999]
)
@pytest.mark.parametrize(
    "reader", [lambda b: nccl.read([b]), lambda b: nccl.read(b[i : i + 1] for i in range(len(b)))]
)
def test_empty_and_binary(bad: bytes, reader: Callable[[bytes], Reading]) -> None:
    """An empty or a binary file has no links, and is no error."""
    assert reader(bad).links == {}


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    """Of 64 MB without a line break, only the beginning is held."""
    tracemalloc.start()
    nccl.read(b"NET/" * (1 << 18) for _ in range(64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("name", "seen"),
    [("vllm-tp2-pp2", (0, 0)), ("2.18-efa-torchrun", (2, 16)), ("2.28-h100-socket", (1, 2))],
)
def test_ranks_of_which_nothing_is_known(name: str, seen: tuple[int, int]) -> None:
    """A communicator says how many ranks it has; what is between them must be in the log."""
    assert nccl.unseen(read(name)) == seen


NEAR = "".join(LINK.format(1, way, "Socket/0") + "\n" for way in ("send", "receive"))


@pytest.mark.parametrize(
    ("log", "count"),
    [
        (NEAR, 2),
        (NEAR.splitlines()[0] + "\n", 0),  # the other end is not known
        (NEAR + BAD + "\n", 0),  # two hosts received
        (NEAR.replace("gpu01", "<node>"), 0),
        (
            NEAR
            + "gpu01:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0"
            " MNNVL 0\n",
            0,
        ),
        (
            NEAR
            + "gpu01:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0"
            " MNNVL 0\n",
            2,
        ),
    ],
)
def test_links_of_a_network_inside_a_host(log: str, count: int) -> None:
    """Both ends must be in one host, and no doubt about who that is."""
    assert len(nccl.inside(said(log))) == count


def test_recorded_log() -> None:
    """NCCL 2.28.9 with two ranks, on one GPU that it believes to be two hosts'."""
    reading = read("2.28-h100-socket")

    assert (*reading.versions, *reading.using, reading.nodes) == ("2.28.9+cuda13.0", "Socket", 2)
    assert reading.devices == {"gpu01": {0: "lo:127.0.0.1<0>"}}
    assert {(link.network, link.device) for link in reading.links} == {("Socket", 0)}
    assert reading.network_links == 8
    assert not reading.alarms


def test_recorded_warning() -> None:
    """Its WARN lines begin with the time."""
    words = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    assert list(read("2.28-h100-duplicate").alarms) == [words]
