"""What differs between two identities of a job, as lines."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.batch.difference import difference

_ONE, _TWO = "1" * 64, "2" * 64


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({"model": "m"}, {"model": "m"}, []),
        ({"prompt.template": "a"}, {"prompt.template": "b"}, ['prompt.template: "a" → "b"']),
        ({"sampling.seed": 1}, {}, ["sampling.seed: 1 → nothing"]),
        ({}, {"read.limit": 5}, ["read.limit: nothing → 5"]),
        ({"keep": ["a", "b: text"]}, {"keep": ["a"]}, ["keep: a, b: text → a"]),
        (
            {"input x.jsonl": f"{_ONE}, 1234 bytes"},
            {"input x.jsonl": f"{_TWO}, 1240 bytes"},
            ["input x.jsonl: changed (1,234 → 1,240 bytes)"],
        ),
        (
            {"input x.jsonl": f"{_ONE}, 1234 bytes"},
            {"input x.jsonl": f"{_TWO}, 1234 bytes"},
            ["input x.jsonl: changed (still 1,234 bytes)"],
        ),
        (
            {"input x": f"{_ONE}, 1 bytes", "input order": ["x"]},
            {"input y": f"{_ONE}, 1 bytes", "input order": ["y"]},
            ["input y: new", "input x: gone"],
        ),
        ({"input order": ["x", "y"]}, {"input order": ["y", "x"]}, ["input order: x, y → y, x"]),
        ({"code a.py": "?"}, {"code a.py": f"{_ONE}, 1 bytes"}, ["code a.py: changed"]),
    ],
)
def test_each_change_is_one_line(old: dict[str, Any], new: dict[str, Any], told: list[str]) -> None:
    """In the words of the job file."""
    assert difference(old, new) == told


def test_a_long_value_is_shown_around_the_change() -> None:
    """A template of a page differs in one word."""
    old, new = "a" * 500 + "X" + "b" * 500, "a" * 500 + "Y" + "b" * 500

    (line,) = difference({"prompt.template": old}, {"prompt.template": new})

    before, after = line.removeprefix("prompt.template: ").split(" → ")
    assert "aX" in before
    assert "Yb" in after
    assert len(line) < 180


def test_nothing_from_a_node_reaches_the_terminal_as_it_is() -> None:
    """Neither in a value nor in a key."""
    lines = difference({"a\x1b[31m\n": "x\x1b]0;y\x07\u202e", "b": {"c": ["\n"]}}, {})

    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
