"""Warnings about slow starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.check import Finding
from launcher.network import suspects
from launcher.network.network_shape import Measurement
from launcher.network.probe_command import RankReport
from tests.network.reports import healthy, three


def findings(*seconds: tuple[float | None, float | None]) -> list[Finding]:
    """Return the findings for a start of n2 that took this long to load torch and to meet."""
    reports = healthy()
    ranks = tuple(
        RankReport(
            rank=0, local_rank=0, phase="done", ended=True, exit=0, torch=torch, meeting=meeting
        )
        for torch, meeting in seconds
    )
    reports["n2"] = replace(reports["n2"], ranks=ranks)
    return suspects.node_findings(Measurement(inventory=three(), reports=reports))


@pytest.mark.parametrize(
    ("seconds", "text", "fix"),
    [
        (
            ((4.0, None), (62.4, 1.0)),
            "its ranks took 62 s to load torch and NCCL; all others waited for them",
            "`uptime`, `iostat -x 1`",
        ),
        (
            ((4.0, 43.0),),
            "its ranks took 43 s to join the others after all had loaded torch",
            "--only names-resolve",
        ),
    ],
)
def test_slow_starts_warn(
    seconds: tuple[tuple[float | None, float | None], ...], text: str, fix: str
) -> None:
    """With the seconds, and their own fix."""
    (finding,) = findings(*seconds)

    assert (finding.node, finding.status, finding.text) == ("n2", "warn", text)
    assert fix in finding.fix


def test_usual_starts_pass() -> None:
    """Unknown durations too."""
    assert findings((9.0, 1.0), (None, None)) == []
