"""Suggestions for mistyped names."""

from __future__ import annotations

from launcher.core.similar import did_you_mean, find_similar


def test_the_most_similar_name_is_suggested() -> None:
    """Nothing is, if no name is similar."""
    assert find_similar("gpu11", ["gpu1", "cpu", "gpu21"]) == "gpu1"
    assert find_similar("statsu", ["status", "stop"]) == "status"
    assert find_similar("x", ["status", "stop"]) == ""


def test_a_suggestion_continues_a_sentence() -> None:
    """A higher cutoff suggests less."""
    assert did_you_mean("statsu", ["status", "stop"]) == "; did you mean `status`?"
    assert did_you_mean("statsu", ["status", "stop"], cutoff=0.9) == ""
