"""Which of the helper programs an export needs: those that it starts, and what they import."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache

from launcher.plan import files

# Started by containers themselves, each with what it imports.
_ENTRY = "entry.sh"
SERVING = ("head.py",)
GATE = ("network_gate.py", "network.py")
_PACKAGE = "lib/vlaunch_agent"


def batch() -> Mapping[str, str]:
    """Return the programs that a batch job needs on the head and in its replicas, by path."""
    return files.batch_texts()


@cache
def needed(programs: tuple[str, ...]) -> Mapping[str, str]:
    """Return the text of programs and of what they import, by path, sorted."""
    texts = files.payload_texts()
    found, left = {_ENTRY}, list(programs)
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _imported(path, texts)
    return {path: texts[path] for path in sorted(found)}


def _imported(path: str, texts: Mapping[str, str]) -> Iterator[str]:
    inside = path.startswith(f"{_PACKAGE}/")
    if inside:
        yield f"{_PACKAGE}/__init__.py"
    for statement in ast.walk(ast.parse(texts[path])):
        for name in _names(statement, inside=inside):
            if name in texts:
                yield name


def _names(statement: ast.AST, *, inside: bool) -> Collection[str]:
    """Return the files that an import may mean."""
    if isinstance(statement, ast.Import):
        return [f"{each.name}.py" for each in statement.names]
    if not isinstance(statement, ast.ImportFrom):
        return []
    module = statement.module or ""
    if statement.level and inside:
        return (
            [f"{_PACKAGE}/{module}.py"]
            if module
            else [f"{_PACKAGE}/{each.name}.py" for each in statement.names]
        )
    package, _, name = module.partition(".")
    return [f"{_PACKAGE}/{name}.py"] if package == "vlaunch_agent" else [f"{module}.py"]
