"""Short forms of single values in a job file."""

from __future__ import annotations

import pytest

from tests.batch.conftest import Load, Mistakes


@pytest.mark.parametrize(
    ("written", "replicas"),
    [("2", (2, 2)), ("[1, 4]", (1, 4)), ("1-4", (1, 4)), ("1 - 4", (1, 4)), ('"3"', (3, 3))],
)
def test_replicas_are_a_number_or_a_range(
    load_text: Load, written: str, replicas: tuple[int, int]
) -> None:
    """In all common forms."""
    assert load_text(f"engine: {{replicas: {written}}}").engine.replicas == replicas


@pytest.mark.parametrize(
    "written", ["0", "[0, 1]", "[2, 1]", "true", "[1]", "many", "[1, 2, 3]", "1.5", "5000"]
)
def test_replicas_are_positive_and_in_order(mistakes: Mistakes, written: str) -> None:
    """Other values are one mistake at that key."""
    (line,) = mistakes(f"engine: {{replicas: {written}}}")

    assert line.startswith("4: engine.replicas: should ")


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("[id, text]", {"id": None, "text": None}),
        ("{id: integer, text: }", {"id": "integer", "text": None}),
        ("[]", {}),
        ("", None),
    ],
)
def test_columns_have_optional_types(
    load_text: Load, keep: str, expected: dict[str, str] | None
) -> None:
    """An empty list copies none; no list copies all."""
    assert load_text(f"keep: {keep}").keep == expected
