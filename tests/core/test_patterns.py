"""Failures that the driver of batches and the launcher both know have one pattern."""

from __future__ import annotations

import pytest

from launcher.batch.driver import failures
from launcher.core import patterns
from launcher.tools import symptoms

SHARED = {name: value for name, value in vars(patterns).items() if name.isupper()}


@pytest.mark.parametrize("name", SHARED)
def test_a_pattern_is_used_on_both_sides(name: str) -> None:
    """One that only one of them needs stands with it."""
    assert any(SHARED[name] in symptom.pattern for symptom in symptoms.TABLE)
    assert any(SHARED[name] in symptom.pattern for symptom in failures.KNOWN_FAILURES)


def test_no_pattern_is_defined_twice() -> None:
    """Each alternative that both tables have comes from the one place."""
    mine, theirs = (
        {
            alternative.removeprefix("(?i)").lower()
            for symptom in table
            for alternative in _own(symptom.pattern).split("|")
        }
        for table in (failures.KNOWN_FAILURES, symptoms.TABLE)
    )

    assert (mine & theirs) - {""} == set()


def _own(pattern: str) -> str:
    """Return what is left of a pattern without the shared ones."""
    for shared in SHARED.values():
        pattern = pattern.replace(shared, "")
    return pattern
