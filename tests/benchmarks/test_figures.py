"""What `make figures` counts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import complexities, figure_rows, measure_file

_CODE = '''"""A module."""

# a comment
def plain() -> int:
    """Say it.

    Twice.
    """
    return 1 if plain else 0  # no comment line


class Some:
    def method(self, rows):
        if rows:
            return [row for row in rows if row and row > 1]
'''


def test_a_file_is_counted(tmp_path: Path) -> None:
    """With ruff's number for complexity, which counts statements that branch."""
    path = tmp_path / "code.py"
    path.write_text(_CODE + f'LONG = "{"x" * 93}"\n')
    figures = measure_file(path, "code.py", complexities([tmp_path])[str(path)])

    assert (figures.lines, figures.long, figures.skips) == (16, 1, 0)
    assert (figures.conditionals, figures.comments, figures.docstrings) == (1, 1, 5)
    assert [
        (function.where, function.lines, function.complexity) for function in figures.functions
    ] == [
        ("code.py:4 plain", 6, 1),
        ("code.py:13 method", 3, 2),
    ]


def test_the_table(tmp_path: Path) -> None:
    """One line a figure."""
    path = tmp_path / "code.py"
    path.write_text(_CODE)
    figures = dict(
        figure_rows([measure_file(path, "code.py", complexities([tmp_path])[str(path)])] * 2)
    )

    assert figures["files / lines"] == "2 / 30"
    assert figures["complexity: median / 90th percentile / largest"] == "2 / 2 / 2"
    assert figures["function: median / 90th percentile / longest"] == "4 / 6 / 6"
