"""Requested faults of simulated GPUs."""

from __future__ import annotations

import pytest

from launcher.core.errors import RequestError
from launcher.lab import gpu_trouble
from launcher.lab.gpu_trouble import GpuTrouble

HOSTS = ("node1", "node2")


def test_trouble_affects_a_gpu_or_a_host() -> None:
    """Without an index it affects the first GPU; a missing toolkit affects the host."""
    arguments = ("node1:lost:3", "node2:busy", "node2:no-toolkit")

    assert gpu_trouble.parse_troubles(arguments, hosts=HOSTS, gpus=8) == (
        GpuTrouble(host="node1", kind="lost", index=3),
        GpuTrouble(host="node2", kind="busy", index=0),
        GpuTrouble(host="node2", kind="no-toolkit", index=None),
    )


def test_trouble_has_the_same_text_when_written() -> None:
    """A lab's record stores it in the same format."""
    arguments = ["node1:lost:3", "node2:no-toolkit"]

    assert [
        str(trouble) for trouble in gpu_trouble.parse_troubles(arguments, hosts=HOSTS, gpus=8)
    ] == arguments


def test_all_mistakes_are_reported_at_once() -> None:
    """An unknown host, an unknown kind, an invalid index."""
    arguments = ("node3:lost", "node1:tired", "node1:ecc:8", "node1:no-toolkit:1", "node1:ecc:x")
    with pytest.raises(RequestError) as refused:
        gpu_trouble.parse_troubles(arguments, hosts=HOSTS, gpus=8)

    mistakes = refused.value.evidence.splitlines()
    assert [line.partition(": ")[0] for line in mistakes] == list(arguments)
    assert "node1:lost:3" in refused.value.hint


def test_a_single_mistake_is_a_sentence() -> None:
    """With the valid values."""
    with pytest.raises(RequestError, match="no GPU 2, only 0 to 1"):
        gpu_trouble.parse_troubles(("node1:ecc:2",), hosts=HOSTS, gpus=2)
