"""What must be equal on all nodes: who is the odd one out, and from whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from launcher.checks.shape import Finding, passed
from launcher.model import fold

T = TypeVar("T", bound=Hashable)


def usual(values: Mapping[str, T]) -> T | None:
    """Return the value that most nodes have; of two that are equally frequent, the one that comes
    first.
    """
    counted = list(values.values())
    return max(counted, key=counted.count, default=None)


def having(values: Mapping[str, T], value: T) -> str:
    """Return the names of the nodes that have a value, folded."""
    return fold([name for name, each in values.items() if each == value])


def alike(
    values: Mapping[str, T],
    differs: Callable[[str, T, T, str], Finding],
    *,
    shown: Callable[[T], str] = str,
) -> Sequence[Finding]:
    """Judge that nodes have one value: `differs` makes the finding of an odd one, given the usual
    value and its nodes.

    The others pass with the value as their text, so that folding shows it once.
    """
    common = usual(values)
    if common is None:
        return []
    return [
        passed(node, shown(value))
        if value == common
        else differs(node, value, common, having(values, common))
        for node, value in values.items()
    ]
