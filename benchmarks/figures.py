"""Readability figures of the code: `make figures`.

    python -m benchmarks.figures [FOLDER …] [--over 10 | --budgets]

Lengths are in lines. Complexity is McCabe's number as ruff counts it (`C901`); `--over N` names the
functions above N instead. Comments and docstrings are shares of all lines. `--budgets` prints the
lines of each package beside its budget in pyproject.toml, and fails if one has more.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[1]
COLUMNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function or method; `where` is `path:line name`."""

    where: str
    lines: int
    complexity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """Figures of one source file."""

    lines: int
    long: int
    skips: int
    conditionals: int
    comments: int
    docstrings: int
    functions: tuple[Function, ...]


def complexities(folders: Sequence[Path]) -> Mapping[str, Mapping[int, int]]:
    """Return McCabe's number of each function, by the absolute path of its file and its line."""
    command = [
        *(sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa", "--select=C901"),
        *("--config=lint.mccabe.max-complexity=0", "--output-format=json", *map(str, folders)),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    by_file: dict[str, dict[int, int]] = defaultdict(dict)
    for row in json.loads(result.stdout):
        number = re.search(r"\((\d+) > 0\)", row["message"])
        by_file[row["filename"]][row["location"]["row"]] = int(number[1]) if number else 0
    return by_file


def measure_file(path: Path, name: str, complexity: Mapping[int, int]) -> File:
    """Count one file; `name` precedes the names of its functions. Raises SyntaxError."""
    text = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    nodes = list(ast.walk(tree))
    return File(
        lines=len(lines),
        long=sum(len(line) > COLUMNS for line in lines),
        skips=sum("# fmt: " in line for line in lines),
        conditionals=sum(isinstance(node, ast.IfExp) for node in nodes),
        comments=len(_comment_lines(text)),
        docstrings=sum(_docstring_lines(node) for node in nodes),
        functions=tuple(
            Function(
                where=f"{name}:{node.lineno} {node.name}",
                lines=(node.end_lineno or node.lineno) - node.lineno + 1,
                complexity=complexity[node.lineno],
            )
            for node in nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ),
    )


def _comment_lines(text: str) -> set[int]:
    """Return the numbers of lines that are only a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }


def _docstring_lines(node: ast.AST) -> int:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if not isinstance(node, owners) or ast.get_docstring(node, clean=False) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def figure_rows(files: Sequence[File]) -> Iterator[tuple[str, str]]:
    """Yield each figure's name and text."""
    functions = [function for file in files for function in file.functions]
    lines = sum(file.lines for file in files)
    yield "files / lines", f"{len(files)} / {lines:,}"
    yield "file: median / 90th percentile / longest", _spread([file.lines for file in files])
    yield (
        "function: median / 90th percentile / longest",
        _spread([function.lines for function in functions]),
    )
    yield (
        "complexity: median / 90th percentile / largest",
        _spread([function.complexity for function in functions]),
    )
    yield f"lines over {COLUMNS} columns", f"{sum(file.long for file in files)}"
    yield "lines kept from the formatter", f"{sum(file.skips for file in files)}"
    conditionals = sum(file.conditionals for file in files)
    yield "conditional expressions per 1,000 lines", f"{1000 * conditionals / lines:.1f}"
    comments, docstrings = (
        sum(file.comments for file in files),
        sum(file.docstrings for file in files),
    )
    yield "comments + docstrings", f"{comments / lines:.1%} + {docstrings / lines:.1%}"


def budget_rows(folder: Path, budgets: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield each package of a folder with its lines and its budget, 0 without one."""
    for package in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        files = package.rglob("*.py")
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        yield package.name, lines, budgets.get(package.name, 0)


def print_budgets(rows: Sequence[tuple[str, int, int]]) -> bool:
    """Print the packages with their budgets, and return True if all have at most these."""
    for name, lines, budget in rows:
        over = f"  {lines - budget:,} too many" if lines > budget else ""
        print(f"{name:12} {lines:6,} of {budget:6,}{over}")
    print(f"{'all':12} {sum(row[1] for row in rows):6,} of {sum(row[2] for row in rows):6,}")
    return all(lines <= budget for _, lines, budget in rows)


def _spread(values: Sequence[int]) -> str:
    tenths = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.0f} / {tenths[-1]:.0f} / {max(values):,}"


def main() -> None:
    """Print the table, the most complex functions, or the budgets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT / "launcher"])
    parser.add_argument("--over", type=int, metavar="N", help="name the functions above N instead")
    parser.add_argument("--budgets", action="store_true", help="compare packages with budgets")
    args = parser.parse_args()
    if args.budgets:
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        budgets = settings["tool"]["vlaunch"]["budgets"]
        sys.exit(not print_budgets(list(budget_rows(ROOT / "launcher", budgets))))
    paths = (path for folder in args.folders for path in sorted(folder.rglob("*.py")))
    complexity = complexities(args.folders)
    files = [
        measure_file(path, str(path.absolute().relative_to(ROOT)), complexity[str(path.absolute())])
        for path in paths
    ]
    if args.over is None:
        width = max(len(name) for name, _ in figure_rows(files))
        print("\n".join(f"{name:{width}}  {text}" for name, text in figure_rows(files)))
        return
    functions = [function for file in files for function in file.functions]
    for function in sorted(functions, key=lambda function: -function.complexity):
        if function.complexity > args.over:
            print(f"{function.complexity:3} {function.where}")


if __name__ == "__main__":
    main()
