"""Draft of a job: a parsed file with resolved paths, the code it ships, and its invalid keys."""

import ast
import re
import sys
import warnings
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from launcher.batch import inputs, job_paths
from launcher.batch.checked_job import Source
from launcher.batch.inputs import MAX_CODE_BYTES, MAX_FILES
from launcher.batch.job import Job
from launcher.batch.job_paths import PathBounds, PathError, quote_path
from launcher.batch.job_values import Mode
from launcher.core.similar import did_you_mean
from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake, YamlPath, describe_value
from launcher.inventory.partial_validation import validate_parts

# A file of such a name would shadow a module that the driver, or the class itself, imports.
_RESERVED_MODULES = {
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
    """Resolved paths of a job.

    `names` are the names that show a source's format: its files', or its own.
    """

    sources: tuple[Source, ...] = ()
    names: tuple[tuple[str, ...], ...] = ()
    to: Source | None = None
    targets: dict[str, str] = field(default_factory=dict)
    code: dict[str, dict[str, Path]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A parsed job file; rules should not report `invalid_paths` again."""

    file: Job
    document: Document
    invalid_paths: frozenset[YamlPath]
    paths: ResolvedPaths

    @property
    def mode(self) -> Mode:
        """The job's mode."""
        return self.file.mode

    def is_written(self, *where: str | int) -> bool:
        """Return True if the file sets the key at this path."""
        return where in self.document.lines

    def is_valid(self, *where: str | int) -> bool:
        """Return True if this path and its parents have no mistake."""
        return not any(where[:length] in self.invalid_paths for length in range(1, len(where) + 1))

    def whole(self, *where: str | int) -> bool:
        """Return True if this path, its parents and everything below have no mistake."""
        inside = any(broken[: len(where)] == where for broken in self.invalid_paths)
        return self.is_valid(*where) and not inside


def draft_job(document: Document, within: PathBounds) -> tuple[Draft | None, list[Mistake]]:
    """Validate every value on its own and resolve every path.

    The draft is None when too little is valid.
    """
    file, mistakes = validate_parts(document.data, Job, _placeholder)
    if file is None:
        return None, mistakes
    broken = {mistake.yaml_path for mistake in mistakes}
    paths, misplaced = _resolve_paths(file, within, frozenset(broken))
    broken |= {mistake.yaml_path for mistake in misplaced}
    return (
        Draft(file=file, document=document, invalid_paths=frozenset(broken), paths=paths),
        mistakes + misplaced,
    )


def code_target(target: str, within: PathBounds) -> tuple[str, dict[str, Path]]:
    """Return `MODULE:NAME` and the file to ship for it, if any; raises PathError.

    Args:
        target: `FILE.py:NAME` or `MODULE:NAME`.
        within: where files may lie.
    """
    file_part, _, name = target.rpartition(":")
    if not file_part.endswith(".py"):
        return target, {}
    path = _resolve_file(file_part, within)
    module = Path(file_part).stem
    if not module.isidentifier():
        raise PathError(
            "should be a file whose name is a Python name, such as my_model.py, not"
            f" {describe_value(Path(file_part).name)}"
        )
    if module in _RESERVED_MODULES:
        raise PathError(
            f"should have another file name: `{module}` is the name of an existing module"
        )
    _check_name(path, name)
    return f"{module}:{name}", {f"{module}.py": path}


def code_files(entry: str, within: PathBounds) -> dict[str, Path]:
    """Return the files of one entry of `files`, by their names in the job; raises PathError.

    A file keeps its name, a folder its name and its contents' paths.
    """
    path = within.resolve(entry)
    if not path.is_dir():
        files = {path.name: _resolve_file(entry, within)}
    else:
        top = "" if path == within.folder.resolve() else f"{path.name}/"
        files = {
            f"{top}{file.relative_to(path).as_posix()}": _check_bounds(file, within)
            for file in _list_code(path)
        }
    for name in files:
        if not _NAME.fullmatch(name):
            raise PathError(
                "should have a plain name there: letters, digits, `.`, `_` and `-`, not"
                f" {describe_value(name)}"
            )
    return files


def _placeholder(where: YamlPath) -> object:
    """Return a value for a missing or invalid key, so that the rest is still checked."""
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


def _resolve_paths(
    file: Job, within: PathBounds, broken: frozenset[YamlPath]
) -> tuple[ResolvedPaths, list[Mistake]]:
    mistakes: list[Mistake] = []
    sources, names = _resolve_sources(file, within, broken, mistakes)
    output = None
    if not {("write",), ("write", "path")} & broken:
        try:
            output = job_paths.parse_target(file.write.path, within)
        except PathError as error:
            mistakes.append(Mistake(yaml_path=("write", "path"), text=str(error)))
    targets: dict[str, str] = {}
    shipped: dict[str, dict[str, Path]] = {}
    for stage, key, target, extra_files in _code_stages(file):
        if not {(stage,), (stage, key)} & broken:
            shipped[stage] = {}
            try:
                targets[stage], shipped[stage] = code_target(target, within)
            except PathError as error:
                mistakes.append(Mistake(yaml_path=(stage, key), text=str(error)))
            mistakes += _resolve_files(stage, extra_files, within, shipped)
    paths = ResolvedPaths(
        sources=tuple(sources), names=tuple(names), to=output, targets=targets, code=shipped
    )
    return paths, mistakes


def _resolve_sources(
    file: Job, within: PathBounds, broken: frozenset[YamlPath], mistakes: list[Mistake]
) -> tuple[list[Source], list[tuple[str, ...]]]:
    sources: list[Source] = []
    names: list[tuple[str, ...]] = []
    if any(where[:1] == ("read",) and where[1:2] in ((), ("paths",)) for where in broken):
        return sources, names
    readers: dict[Path, str] = {}
    for index, text in enumerate(file.read.paths):
        try:
            source = job_paths.parse_source(text, within)
            files = inputs.list_files(source, within) if source.where == "control" else []
        except PathError as error:
            mistakes.append(Mistake(yaml_path=("read", "paths", index), text=str(error)))
            continue
        duplicate = _duplicate_reason(files, text, readers)
        if duplicate:
            mistakes.append(Mistake(yaml_path=("read", "paths", index), text=duplicate))
        sources.append(source)
        names.append(tuple(listed.label for listed in files) or (source.text,))
    return sources, names


def _duplicate_reason(files: list[inputs.InputFile], path: str, readers: dict[Path, str]) -> str:
    """Record each file's path in `readers`; return the reason against a file read twice."""
    for file in files:
        if file.path in readers:  # also by two names in one folder
            return (
                f"{describe_value(file.label)} is read twice, by {readers[file.path]} and {path}:"
                " each row has one answer"
            )
        readers[file.path] = path
    return ""


def _code_stages(file: Job) -> list[tuple[str, str, str, tuple[str, ...]]]:
    stages = []
    if file.predict is not None:
        stages.append(("predict", "class", file.predict.class_, file.predict.files))
    if file.preprocess is not None:
        stages.append(("preprocess", "function", file.preprocess.function, file.preprocess.files))
    return stages


def _resolve_files(
    stage: str,
    extra_files: tuple[str, ...],
    within: PathBounds,
    shipped: dict[str, dict[str, Path]],
) -> list[Mistake]:
    mistakes = []
    for index, entry in enumerate(extra_files):
        try:
            files = code_files(entry, within)
        except PathError as error:
            mistakes.append(Mistake(yaml_path=(stage, "files", index), text=str(error)))
            continue
        for name, path in files.items():
            conflict = next(
                (
                    stage_files[name]
                    for stage_files in shipped.values()
                    if stage_files.get(name, path) != path
                ),
                None,
            )
            if conflict is not None:
                text = (
                    f"should not ship another file as {describe_value(name)}:"
                    f" {job_paths.quote_path(conflict)} has that name already"
                )
                mistakes.append(Mistake(yaml_path=(stage, "files", index), text=text))
        shipped[stage] |= files
    return mistakes


def _list_code(folder: Path) -> list[Path]:
    # `__init__.py` starts with an underscore, too: the rule for rows is not the rule for code.
    entries = list(islice(folder.rglob("*"), MAX_FILES + 1))
    if len(entries) > MAX_FILES:
        raise PathError(f"contains more than {MAX_FILES:,} files: {quote_path(folder)}")
    paths = sorted(
        path for path in entries if path.is_file() and not _is_excluded(path.relative_to(folder))
    )
    if not paths:
        raise PathError(f"contains no files: {quote_path(folder)}")
    return paths


def _is_excluded(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _check_bounds(path: Path, within: PathBounds) -> Path:
    return within.check_inside(path.resolve(), str(path))


def _resolve_file(text: str, within: PathBounds) -> Path:
    path = within.resolve(text)
    if not path.is_file():
        raise PathError(f"no such file: {quote_path(path)}")
    if path.stat().st_size > MAX_CODE_BYTES:
        raise PathError(
            f"{describe_value(text)} is larger than {MAX_CODE_BYTES // 2**20} MiB; put it on"
            " the nodes"
        )
    return path


def _check_name(path: Path, name: str) -> None:
    """Raise PathError if the file cannot define `name`.

    Syntax that this Python rejects may be valid in the image, so it passes.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
    if name not in names and "*" not in names:
        suggestion = did_you_mean(name, sorted(names))
        raise PathError(f"{describe_value(path.name)} has no `{name}`{suggestion}")
