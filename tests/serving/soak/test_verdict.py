"""Verdicts on soaks, for artificial loads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from launcher.agent.health.task import COMPLETION
from launcher.serving.soak.load import LoadGenerator
from launcher.serving.soak.verdict import judge_load, verdict_rows
from tests import supervision

BEFORE = supervision.make_record(
    verdict="answering", generation=2, fault_count=1, faults=[supervision.make_fault(what="old")]
)


def load(**changes: Any) -> LoadGenerator:
    """Return a good load, with changes."""
    run = LoadGenerator([], "m", COMPLETION, 128, 4, done=90, open=4, tokens=12_000)
    run.seconds, run.longest_wait, run.waited_until = 1800.0, 1.5, 754.0
    for seconds in (0.05, 0.06):
        run.first.add(seconds)
        run.between.add(seconds / 10)
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def judged(run: LoadGenerator | None = None, **changes: Any) -> dict[str, Any]:
    """Return the verdict on a load."""
    again = ({"gpu01": (12, 40_000)}, {("gpu01", "gpu02"): 11})
    usual = {"planned": 1800.0, "route": "directly", "before": BEFORE, "after": BEFORE}
    return judge_load(run or load(), **{**usual, "retransmits": again, **changes})


def test_a_passed_verdict() -> None:
    """It is formatted as rows and as JSON."""
    verdict = judged()
    assert list(verdict_rows(verdict)) == [
        ("requests", "90 done, 4 open at the end, 0 failed"),
        ("tokens", "12,000 (6.67 per second)"),
        ("first token", "p50 50 ms, p99 60 ms, longest 60 ms"),
        ("next token", "p50 5 ms, p99 6 ms, longest 6 ms"),
        ("longest gap", "1.50 s, until 12m 34s after the start (allowed: 30 s)"),
        ("server", "ready, restarts: 0, faults: 0"),
        ("retransmits", "gpu01: 12 of 40,000 segments (0.030%)"),
        ("", "gpu01 to gpu02: 11 segments"),
        ("verdict", "passed"),
    ]
    document = json.loads(json.dumps(verdict))
    assert (document["passed"], document["failures"]) == (True, [])
    assert document["interrupted"] is False
    assert document["longest_gap"] == {"seconds": 1.5, "until": 754.0}
    assert document["pairs"] == [{"from": "gpu01", "to": "gpu02", "again": 11}]


@pytest.mark.parametrize(
    ("run", "after", "failure"),
    [
        ({"errors": load().errors + load().errors.__class__({"x": 2})}, {}, "failed requests: 2"),
        ({"longest_wait": 30.1}, {}, "a request waited 30.1 s for a token"),
        ({"tokens": 0}, {}, "no tokens received"),
        ({}, {"generation": 3}, "restarts: 1"),
        ({}, {"fault_count": 2, "faults": [*BEFORE.faults, supervision.make_fault()]}, "faults: 1"),
        ({}, {"verdict": "suspect"}, "the server is suspect"),
        ({}, {"asked": 7.0, "generation": 0}, "the server is replaced"),
    ],
)
def test_a_failed_verdict(run: dict[str, Any], after: dict[str, Any], failure: str) -> None:
    """It has one reason per problem."""
    verdict = judged(load(**run), after=dataclasses.replace(BEFORE, **after))

    assert verdict["failures"] == [failure]
    assert list(verdict_rows(verdict))[-1] == ("verdict", f"failed: {failure}")


def test_the_longest_gap_may_be_three_steps() -> None:
    """A slow server may exceed the default limit."""
    slow = dataclasses.replace(BEFORE, longest_step=40.0)

    assert judged(load(longest_wait=119.0), before=slow)["failures"] == []
    assert judged(load(longest_wait=121.0), before=slow)["failures"]


def test_a_missing_server() -> None:
    """It was stopped during the soak."""
    assert judged(after=None)["failures"] == ["the server is gone"]


def test_faults_are_listed_with_their_cause() -> None:
    """Faults before the soak are left out."""
    after = dataclasses.replace(
        BEFORE, fault_count=2, faults=[*BEFORE.faults, supervision.make_fault()]
    )

    assert judged(after=after)["faults"] == ["a rank is dead: RuntimeError: CUDA error"]


def test_an_interrupted_soak() -> None:
    """It has neither passed nor failed, despite its few tokens."""
    verdict = judged(load(seconds=60.0, tokens=0))

    assert (verdict["failures"], verdict["interrupted"]) == ([], True)
    assert list(verdict_rows(verdict))[-1] == ("verdict", "interrupted")


def test_the_end_of_an_early_gap() -> None:
    """Its end is shown to the millisecond; without a gap, there is no end."""
    early = dict(verdict_rows(judged(load(longest_wait=0.3, waited_until=0.4))))
    assert early["longest gap"] == "300 ms, until 400 ms after the start (allowed: 30 s)"
    none = dict(verdict_rows(judged(load(longest_wait=0.0, waited_until=0.0))))
    assert none["longest gap"] == "none (allowed: 30 s)"
