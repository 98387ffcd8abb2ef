"""Manifest of the input: files, splits and column types; stored as WORK/manifest.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """An input file. `columns` is a CSV's header, `delimiter` its cell separator."""

    path: str
    rows: int
    bytes: int
    mark: str
    columns: tuple[str, ...] = ()
    delimiter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows `first` to `last` of the job: bytes `start` to `end` of a file, or Parquet row group
    `start`, of `end - start` bytes.

    `file` is an index into `Manifest.files`. A compressed file (`end` is 0) or a row group is one
    split of any size: read it as a stream.
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

    `types` are the stored types of input columns: text, any, integer, number, boolean, json,
    binary.
    """

    files: tuple[File, ...]
    splits: tuple[Split, ...]
    rows: int
    columns: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""

    @property
    def row_bytes(self) -> float:
        """Mean bytes per row in the files; compressed files take more in memory."""
        return sum(file.bytes for file in self.files) / max(self.rows, 1)

    def split_row_bytes(self, split: Split) -> float:
        """Mean bytes per row of a split."""
        file = self.files[split.file]
        size, rows = (split.end - split.start, split.rows) if split.end else (file.bytes, file.rows)
        return size / max(rows, 1)

    def fingerprint(self) -> str:
        """Return a digest of the input: rows and their numbers."""
        files = [[file.path, file.rows, file.bytes, file.mark] for file in self.files]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def dump_manifest(manifest: Manifest, identity: Mapping[str, Any]) -> bytes:
    splits = [
        [split.file, split.start, split.end, split.first, split.rows] for split in manifest.splits
    ]
    payload = {**asdict(manifest), "splits": splits, "meaning": dict(identity)}
    return json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogateescape")


def load_manifest(data: bytes) -> tuple[Manifest, dict[str, Any]]:
    """Parse a manifest and the identity of its job."""
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
