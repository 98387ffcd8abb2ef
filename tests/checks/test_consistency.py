"""What must be equal on all nodes."""

from __future__ import annotations

import pytest

from launcher.checks.consistency import alike, having, usual
from launcher.checks.shape import Finding, failed


def differs(node: str, value: int, common: int, others: str) -> Finding:
    """Tell a judge's whole knowledge."""
    return failed(node, f"{value}, while {others} has {common}")


@pytest.mark.parametrize(
    ("values", "common"),
    [
        ({}, None),
        ({"a": 1}, 1),
        ({"a": 1, "b": 2, "c": 2}, 2),
        ({"a": 2, "b": 1}, 2),
        ({"a": 1, "b": 2}, 1),
    ],
)
def test_most_nodes_are_right_and_of_two_the_first(
    values: dict[str, int], common: int | None
) -> None:
    """The head comes first in most inventories."""
    assert usual(values) == common


def test_the_odd_one_is_told_from_whom_it_differs() -> None:
    """And the others pass with the value."""
    found = alike({"n1": 1, "n2": 7, "n3": 1}, differs, shown=lambda value: f"value {value}")

    assert [(each.status, each.text) for each in found] == [
        ("pass", "value 1"),
        ("fail", "7, while n[1,3] has 1"),
        ("pass", "value 1"),
    ]
    assert having({"n1": 1, "n2": 7}, 7) == "n2"
