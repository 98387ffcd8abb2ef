"""Programs for a node's own, perhaps old, Python."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[3] / "launcher"
OLDEST = {"hosts/node": (3, 6), "distribute/node": (3, 8)}
PROGRAMS = [path for folder in OLDEST for path in sorted((LAUNCHER / folder).glob("*.py"))]


def evaluated_annotations(tree: ast.Module) -> list[str]:
    """Return the annotations that Python evaluates and old versions cannot."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    arguments = [
        argument
        for function in functions
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    ]
    annotations = [*(item.annotation for item in arguments), *(item.returns for item in functions)]
    plain = (ast.Name, ast.Attribute, ast.Constant, type(None))
    return [ast.unparse(item) for item in annotations if item and not isinstance(item, plain)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_program_runs_with_the_oldest_python(program: Path) -> None:
    oldest = OLDEST[program.parent.relative_to(LAUNCHER).as_posix()]
    tree = ast.parse(program.read_text(), feature_version=oldest)
    lazy = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )
    assert not (lazy and oldest < (3, 7)), "`from __future__ import annotations` needs Python 3.7"
    assert lazy or evaluated_annotations(tree) == []
