"""A job between file and value, with the code that it ships: what the rules look at, and how much
of a broken file can still be judged.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import warnings
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from launcher.batch import inputs, places, schema
from launcher.batch.driver.job import Mode
from launcher.batch.inputs import MOST_CODE, MOST_FILES
from launcher.batch.places import Bounds, Misplaced, told
from launcher.batch.schema import JobFile
from launcher.batch.shape import Source
from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake, Where, shown
from launcher.inventory.partial_validation import validated

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPaths:
    """What the job's paths lead to.

    `names` are the names that show a source's format: its files', or its own.
    """

    sources: tuple[Source, ...] = ()
    names: tuple[tuple[str, ...], ...] = ()
    to: Source | None = None
    targets: dict[str, str] = field(default_factory=dict)
    code: dict[str, dict[str, Path]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """`broken` holds the places that have a mistake already; no rule should complain about them
    again.
    """

    file: JobFile
    document: Document
    broken: frozenset[Where]
    found: ResolvedPaths

    @property
    def mode(self) -> Mode:
        """How the job runs."""
        return schema.mode(self.file)

    def written(self, *where: str | int) -> bool:
        """Return whether the file says something at `where`."""
        return where in self.document.lines

    def sound(self, *where: str | int) -> bool:
        """Return whether `where` and what is around it was read without a mistake."""
        return not any(where[:length] in self.broken for length in range(1, len(where) + 1))

    def whole(self, *where: str | int) -> bool:
        """Return whether `where` with all around it and in it was read without a mistake."""
        inside = any(broken[: len(where)] == where for broken in self.broken)
        return self.sound(*where) and not inside


def draft(document: Document, within: Bounds) -> tuple[Draft | None, list[Mistake]]:
    """Validate each value by itself, and follow each path.

    The draft is None when too little is left.
    """
    file, mistakes = validated(document.data, JobFile, _stand_in)
    if file is None:
        return None, mistakes
    broken = {mistake.where for mistake in mistakes}
    found, misplaced = _found(file, within, frozenset(broken))
    broken |= {mistake.where for mistake in misplaced}
    return (
        Draft(file=file, document=document, broken=frozenset(broken), found=found),
        mistakes + misplaced,
    )


def code_target(written: str, within: Bounds) -> tuple[str, dict[str, Path]]:
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


def code_files(written: str, within: Bounds) -> dict[str, Path]:
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


def _stand_in(where: Where) -> object:
    """Put something where a key is required, so that the rest is still checked."""
    match where:
        case ("read",):
            return {"paths": ["x"]}
        case ("read", "paths"):
            return ["x"]
        case ("write",):
            return {"path": "x"}
        case ("write", "path") | ("prompt", "chat", int(), "content"):
            return "x"
        case ("prompt", "chat", int()):
            return {"role": "user", "content": "x"}
        case ("prompt", "chat", int(), "role"):
            return "user"
        case ("prompt",):
            return "x"
        case ("data_parallel",) | ("data_parallel", "size"):
            return 1
        case ("predict",) | ("predict", "class") | ("preprocess",) | ("preprocess", "function"):
            return "x:x"
    return None


def _found(
    file: JobFile, within: Bounds, broken: frozenset[Where]
) -> tuple[ResolvedPaths, list[Mistake]]:
    mistakes: list[Mistake] = []
    sources, names = _sources(file, within, broken, mistakes)
    to = None
    if not {("write",), ("write", "path")} & broken:
        try:
            to = places.target(file.write.path, within)
        except Misplaced as error:
            mistakes.append(Mistake(where=("write", "path"), text=str(error)))
    targets: dict[str, str] = {}
    shipped: dict[str, dict[str, Path]] = {}
    for stage, key, written, more in _stages(file):
        if not {(stage,), (stage, key)} & broken:
            shipped[stage] = {}
            try:
                targets[stage], shipped[stage] = code_target(written, within)
            except Misplaced as error:
                mistakes.append(Mistake(where=(stage, key), text=str(error)))
            mistakes += _more(stage, more, within, shipped)
    found = ResolvedPaths(
        sources=tuple(sources), names=tuple(names), to=to, targets=targets, code=shipped
    )
    return found, mistakes


def _sources(
    file: JobFile, within: Bounds, broken: frozenset[Where], mistakes: list[Mistake]
) -> tuple[list[Source], list[tuple[str, ...]]]:
    sources: list[Source] = []
    names: list[tuple[str, ...]] = []
    if any(where[:1] == ("read",) and where[1:2] in ((), ("paths",)) for where in broken):
        return sources, names
    seen: dict[Path, str] = {}
    for at, text in enumerate(file.read.paths):
        try:
            source = places.source(text, within)
            files = inputs.found(source, within) if source.where == "control" else []
        except Misplaced as error:
            mistakes.append(Mistake(where=("read", "paths", at), text=str(error)))
            continue
        twice = _read_twice(files, text, seen)
        if twice:
            mistakes.append(Mistake(where=("read", "paths", at), text=twice))
        sources.append(source)
        names.append(tuple(one.path.name for one in files) or (source.text,))
    return sources, names


def _read_twice(files: list[inputs.InputFile], path: str, seen: dict[Path, str]) -> str:
    """Note in `seen` which path reads each file; return what to say of one that is read already."""
    for one in files:
        if one.path in seen:  # also by two names in one folder
            return (
                f"{shown(one.label)} is read twice, by {seen[one.path]} and {path}: each row has"
                " one answer"
            )
        seen[one.path] = path
    return ""


def _stages(file: JobFile) -> list[tuple[str, str, str, list[str]]]:
    stages = []
    if file.predict is not None:
        stages.append(("predict", "class", file.predict.class_, file.predict.files))
    if file.preprocess is not None:
        stages.append(("preprocess", "function", file.preprocess.function, file.preprocess.files))
    return stages


def _more(
    stage: str, more: list[str], within: Bounds, shipped: dict[str, dict[str, Path]]
) -> list[Mistake]:
    mistakes = []
    for at, written in enumerate(more):
        try:
            files = code_files(written, within)
        except Misplaced as error:
            mistakes.append(Mistake(where=(stage, "files", at), text=str(error)))
            continue
        for name, path in files.items():
            other = next(
                (one[name] for one in shipped.values() if one.get(name, path) != path), None
            )
            if other is not None:
                text = (
                    f"should not ship another file as {shown(name)}: {places.told(other)} has that"
                    " name already"
                )
                mistakes.append(Mistake(where=(stage, "files", at), text=text))
        shipped[stage] |= files
    return mistakes


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
