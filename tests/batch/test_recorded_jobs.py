"""Job files of the tests and the docs: their error lines, or their identity, as recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.batch.flags import check_document
from launcher.batch.job_paths import PathBounds
from launcher.batch.job_spec import identity_of
from launcher.inventory.document import Document

JOBS = Path(__file__).parent.parent / "fixtures" / "batch" / "jobs.jsonl"
FILES = (
    *("data/chat.jsonl", "data/more.jsonl", "data/numbers.jsonl", "data/prompts.txt"),
    *("prompts.jsonl", "prompts.txt", "in.jsonl", "rows.csv"),
    *("mine.py", "prepare.py", "text_generation.py", "torch_module.py", "preprocessing.py"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the job files, with their input and code, in the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "jobs"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        is_code = name.endswith(".py")
        (folder / name).write_text("class Mine: pass\n" if is_code else '{"prompt": "x"}\n')
    return folder


def check_job(job: Any, folder: Path) -> dict[str, Any]:
    """Return the mistakes of a job, or its identity; the folder's path is `ABOVE/jobs`."""
    above = str(folder.parent)
    data = json.loads(json.dumps(job).replace("ABOVE", above))
    document = Document(data=data, lines={}, mistakes=())
    checked, mistakes = check_document(document, PathBounds(folder=folder), name="job")
    outcome: dict[str, Any] = {"mistakes": [text for _, text in document.sorted_messages(mistakes)]}
    if checked is not None:
        outcome = {"identity": identity_of(checked, ())}
    result: dict[str, Any] = json.loads(json.dumps(outcome).replace(above, "ABOVE"))
    return result


def test_jobs_have_their_recorded_mistakes_and_identities(folder: Path) -> None:
    """A change of either is a change for users: results that exist would be computed again.
    VLAUNCH_WRITE_GOLDEN=1 records them again.
    """
    records = [json.loads(line) for line in JOBS.read_text(encoding="utf-8").splitlines()]
    outcomes = [{"job": record["job"], **check_job(record["job"], folder)} for record in records]
    if os.environ.get("VLAUNCH_WRITE_GOLDEN"):
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in outcomes)
        JOBS.write_text("".join(lines), encoding="utf-8")
        records = outcomes

    assert len(records) > 250
    for record, now in zip(records, outcomes, strict=True):
        assert record == now
