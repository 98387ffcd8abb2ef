"""Command lines in pieces."""

from __future__ import annotations

import pytest

from launcher.recipes.words import last, options


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--a", "1", "--b"], [("--a", "1"), ("--b",)]),
        (["--a=1", "-tp", "2"], [("--a=1",), ("-tp", "2")]),
        (["--layers", "one", "two"], [("--layers", "one", "two")]),
        (["--seed", "-1"], [("--seed", "-1")]),
        (["--config", '{"a": "--b"}'], [("--config", '{"a": "--b"}')]),
        (["--max-model-len auto", "--x"], [("--max-model-len", "auto"), ("--x",)]),
        (["--template=a b"], [("--template=a b",)]),
    ],
)
def test_options(words: list[str], found: list[tuple[str, ...]]) -> None:
    """An option has the words behind it; what a recipe writes as one word is split as a shell
    would.
    """
    assert [each.words for each in options(words)] == found


def test_the_last_counts() -> None:
    """Of an option that is given twice in whatever spelling, the last is kept, where it stands."""
    found = last(options(["--max_model_len", "1", "--b", "--max-model-len=2"]))

    assert [each.words for each in found] == [("--b",), ("--max-model-len=2",)]
