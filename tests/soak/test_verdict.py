"""Verdicts of soaks, of loads that are made up."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from launcher.payload.agent.observed import Observed
from launcher.payload.agent.task import COMPLETION
from launcher.soak.load import Load, Stream
from launcher.soak.retransmits import Retransmits
from launcher.soak.verdict import Verdict
from tests import kept

BEFORE = kept.seen(
    verdict="answering", generation=2, fault_count=1, faults=[kept.fault(what="old")]
)


def load(**more: Any) -> Load:
    """Return a load that went well, with changes."""
    made = Load([], "m", COMPLETION, 128, [Stream()] * 4, done=90, open=4, tokens=12_000)
    made.seconds, made.wait, made.waited_until = 1800.0, 1.5, 754.0
    for seconds in (0.05, 0.06):
        made.first.add(seconds)
        made.between.add(seconds / 10)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def judged(run: Load | None = None, after: Observed | None = BEFORE, **more: Any) -> Verdict:
    """Return a verdict."""
    again = Retransmits(nodes={"gpu01": (12, 40_000)}, pairs={("gpu01", "gpu02"): 11})
    made = Verdict(
        load=run or load(), asked=1800.0, route="directly", before=BEFORE, after=after, again=again
    )
    return dataclasses.replace(made, **more)


def test_one_that_passes() -> None:
    """In rows, and as JSON."""
    verdict = judged()
    assert list(verdict.rows()) == [
        ("requests", "90 done, 4 open at the end, 0 failed"),
        ("tokens", "12,000 (6.67 per second)"),
        ("first token", "p50 50 ms, p99 60 ms, longest 60 ms"),
        ("next token", "p50 5 ms, p99 6 ms, longest 6 ms"),
        ("longest gap", "1.50 s, until 12m 34s after the start (allowed: 30 s)"),
        ("server", "answering, restarts: 0, faults: 0"),
        ("retransmits", "gpu01: 12 of 40,000 segments (0.030%)"),
        ("", "gpu01 to gpu02: 11 segments"),
        ("verdict", "passed"),
    ]
    said = json.loads(json.dumps(verdict.as_json()))
    assert (said["passed"], said["failures"], said["interrupted"]) == (True, [], False)
    assert said["longest_gap"] == {"seconds": 1.5, "until": 754.0}
    assert said["pairs"] == [{"from": "gpu01", "to": "gpu02", "again": 11}]


@pytest.mark.parametrize(
    ("run", "after", "failure"),
    [
        ({"errors": load().errors + load().errors.__class__({"x": 2})}, {}, "failed requests: 2"),
        ({"wait": 30.1}, {}, "a request waited 30.1 s for a token"),
        ({"tokens": 0}, {}, "no token came"),
        ({}, {"generation": 3}, "restarts: 1"),
        ({}, {"fault_count": 2, "faults": [*BEFORE.faults, kept.fault()]}, "faults: 1"),
        ({}, {"verdict": "suspect"}, "the server is suspect"),
        ({}, {"asked": 7.0, "generation": 0}, "the server is replaced"),
    ],
)
def test_what_fails(run: dict[str, Any], after: dict[str, Any], failure: str) -> None:
    """One reason each."""
    verdict = judged(load(**run), dataclasses.replace(BEFORE, **after))

    assert verdict.failures == [failure]
    assert list(verdict.rows())[-1] == ("verdict", f"failed: {failure}")


def test_a_slow_server_may_take_longer() -> None:
    """As long as three of its steps."""
    slow = dataclasses.replace(BEFORE, longest_step=40.0)

    assert judged(load(wait=119.0), before=slow).failures == []
    assert judged(load(wait=121.0), before=slow).failures


def test_a_server_that_is_gone() -> None:
    """Somebody stopped it."""
    assert judged(after=None).failures == ["the server is gone"]


def test_faults_are_told_with_their_cause() -> None:
    """Only those of the soak."""
    after = dataclasses.replace(BEFORE, fault_count=2, faults=[*BEFORE.faults, kept.fault()])

    assert judged(after=after).faults == ["a rank is dead: RuntimeError: CUDA error"]


def test_one_that_was_interrupted() -> None:
    """It has not passed, and what came so far is no failure."""
    verdict = judged(load(seconds=60.0, tokens=0))

    assert (verdict.failures, verdict.interrupted) == ([], True)
    assert list(verdict.rows())[-1] == ("verdict", "interrupted")
