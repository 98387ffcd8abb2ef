"""What is kept of a log, and of several: each thing once, within limits, and only what is whole."""

from __future__ import annotations

import pytest

from launcher.network import nccl
from launcher.network import nccl_log as module
from tests.network.logs import FIXTURES, said


def test_merge_is_as_one_log() -> None:
    """A log per host, merged, is what one log of both would be."""
    both = (FIXTURES / "vllm-tp2-pp2.log").read_text().splitlines(keepends=True)
    one, two = ([line for line in both if line.startswith(host)] for host in ("gpu01", "gpu02"))

    assert one and two
    assert nccl.merge([said("".join(one)), said("".join(two))]) == said("".join(one + two))


@pytest.mark.parametrize("end", ["via NET/IB/0/GDRDMA", "via NET/IB/0/GDR", "via NET/IB/", ""])
def test_a_last_line_without_an_end_is_left_out(end: str) -> None:
    """It may have lost the word that proves GPUDirect."""
    line = "n1:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> {}[0] [send] "
    reading = said(line.format(1) + "via NET/IB/0/GDRDMA\n" + line.format(2) + end)

    assert (len(reading.links), reading.truncated) == (1, True)


def test_the_worst_is_kept_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more links than are kept, that is said, and a kind that comes late is not lost."""
    monkeypatch.setattr(module, "MAX_LINKS", 3)
    line = "n:1:2 [0] NCCL INFO Channel 00/0 : {}[0] -> 1[0] [send] via NET/IB/0/GDRDMA\n"
    reading = said(
        "".join(line.format(rank) for rank in range(9))
        + line.format(0).replace("IB/0/GDRDMA", "Socket/0")
    )

    assert [link.network for link in reading.links] == ["IB", "IB", "IB", "Socket"]
    assert (reading.overflow, reading.truncated) == (True, False)
    assert reading.network_links == 10


def test_libfabrics_provider_is_told() -> None:
    """In the words of both generations of aws-ofi-nccl, per host."""
    line = "{0}:1:2 [0] NCCL INFO {1}\n"
    reading = said(
        line.format("a", "NET/OFI Selected Provider is efa (found 4 nics)")
        + line.format(
            "b", "NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/24 (found 1 nics)"
        )
    )

    assert {host: list(names) for host, names in reading.providers.items()} == {
        "a": ["efa"],
        "b": ["tcp;ofi_rxm"],
    }
    assert nccl.merge([reading]) == reading
