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
        files = [[file.path, file.rows, file.bytes, file.mark] for file in self.files]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def dump_manifest(manifest: Manifest, identity: Mapping[str, Any]) -> bytes:
    splits = [
        [split.file, split.start, split.end, split.first, split.rows] for split in manifest.splits
    ]
    payload = {**asdict(manifest), "splits": splits, "meaning": dict(identity)}
    return json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogateescape")


def load_manifest(data: bytes) -> tuple[Manifest, dict[str, Any]]:
    """Read a manifest and the identity of the job that it was made for."""
    payload = json.loads(data.decode("utf-8", "surrogateescape"))
    files = tuple(
        File(**{**entry, "columns": tuple(entry["columns"])}) for entry in payload["files"]
    )
    splits = tuple(
        Split(index=index, file=file, start=start, end=end, first=first, rows=rows)
        for index, (file, start, end, first, rows) in enumerate(payload["splits"])
    )
    manifest = Manifest(
        files=files,
        splits=splits,
        rows=payload["rows"],
        columns=tuple(payload["columns"]),
        types=payload["types"],
        digest=payload["digest"],
    )
    return manifest, payload["meaning"]
