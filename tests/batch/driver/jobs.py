"""Small jobs in a folder for the driver tests, as changes to a minimal one."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.batch.driver import rows, survey
from launcher.batch.driver.bitmap import RowSet, row_numbers
from launcher.batch.driver.job_file import parse_job
from launcher.batch.driver.manifest import Manifest, Split
from launcher.batch.driver.sink import Sink
from launcher.batch.job import PlacedJob


def job(folder: Path, *sources: Path | str, **changes: Any) -> PlacedJob:
    """Create a job in `folder/work` for some files; changes are merged into a minimal one."""
    work = folder / "work"
    plain: dict[str, Any] = {
        "job": "demo",
        "cluster": "lab",
        "mode": "engine",
        "work": str(work),
        "identity": {"model": "tiny"},
        "digest": "d1",
        "model": "tiny",
        "read": {"paths": [str(source) for source in sources] or ["none"], "format": "jsonl"},
        "prompt": {"column": "text"},
        "keep": {},
        "write": {"path": str(changes.pop("out", folder / "out")), "format": "jsonl"},
    }
    for key, value in changes.items():
        nested = (
            isinstance(plain.get(key), dict)
            and isinstance(value, dict)
            and key not in ("keep", "identity")
        )
        plain[key] = {**plain[key], **value} if nested else value
    Path(plain["work"]).mkdir(exist_ok=True)
    return parse_job(plain)


class RowSink(Sink):
    """A sink of rows, which it converts as replicas do."""

    def add_rows(self, rows: list[dict[str, Any]]) -> int:
        return self.add(self.converter.convert(rows))


def surveyed(spec: PlacedJob) -> survey.Manifest:
    return survey.survey_input(spec, lambda _: None)


def bitmap(*numbers: int, first: int) -> bytes:
    """Return the bitmap of row numbers that begins with the byte of row `first`."""
    start = first // 8 * 8
    bits = sum(1 << number - start for number in numbers)
    return bits.to_bytes((max(numbers) - start) // 8 + 1, "little")


def all_rows(split: Split) -> bytes:
    """Return the bitmap of all rows of a split."""
    return RowSet(split.last + 1).missing(split.first, split.last)


def pending_rows(manifest: Manifest, pending: Mapping[int, bytes]) -> list[int]:
    """Return the numbers of pending rows, which are bitmaps by split."""
    return [
        number
        for split in manifest.splits
        for number in row_numbers(pending.get(split.index, b""), split.first)
    ]


def read_all(spec: PlacedJob) -> list[dict[str, Any]]:
    """Return the rows of a job's input in order, unpickled."""
    manifest = surveyed(spec)
    results = []
    for split in manifest.splits:
        for row in rows.read_split(spec, manifest, split, all_rows(split)):
            opened = {
                name: pickle.loads(row[name]) if row[name] else None for name in ("_data", "_keep")
            }
            results.append({**row, **opened})
    assert [row["_row"] for row in results] == list(range(manifest.rows))
    return results


def of(folder: Path, name: str, data: bytes, **changes: Any) -> list[dict[str, Any]]:
    """Return the rows of a file with these bytes."""
    path = folder / name
    path.write_bytes(data)
    return read_all(job(folder, path, **changes))


def errors(results: list[dict[str, Any]]) -> list[str]:
    """Return every row's error; empty for a valid one."""
    return [row["_error"] for row in results]


def answered(number: int, **columns: Any) -> dict[str, Any]:
    """Return a result row as a pipeline yields it."""
    row = {
        "answer": f"answer {number}",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "output_tokens": 2,
    }
    return {"_row": number, "_error": "", "_stage": "", "_raw": "", "_keep": b"", **row, **columns}


def failed(number: int, reason: str = "too bad", **columns: Any) -> dict[str, Any]:
    """Return an error row as a pipeline yields it."""
    return {
        "_row": number,
        "_error": reason,
        "_stage": "inference",
        "_raw": "raw",
        "_keep": b"",
        **columns,
    }
