"""Judgement of a data file's entries against the source of a version."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from launcher.upstream.entries import Entry, Program
from scripts.contract.source import Source

# ok: as the entry states, be it that this version lacks it; moved: in another file, where the code
# does not depend on it; broken: missing; back: present, although the entry states the contrary;
# elsewhere: in another package, which is not checked.
Outcome = Literal["ok", "absent", "moved", "broken", "back", "elsewhere"]
_PLACED = ("class", "function", "file", "default")  # found in their own file only
_SUFFIX = re.compile(r"_(?:total|bucket|count|sum)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome for an entry in a version; `files` of the program have it."""

    program: str
    entry: Entry
    version: str
    outcome: Outcome
    files: Sequence[str] = ()

    @property
    def is_failure(self) -> bool:
        """True for a missing entry whose data file states no consequence of its absence."""
        return self.outcome == "broken" and not self.entry.without

    def describe(self) -> str:
        """Return a line that names the entry, the version and the files of vlaunch."""
        entry = self.entry
        used = ", ".join(entry.used_by)
        line = f"{self.program} {self.version}: {entry.kind} `{entry.text}` ({entry.id}, {used})"
        match self.outcome:
            case "broken":
                return f"{line} is not in {entry.file}: {entry.without or 'nothing replaces it'}"
            case "back":
                limits = f"first: {entry.first or '-'}, last: {entry.last or '-'}"
                return f"{line} is in {', '.join(self.files[:2])}, although the entry has {limits}"
            case "moved":
                return f"{line} has moved from {entry.file} to {', '.join(self.files[:2])}"
        return f"{line}: {self.outcome}"


def judge_program(program: Program, version: str, source: Source) -> list[Finding]:
    """Return the outcome of each entry of a program in a version."""
    return [judge_entry(program.name, entry, version, source) for entry in program.entries.values()]


def judge_entry(program: str, entry: Entry, version: str, source: Source) -> Finding:
    """Return the outcome of an entry in a version."""
    outcome: Outcome
    files = [] if entry.package else list(dict.fromkeys(find_entry(entry, source)))
    if entry.package:
        outcome = "elsewhere"
    elif not entry.is_in(version):
        outcome = "back" if files else "absent"
    elif not files:
        outcome = "broken"
    elif any(fnmatch(file, entry.file) for file in files):
        outcome = "ok"
    else:  # Code that imports or patches a name needs the file; texts may come from any.
        outcome = "broken" if entry.kind in _PLACED else "moved"
    return Finding(
        program=program, entry=entry, version=version, outcome=outcome, files=tuple(files)
    )


def find_entry(entry: Entry, source: Source) -> Iterator[str]:
    """Yield the files that have an entry; those of its own file come first."""
    text = entry.source or entry.text
    match entry.kind:
        case "log_line" | "exit_text":
            files = source.find_text(text) if entry.source else source.find_pattern(text)
        case "metric":
            names = {text, _SUFFIX.sub("", text)}
            files = _files_with(source.texts, names)
        case "flag":
            files = _files_with(source.flags, {text})
        case "route":
            files = _files_with(source.arguments, {text})
        case "env":
            files = _files_with(source.texts, {text, text.removeprefix("RAY_")})
        case "name":
            files = _files_with(source.texts, {text})
        case "class" | "function":
            files = _files_with(source.names, {text})
        case "default":
            files = _files_with(source.names, {f"{entry.source} = {entry.text}"})
        case "file":
            files = [entry.file] if (source.root / entry.file).is_file() else []
    # vLLM's Rust front end repeats what the Python one has.
    same = [file for file in files if file.startswith("rust/") == entry.file.startswith("rust/")]
    yield from sorted(same, key=lambda file: not fnmatch(file, entry.file))


def _files_with(texts: dict[str, list[str]], names: set[str]) -> list[str]:
    return [file for file, candidates in texts.items() if names.intersection(candidates)]
