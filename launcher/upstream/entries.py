"""Data files of `launcher.upstream`: their schema, and the versions that were checked."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from . import PROGRAMS

FOLDER = Path(__file__).parent
Kind = Literal[
    "log_line",
    "exit_text",
    "metric",
    "flag",
    "env",
    "route",
    "class",
    "function",
    "default",
    "file",
    "name",
]
Position = Literal["checked", "broken", "older", "newer", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Dependency on another program.

    Attributes:
        id: name within the program.
        kind: kind of dependency; `log_line` and `exit_text` are patterns, others are names;
            `default` is the value of the field `source`, `name` one of another kind, such as a
            header.
        text: the pattern or name, as the code uses it.
        source: text in the program's source with `{}` for values, if `text` cannot be searched
            there: a message that is put together, or a pattern that needs particular values.
        file: file of the program that has it; may have wildcards.
        package: package that has it, if it is not the program's own.
        used_by: files of vlaunch that use it.
        first, last: first and last version that has it; empty if unknown, or if all have it.
        without: consequence for users of a version that lacks it.
    """

    id: str
    kind: Kind
    text: str
    source: str = ""
    file: str
    package: str = ""
    used_by: tuple[str, ...]
    first: str = ""
    last: str = ""
    without: str = ""

    def is_in(self, version: str) -> bool:
        """Return True if a version should have it."""
        return not (
            (self.first and parse_version(version) < parse_version(self.first))
            or (self.last and _release(version, self.last) > parse_version(self.last))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Versions that cannot work: those older than `below`."""

    below: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """Versions of a program: checked against its source, tried on lab hosts, and rejected."""

    program: str
    checked: tuple[str, ...]
    tried: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = ()

    @property
    def oldest(self) -> str:
        """Oldest checked version; empty if none was checked."""
        return min((*self.checked, *self.tried), key=parse_version, default="")

    @property
    def newest(self) -> str:
        """Newest checked version; empty if none was checked."""
        return max((*self.checked, *self.tried), key=parse_version, default="")

    @property
    def broken_below(self) -> str:
        """Oldest version that is not rejected; empty if none is."""
        return max((item.below for item in self.rejected), key=parse_version, default="")

    def reasons(self, version: str) -> tuple[str, ...]:
        """Return the reasons why a version cannot work; empty if it may."""
        if not is_version(version):
            return ()
        return tuple(
            item.reason
            for item in self.rejected
            if _release(version, item.below) < parse_version(item.below)
        )

    def position(self, version: str) -> Position:
        """Return the position of a version: `older` and `newer` ones may work, `broken` ones
        cannot. Patch releases are like the checked release that they patch.
        """
        if not is_version(version) or not self.oldest:
            return "unknown"
        if self.reasons(version):
            return "broken"
        if _release(version, self.oldest)[:2] < parse_version(self.oldest)[:2]:
            return "older"
        newer = parse_version(version)[:2] > parse_version(self.newest)[:2]
        return "newer" if newer else "checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Data file of a program: its name for users, its versions and its entries by id."""

    name: str
    title: str
    package: str
    versions: VersionRange
    entries: dict[str, Entry]

    def lost(self, version: str) -> tuple[Entry, ...]:
        """Return the entries that a version lacks, of those with a consequence for users."""
        return tuple(
            entry for entry in self.entries.values() if entry.without and not entry.is_in(version)
        )


def is_version(text: str) -> bool:
    """Return True for text that starts with a release, such as `0.33.0rc1`."""
    return re.match(r"v?\d+\.\d+", text) is not None


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a release: (0, 33, 0) for `0.33.0rc1+cpu`."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    return tuple(int(part) for part in match[1].split("."))


def _release(version: str, other: str) -> tuple[int, ...]:
    """Return a version with as many numbers as another: 0.19.1 is 0.19 to a limit of 0.19."""
    return parse_version(version)[: len(parse_version(other))]


@cache
def load_program(name: str) -> Program:
    """Return the data file of a program; `name` is one of PROGRAMS."""
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    versions = data["versions"]
    return Program(
        name=name,
        title=data["title"],
        package=data.get("package", ""),
        versions=VersionRange(
            program=name,
            checked=tuple(versions.get("checked", ())),
            tried=tuple(versions.get("tried", ())),
            rejected=tuple(Rejection(**item) for item in versions.get("rejected", ())),
        ),
        entries={
            id: Entry(id=id, **{**fields, "used_by": tuple(fields["used_by"])})
            for id, fields in data["entries"].items()
        },
    )


def version_range(name: str) -> VersionRange:
    """Return the checked, tried and rejected versions of a program."""
    return load_program(name).versions


def pack_texts() -> bytes:
    """Return a module with the texts of all entries, for archives in place of `texts.py`."""
    texts = {
        name: {entry.id: entry.text for entry in load_program(name).entries.values()}
        for name in PROGRAMS
    }
    return f"TEXTS = {texts!r}\nload_texts = TEXTS.__getitem__\n".encode()
