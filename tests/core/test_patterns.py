"""Failure patterns shared by the batch driver and the launcher."""

from __future__ import annotations

import pytest

from launcher.batch.driver import failures
from launcher.core import patterns
from launcher.tools import symptoms

SHARED = {
    name: value.pattern if isinstance(value, patterns.SharedFailure) else value
    for name, value in vars(patterns).items()
    if name.isupper()
}


@pytest.mark.parametrize("name", SHARED)
def test_a_pattern_is_used_on_both_sides(name: str) -> None:
    """Others belong to their own module."""
    assert any(SHARED[name] in symptom.pattern for symptom in symptoms.TABLE)
    assert any(SHARED[name] in symptom.pattern for symptom in failures.FAILURE_PATTERNS)


def test_a_failure_has_one_cause_and_one_fix() -> None:
    """A batch job's own error and `vlaunch doctor` agree on what both recognize."""
    named = [
        value for value in vars(patterns).values() if isinstance(value, patterns.SharedFailure)
    ]
    assert named
    for failure in named:
        (symptom,) = [item for item in symptoms.TABLE if failure.pattern in item.pattern]
        assert symptom.cause == failure.cause
        assert failure.batch in (symptom.batch, symptom.fix)
        (own,) = [item for item in failures.FAILURE_PATTERNS if failure.pattern in item.pattern]
        assert own.hint == failure.batch
        assert own.message == failure.cause or "{0}" in own.message  # which names the argument


def test_no_pattern_is_defined_twice() -> None:
    """Alternatives in both tables come from the shared module."""
    mine, theirs = (
        {
            alternative.removeprefix("(?i)").lower()
            for symptom in table
            for alternative in _unshared(symptom.pattern).split("|")
        }
        for table in (failures.FAILURE_PATTERNS, symptoms.TABLE)
    )

    assert (mine & theirs) - {""} == set()


def _unshared(pattern: str) -> str:
    """Return a pattern without the shared ones."""
    for shared in SHARED.values():
        pattern = pattern.replace(shared, "")
    return pattern
