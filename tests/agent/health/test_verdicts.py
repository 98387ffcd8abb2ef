"""Arithmetic of health: waits without a step, thresholds, verdicts, pauses, lost requests."""

from __future__ import annotations

import pytest

from launcher.agent.health import verdicts
from launcher.agent.health.verdicts import Steps
from launcher.agent.observed import EndpointHealth


def test_time_counts_only_while_a_canary_waits() -> None:
    """An idle server completes no steps either."""
    steps = Steps(0.0)
    steps.note_value("answers", 1, 10.0, "")
    assert steps.stalled_seconds(1000.0) == {}

    steps.note_canaries({"": 900.0})
    assert steps.stalled_seconds(1000.0) == {"": 100.0}
    steps.note_canaries({})
    assert steps.stalled_seconds(1001.0) == {}


@pytest.mark.parametrize("source", ["answers", "counters"])
def test_a_completed_step_is_progress(source: str) -> None:
    """An answer or an increased counter. The longest wait is remembered."""
    steps = Steps(0.0)
    steps.note_value(source, 1, 0.0, "")
    steps.note_canaries({"": 5.0})
    steps.note_value(source, 1, 40.0, "")
    assert (steps.stalled_seconds(40.0), steps.longest) == ({"": 35.0}, 0.0)

    steps.note_value(source, 2, 45.0, "")
    assert (steps.stalled_seconds(50.0), steps.longest) == ({"": 5.0}, 40.0)
    steps.note_value(source, 3, 51.0, "")
    assert steps.longest == 40.0


def test_replicas_are_judged_separately() -> None:
    """A hanging replica loses its requests although others answer."""
    steps = Steps(0.0)
    steps.note_canaries({"0": 80.0, "1": 10.0})
    for at in range(1, 10):
        for part in ("", "0"):
            steps.note_value("answers", at, 10.0 * at, part)

    assert steps.stalled_seconds(91.0) == {"0": 1.0, "1": 81.0}


def test_unknown_counters() -> None:
    """They count neither as a wait nor as a long step; known progress still counts."""
    steps = Steps(0.0)
    steps.note_value("counters", 1, 0.0, "")
    steps.note_canaries({"": 0.0})
    steps.forget(500.0)
    steps.note_value("counters", 2, 500.0, "")
    steps.note_canaries({"": 0.0})

    assert (steps.stalled_seconds(510.0), steps.longest, steps.idle(510.0)) == (
        {"": 10.0},
        0.0,
        10.0,
    )


@pytest.mark.parametrize(
    ("longest", "quiet", "suspect"),
    [(0.0, 30, 60), (10.0, 30, 60), (20.0, 60, 100), (100.0, 240, 500)],
)
def test_thresholds_follow_the_longest_step(longest: float, quiet: int, suspect: int) -> None:
    """Three and five times the longest step, above a minimum."""
    assert [verdicts.is_quiet(at, longest) for at in (quiet, quiet + 0.1)] == [False, True]
    assert [verdicts.is_suspect(at, longest) for at in (suspect, suspect + 0.1)] == [False, True]


@pytest.mark.parametrize(
    ("state", "faults", "verdict"),
    [
        ("waiting", 0, "waiting"),
        ("starting", 0, "starting"),
        ("stopping", 0, "stopping"),
        ("starting", 1, "recovering"),
        ("pausing", 1, "recovering"),
        ("failed", 1, "failed"),
        ("gave-up", 3, "gave-up"),
        ("stopped", 3, "stopped"),
    ],
)
def test_a_server_that_is_not_ready(state: str, faults: int, verdict: str) -> None:
    """After a fault, everything until the next answer is recovery."""
    assert verdicts.server_verdict(state, faults) == verdict


def test_the_worst_endpoint_decides() -> None:
    """With its node, unless all agree."""
    fine, busy = EndpointHealth(verdict="answering"), EndpointHealth(verdict="busy", reason="x")

    assert verdicts.combine_verdicts({"gpu1": fine, "gpu2": busy}) == ("busy", "gpu2: x")
    assert verdicts.combine_verdicts({"gpu1": busy, "gpu2": busy}) == ("busy", "x")
    assert verdicts.combine_verdicts({"gpu1": fine, "gpu2": fine}) == ("answering", "")
    assert verdicts.combine_verdicts({})[0] == "unknown"


def test_pauses_double_up_to_the_longest() -> None:
    """5, 10, 20 … up to ten minutes."""
    pauses = [verdicts.next_pause(5.0, 600.0, streak) for streak in (0, 1, 2, 3, 7, 8, 9, 10**6)]

    assert pauses == [5.0, 5.0, 10.0, 20.0, 320.0, 600.0, 600.0, 600.0]


@pytest.mark.parametrize(
    ("before", "after", "fresh", "lost"),
    [
        ((3, 0.0), (3, 0.0), True, 3),
        ((3, 5.0), (0, 12.0), True, 7),
        ((0, 5.0), (0, 5.0), True, 0),
        ((3, 5.0), (0, 2.0), True, 3),
        ((3, 0.0), (3, 0.0), False, None),
        (None, (3, 0.0), True, None),
        ((3, 0.0), None, True, None),
    ],
)
def test_lost_requests(
    before: tuple[int, float] | None, after: tuple[int, float] | None, fresh: bool, lost: int | None
) -> None:
    """Open requests, or 5xx answers since; only fresh counters count."""
    assert verdicts.lost_requests(before, after, fresh) == lost
