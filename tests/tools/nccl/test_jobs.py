"""Which hosts of a log are one job, and which links are inside one of them."""

from __future__ import annotations

import pytest

from launcher.tools import nccl
from tests.tools.nccl.logs import BAD, LINK, read, said


def test_two_jobs_in_one_log() -> None:
    """Hosts that share no communicator are two jobs."""
    assert read("two-jobs").groups == (("blue1", "blue2"), ("red1", "red2"))


def test_many_communicators_of_one_job() -> None:
    """Rank numbers repeat in the communicators of one job; any that is shared joins its hosts."""
    assert read("vllm-tp2-pp2").groups == (("gpu01", "gpu02"),)


def test_a_link_joins_hosts_whose_communicators_do_not() -> None:
    """Where the two ends of a link are known beyond doubt, their hosts are one job."""
    init = (
        "{0}:5:6 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1 commId"
        " 0x{1} - Init START\n"
    )
    link = "{0}:5:6 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [{1}] via NET/IB/0\n"
    reading = said(
        init.format("a", 11)
        + init.format("b", 22)
        + link.format("a", "send")
        + link.format("b", "receive")
    )

    assert reading.groups == (("a", "b"),)


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
