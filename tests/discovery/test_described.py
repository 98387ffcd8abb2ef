"""Hosts in a few lines."""

from __future__ import annotations

from dataclasses import replace

from launcher.discovery.discover import discover
from launcher.discovery.shape import Wishes
from tests.discovery.hosts import h100_pair, unequal


def test_a_lost_gpu_is_warned_of() -> None:
    """With its place on the bus: no container starts beside it, whichever GPUs it has."""
    words = "Unable to determine the device handle for GPU7: 0000:DF:00.0: Unknown Error"
    first, second = h100_pair()
    broken = replace(second, facts=replace(second.facts, lost_gpus=(words,)))

    found = discover([first, broken], Wishes())
    assert [each for each in found.warnings if "lost" in each] == [
        f"gpu02: the driver has lost a GPU ({words}): reboot"
    ]


def test_differences_are_told_folded() -> None:
    """What most are once, what differs on its own line."""
    found = discover(unequal(), Wishes())

    assert found.summary[0].startswith(
        "gpu[01-02]: 8 × NVIDIA H100 80GB HBM3, 80 GiB, driver 580.95.05"
    )
    assert found.summary[1] == "gpu03: differs: 7 × NVIDIA H100 80GB HBM3, 80 GiB"
    assert found.summary[2] == "gpu04: differs: no Docker"
    assert any(
        "gpu04: Docker does not answer: sh: docker: not found" in each for each in found.warnings
    )
    assert any(
        "different numbers of GPUs (gpu01 8, gpu02 8, gpu03 7, gpu04 8)" in each
        for each in found.warnings
    )
