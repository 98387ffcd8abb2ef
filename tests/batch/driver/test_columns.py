"""Types of copied columns, and values of other types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.batch.driver.jobs import errors, of


def test_values_must_fit_their_columns(tmp_path: Path) -> None:
    """A later value of another type is an error row with the remedy."""
    data = (
        b"".join(b'{"score": %d}\n' % n for n in range(1100))
        + b'{"score": "high"}\n{"score": null}\n{}\n{"score": 2.5}\n'
    )
    rows = of(tmp_path, "a.jsonl", data, keep={"score": None}, write={"format": "parquet"})

    text = "column score holds text, the rows before it whole numbers; set `keep: {score: text}`"
    assert errors(rows)[1100:] == [
        text,
        "",
        "",
        "column score holds numbers, the rows before it whole numbers; set `keep: {score: text}`",
    ]
    assert rows[1101]["_keep"] == {"score": None}


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [
        ("text", 5, "5"),
        ("text", {"a": 1}, '{"a": 1}'),
        ("text", "x", "x"),
        ("text", True, "true"),
        ("integer", " 7 ", 7),
        ("integer", 7.0, 7),
        ("number", "1.5", 1.5),
        ("number", 2, 2.0),
        ("boolean", "True", True),
        ("json", "x", '"x"'),
        ("integer", "", None),
        ("number", "", None),
    ],
)
def test_declared_types_convert_values(
    tmp_path: Path, declared: str, value: Any, expected: Any
) -> None:
    """A CSV cell is text: it becomes a number in a numeric column."""
    rows = of(
        tmp_path,
        "a.jsonl",
        json.dumps({"c": value}).encode(),
        keep={"c": declared},
        write={"format": "parquet"},
    )

    assert (rows[0]["_error"], rows[0]["_keep"]) == ("", {"c": expected})
    assert type(rows[0]["_keep"]["c"]) is type(expected)
    assert rows[0]["_data"] == {"c": value}


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("integer", "x"),
        ("integer", 1.5),
        ("integer", True),
        ("integer", 2**64),
        ("boolean", 1),
        ("number", [1]),
        ("integer", "9" * 99),
    ],
)
def test_other_values_are_rejected(tmp_path: Path, declared: str, value: Any) -> None:
    """The reason names the column, its value and its declared type."""
    rows = of(tmp_path, "a.jsonl", json.dumps({"c": value}).encode(), keep={"c": declared})

    assert rows[0]["_error"].startswith("column c holds ")
    assert ", is declared as " in rows[0]["_error"]
