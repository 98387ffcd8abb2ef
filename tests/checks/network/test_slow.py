"""What was slow before anything was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.checks.network import culprits, slow
from launcher.checks.network.shape import Measurement
from launcher.tools.network import RankReport, Report
from tests.checks.network.reports import healthy, three

NODE = three().nodes[1]


def report(*ranks: dict[str, Any], **more: Any) -> Report:
    """Return the report of a node whose ranks met the others."""
    done = RankReport(rank=0, local_rank=0, phase="done", ended=True, exit=0)
    return Report(
        node="n2", backend="gloo", ranks=tuple(replace(done, **each) for each in ranks), **more
    )


@pytest.mark.parametrize(
    ("said", "text", "fix"),
    [
        (
            report({"torch": 4.0}, {"torch": 62.4}),
            "its ranks took 62 s to load torch and NCCL; all others waited for them",
            "`uptime`, `iostat -x 1`",
        ),
        (
            report({"torch": 4.0, "meeting": 43.0}),
            "its ranks took 43 s to meet the others, all of which had torch",
            "--only names-resolve",
        ),
        (
            report({"meeting": 43.0}, names={"n1": 10.01, "n3": 0.001}),
            "looking up the names of n1 in the container takes 10 s or more, and so does each"
            " connection of torch's store",
            "--only names-resolve",
        ),
    ],
)
def test_what_was_slow_is_warned_of_with_its_seconds(said: Report, text: str, fix: str) -> None:
    """The cause that explains the rest alone."""
    (found,) = slow.start(NODE, said)

    assert (found.node, found.status, found.text) == ("n2", "warn", text)
    assert fix in found.fix


def test_a_usual_start_is_not_spoken_of() -> None:
    """Nor one of which nothing is known."""
    usual = report({"torch": 9.0, "meeting": 1.0}, names={"n1": 0.01})

    assert (slow.start(NODE, usual), slow.start(NODE, report({}))) == ([], [])


def test_it_is_told_among_what_is_wrong_with_nodes() -> None:
    """As a warning, which fails nothing."""
    reports = healthy()
    reports["n2"] = replace(reports["n2"], names={"n1": 12.0})
    (found,) = culprits.nodes(Measurement(inventory=three(), reports=reports))

    assert (found.node, found.status) == ("n2", "warn")
