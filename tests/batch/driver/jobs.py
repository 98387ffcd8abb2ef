"""Small jobs in a folder for the driver tests, as changes to a minimal one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from launcher.batch.driver import job as jobs
from launcher.batch.driver import rows, survey


def job(folder: Path, *sources: Path | str, **changes: Any) -> jobs.Job:
    """Create a job in `folder/work` that reads some files; `read`, `write`, … are merged into a
    minimal one.
    """
    work = folder / "work"
    plain: dict[str, Any] = {
        "version": 1,
        "name": "demo",
        "cluster": "lab",
        "mode": "engine",
        "work": str(work),
        "out": str(folder / "out"),
        "meaning": {"model": "tiny"},
        "digest": "d1",
        "model": "tiny",
        "read": {"sources": [str(source) for source in sources], "format": "jsonl"},
        "prompt": {"column": "text"},
        "keep": {},
        "write": {"format": "jsonl"},
    }
    for key, value in changes.items():
        nested = (
            isinstance(plain.get(key), dict)
            and isinstance(value, dict)
            and key not in ("keep", "meaning")
        )
        plain[key] = {**plain[key], **value} if nested else value
    Path(plain["work"]).mkdir(exist_ok=True)
    return jobs.parse_job(plain)


def surveyed(spec: jobs.Job) -> survey.Manifest:
    return survey.survey_input(spec, lambda _: None)


def read_all(spec: jobs.Job) -> list[dict[str, Any]]:
    """Return the rows of a job's input in order, unpickled."""
    manifest = surveyed(spec)
    results = []
    for split in manifest.splits:
        for row in rows.read_split(spec, manifest, split, [(split.first, split.last)]):
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
    """Return the error of each row; empty for a good one."""
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
