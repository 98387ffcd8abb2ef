"""Hosts in a few lines."""

from __future__ import annotations

from launcher.discovery.discover import discover
from launcher.discovery.shape import Wishes
from tests.discovery.hosts import unequal


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
