"""The programs that benchmarks send to nodes: text that no other tool reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _programs() -> list[tuple[str, str]]:
    """Return place and text of each string that begins as a Python program does."""
    return [
        (f"{path.name}:{node.lineno}", node.value)
        for path in sorted(BENCHMARKS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(("import ", "from "))
        and "\n" in node.value
    ]


@pytest.mark.parametrize(("place", "text"), _programs(), ids=lambda value: value[:24])
def test_programs_that_benchmarks_send_are_python(place: str, text: str) -> None:
    """A line that was moved wrongly is found here, not after minutes of a measurement."""
    compile(text, place, "exec")
