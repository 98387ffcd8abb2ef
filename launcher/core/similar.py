"""Suggestions for mistyped names."""

import difflib
from collections.abc import Iterable


def find_similar(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the candidate most similar to a name; empty if none is."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``; did you mean `similar`?`` for the candidate most similar to a name, if any is."""
    similar = find_similar(name, candidates, cutoff=cutoff)
    return f"; did you mean `{similar}`?" if similar else ""
