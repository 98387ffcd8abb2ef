"""Servers as the keeper saw them, as their file has them."""

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
    """Return a record as its file has it."""
    return json.loads(json.dumps(status.as_json()))


@pytest.mark.parametrize(
    "status", [FULL, Observed(name="chat", id="x", asked=0.0)], ids=["all", "little"]
)
def test_a_record_survives_its_file(status: Observed) -> None:
    """A record survives a round trip: an unknown count stays unknown, and is not 0."""
    assert observed.parse_status(plain(status)) == status


def test_a_newer_record_with_more_in_it_is_read() -> None:
    """A launcher that is older than the agent shows what it knows."""
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
def test_what_is_refused(change: dict[str, Any]) -> None:
    """A record that cannot be shown as it is meant is not shown as something else."""
    with pytest.raises(ValueError, match=r"."):
        observed.parse_status({**plain(FULL), **change})


@pytest.mark.parametrize("name", ["name", "id", "asked", "state"])
def test_what_must_be_there(name: str) -> None:
    """The rest has a meaning when it is absent."""
    text = plain(FULL)
    del text[name]

    with pytest.raises(ValueError, match=name):
        observed.parse_status(text)


@fuzz.quick
@given(fuzz.values(sorted(plain(FULL)), ["ready", "starting"]))
def test_no_json_raises_anything_else(payload: object) -> None:
    """Whatever lies in the file; `version` and `state` are what makes it a record."""
    with pytest.raises(ValueError, match=r"."):
        observed.parse_status(payload)


@mutate.examples(60)
@given(chance=mutate.chances)
def test_what_is_nearly_a_record(chance: mutate.Chance) -> None:
    """It is refused, or it can be read again: nobody has to look at a type twice."""
    try:
        result = observed.parse_status(mutate.value(plain(FULL), chance))
    except ValueError:
        return

    assert observed.parse_status(plain(result)) == result
    assert result.state in observed.STATES
    assert all(
        isinstance(fault.what, str) and isinstance(fault.at, float) for fault in result.faults
    )
