"""What a survey found: the files, where they are cut, and the types of kept columns.

Stored as WORK/manifest.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """An input file. `columns` is a CSV's header, `delimiter` what separates its cells."""

    path: str
    rows: int
    bytes: int
    mark: str
    columns: tuple[str, ...] = ()
    delimiter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows `first` to `last` of the job: bytes `start` to `end` of a file, or the row group `start`
    of a Parquet file.

    `file` counts in `Manifest.files`. A compressed file and a row group are one split however
    large: read it as a stream.
    """

    index: int
    file: int
    start: int
    end: int
    first: int
    rows: int

    @property
    def last(self) -> int:
        return self.first + self.rows - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The input of a job.

    `types` says how kept columns are stored: text, any, integer, number, boolean, json, binary.
    """

    files: tuple[File, ...]
    splits: tuple[Split, ...]
    rows: int
    columns: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""

    @property
    def row_bytes(self) -> float:
        """How many bytes of its file a row takes on average; fewer than in memory where the file is
        compressed.
        """
        return sum(file.bytes for file in self.files) / max(self.rows, 1)

    def fingerprint(self) -> str:
        """A digest of the input alone: which rows have which numbers."""
        found = [[file.path, file.rows, file.bytes, file.mark] for file in self.files]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def dumped(manifest: Manifest, identity: Mapping[str, Any]) -> bytes:
    splits = [[each.file, each.start, each.end, each.first, each.rows] for each in manifest.splits]
    said = {**asdict(manifest), "splits": splits, "meaning": dict(identity)}
    return json.dumps(said, ensure_ascii=False).encode("utf-8", "surrogateescape")


def loaded(data: bytes) -> tuple[Manifest, dict[str, Any]]:
    """Read a manifest and the identity of the job that it was made for."""
    said = json.loads(data.decode("utf-8", "surrogateescape"))
    files = tuple(File(**{**each, "columns": tuple(each["columns"])}) for each in said["files"])
    splits = tuple(
        Split(index=index, file=file, start=start, end=end, first=first, rows=rows)
        for index, (file, start, end, first, rows) in enumerate(said["splits"])
    )
    manifest = Manifest(
        files=files,
        splits=splits,
        rows=said["rows"],
        columns=tuple(said["columns"]),
        types=said["types"],
        digest=said["digest"],
    )
    return manifest, said["meaning"]
