"""Statuses of servers, and their files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from launcher.agent import observed
from launcher.agent.observed import Fault, Load, Observed
from tests import fuzz
from tests.hostile import mutate

FULL = Observed(
    name="chat",
    id="abcd1234",
    asked=1.0,
    model="m",
    state="ready",
    generation=3,
    ready_at=2.0,
    first_start=30.5,
    answered=4.0,
    seconds=0.1,
    load=Load(running=8, waiting=892, tokens_per_s=310.0),
    container="c",
    task="embedding",
    restarts=[1.0, 2.0],
    restarts_left=1,
    fault_count=2,
    ranks={"gpu1": ["TP0", "TP1"]},
    faults=[
        Fault(at=1.0, what="x"),
        Fault(at=2.0, what="y", lost=3, phases={"stopped": 0.1}, ready_again_after=1.0),
    ],
)


def plain(status: Observed) -> Any:
    """Return a status as in its file."""
    return json.loads(json.dumps(status.as_json()))


@pytest.mark.parametrize(
    "status", [FULL, Observed(name="chat", id="x", asked=0.0)], ids=["all", "little"]
)
def test_a_record_survives_a_round_trip(status: Observed) -> None:
    """An unknown count stays unknown, not 0."""
    assert observed.parse_status(plain(status)) == status


def test_unknown_fields_are_ignored() -> None:
    """A launcher may be older than the agent."""
    text = plain(FULL)

    assert observed.parse_status({**text, "new": 1, "load": {**text["load"], "new": {}}}) == FULL


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"state": "busy"},
        {"state": None},
        {"state": []},
        {"written": "now"},
        {"generation": True},
        {"written": float("nan")},
        {"asked": 10**30},
        {"load": {"running": 1}},
        {"load": 7},
        {"doing": {}},
        {"load": {"running": 1, "waiting": None}},
        {"restarts": ["x"]},
        {"faults": [7]},
        {"faults": [{"at": 1.0}]},
        {"faults": [{"at": 1.0, "what": ["x"]}]},
    ],
)
def test_invalid_records(change: dict[str, Any]) -> None:
    """They are errors, not guesses."""
    with pytest.raises(ValueError, match=r"."):
        observed.parse_status({**plain(FULL), **change})


@pytest.mark.parametrize("name", ["name", "id", "asked", "state"])
def test_required_fields(name: str) -> None:
    """All others are optional."""
    text = plain(FULL)
    del text[name]

    with pytest.raises(ValueError, match=name):
        observed.parse_status(text)


@fuzz.quick
@given(fuzz.values(sorted(plain(FULL)), ["ready", "starting"]))
def test_any_json(payload: object) -> None:
    """No other exception; `version` and `state` are required."""
    with pytest.raises(ValueError, match=r"."):
        observed.parse_status(payload)


@mutate.examples(60)
@given(chance=mutate.chances)
def test_nearly_valid_records(chance: mutate.Chance) -> None:
    """Rejected, or readable again: no caller has to check a type twice."""
    try:
        result = observed.parse_status(mutate.value(plain(FULL), chance))
    except ValueError:
        return

    assert observed.parse_status(plain(result)) == result
    assert result.state in observed.STATES
    assert all(
        isinstance(fault.what, str) and isinstance(fault.at, float) for fault in result.faults
    )
