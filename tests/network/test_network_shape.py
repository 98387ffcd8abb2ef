"""A network verdict, and the format of its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.check import Finding
from launcher.network.network_shape import Cell, Verdict, format_rate

WELL = Cell(source="n1", target="n2", status="pass")
VERDICT = Verdict(
    backend="gloo",
    nodes=("n1", "n2"),
    required="any",
    why="as requested",
    cells=(WELL,),
    findings=(),
)


@pytest.mark.parametrize(
    ("bandwidth", "text"),
    [
        (0, "0 B/s"),
        (999, "999 B/s"),
        (1.5e3, "1.5 kB/s"),
        (11.8e6, "11.8 MB/s"),
        (24.94e9, "24.9 GB/s"),
        (391e9, "391 GB/s"),
    ],
)
def test_format_of_bandwidth(bandwidth: float, text: str) -> None:
    """Powers of ten, at most three digits."""
    assert format_rate(bandwidth) == text


def test_passing_verdicts() -> None:
    """With a measurement and without a failure; a warning is none."""
    bad, slow = replace(WELL, status="fail"), Finding(node="n1", status="warn", text="slow")

    assert VERDICT.passed
    assert replace(VERDICT, findings=(slow,)).passed
    assert not replace(VERDICT, cells=()).passed
    assert not replace(VERDICT, cells=(WELL, bad)).passed
    assert not replace(VERDICT, findings=(replace(slow, status="fail"),)).passed
