"""A job between file and value: what the rules look at, and how much of a broken file can still be
judged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from launcher.batch import code, inputs, places, schema
from launcher.batch.driver.job import Mode
from launcher.batch.places import Bounds, Misplaced
from launcher.batch.schema import JobFile
from launcher.batch.shape import Source
from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake, Where, shown
from launcher.inventory.partial_validation import validated


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
                targets[stage], shipped[stage] = code.target(written, within)
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
            files = code.files(written, within)
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
