"""What `make figures` counts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import read, table

_CODE = '''"""A module."""

# a comment
def plain() -> int:
    """Say it.

    Twice.
    """
    return 1 if plain else 0  # no comment line


class Some:
    def method(self, rows):
        return [row for row in rows if row and row > 1]
'''


def test_a_file_is_counted(tmp_path: Path) -> None:
    """Radon's number: comprehensions, boolean operators and conditional expressions count."""
    path = tmp_path / "code.py"
    path.write_text(_CODE + f'LONG = "{"x" * 93}"\n')
    found = read(path, "code.py")

    assert (found.lines, found.long, found.skips) == (15, 1, 0)
    assert (found.conditionals, found.comments, found.docstrings) == (1, 1, 5)
    assert [(each.where, each.lines, each.complexity) for each in found.functions] == [
        ("code.py:4 plain", 6, 2),
        ("code.py:13 method", 2, 4),
    ]


def test_the_table(tmp_path: Path) -> None:
    """One line a figure."""
    path = tmp_path / "code.py"
    path.write_text(_CODE)
    said = dict(table([read(path, "code.py")] * 2))

    assert said["files / lines"] == "2 / 28"
    assert said["functions over complexity 10"] == "0 of 4 (0.0%)"
    assert said["function: median / 90th percentile / longest"] == "4 / 6 / 6"
