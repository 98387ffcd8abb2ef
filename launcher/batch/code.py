"""The Python that a job brings along: which files are shipped, by which names, and where in them
the class or function is.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import warnings
from itertools import islice
from pathlib import Path

from launcher.batch.inputs import MOST_CODE, MOST_FILES
from launcher.batch.places import Bounds, Misplaced, told
from launcher.inventory.mistakes import shown

# A file of such a name would hide the module that the driver, or the class itself, imports.
_TAKEN = {
    *sys.stdlib_module_names,
    "jinja2",
    "numpy",
    "pandas",
    "pyarrow",
    "ray",
    "torch",
    "transformers",
    "vllm",
    "vlaunch_batch",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*")


def target(written: str, within: Bounds) -> tuple[str, dict[str, Path]]:
    """Return `MODULE:NAME` and the file that is shipped for it, if any; raises Misplaced.

    Args:
        written: `FILE.py:NAME` or `MODULE:NAME`.
        within: where files may lie.
    """
    place, _, name = written.rpartition(":")
    if not place.endswith(".py"):
        return written, {}
    path = _file(place, within)
    module = Path(place).stem
    if not module.isidentifier():
        raise Misplaced(
            "should be a file whose name is a Python name, such as my_model.py, not"
            f" {shown(Path(place).name)}"
        )
    if module in _TAKEN:
        raise Misplaced(
            f"should be a file of another name: `{module}` is a module that others import"
        )
    _has(path, name)
    return f"{module}:{name}", {f"{module}.py": path}


def files(written: str, within: Bounds) -> dict[str, Path]:
    """Return the files of one entry of `files` by their names in the job; raises Misplaced.

    A file keeps its name, a folder its name and what is below it.
    """
    path = within.resolve(written)
    if not path.is_dir():
        found = {path.name: _file(written, within)}
    else:
        top = "" if path == within.folder.resolve() else f"{path.name}/"
        found = {
            f"{top}{one.relative_to(path).as_posix()}": _inside(one, within) for one in _code(path)
        }
    for name in found:
        if not _NAME.fullmatch(name):
            raise Misplaced(
                "should have a plain name there: letters, digits, `.`, `_` and `-`, not"
                f" {shown(name)}"
            )
    return found


def _code(folder: Path) -> list[Path]:
    # `__init__.py` starts with an underscore, too: the rule for rows is not the rule for code.
    every = list(islice(folder.rglob("*"), MOST_FILES + 1))
    if len(every) > MOST_FILES:
        raise Misplaced(f"holds more than {MOST_FILES:,} files: {told(folder)}")
    paths = sorted(
        path for path in every if path.is_file() and not _left_out(path.relative_to(folder))
    )
    if not paths:
        raise Misplaced(f"holds no file: {told(folder)}")
    return paths


def _left_out(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _inside(path: Path, within: Bounds) -> Path:
    return within.checked(path.resolve(), str(path))


def _file(written: str, within: Bounds) -> Path:
    path = within.resolve(written)
    if not path.is_file():
        raise Misplaced(f"names no file: there is no {told(path)}")
    if path.stat().st_size > MOST_CODE:
        raise Misplaced(
            f"{shown(written)} is larger than {MOST_CODE // 2**20} MiB; put it on the nodes"
        )
    return path


def _has(path: Path, name: str) -> None:
    """Refuse when the file surely has no `name`.

    What this Python cannot read, the one in the image may.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    known: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            known.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            known.add(node.id)
    if name not in known and "*" not in known:
        raise Misplaced(f"{shown(path.name)} has no `{name}`{_near(name, known)}")


def _near(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
