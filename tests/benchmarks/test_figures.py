"""What `make figures` counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import (
    budget_rows,
    complexities,
    figure_rows,
    measure_file,
    print_budgets,
)

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


def test_a_package_over_its_budget_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does one without a budget; other folders do not count."""
    for name in ("big", "fine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("a = 1\n" * (8 if name == "big" else 2))
    (tmp_path / "data").mkdir()
    rows = list(budget_rows(tmp_path, {"big": 5, "fine": 5}))

    assert rows == [("big", 8, 5), ("fine", 2, 5)]
    assert not print_budgets(rows)
    assert "3 too many" in capsys.readouterr().out
    assert print_budgets(rows[1:])
    assert not print_budgets(list(budget_rows(tmp_path, {"big": 8})))
