"""Summary of all runs of a job."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.batch.driver import ledger, summary
from launcher.batch.driver.progress import Tracker
from tests.batch.driver.jobs import job, surveyed


def test_the_summary_covers_all_runs(tmp_path: Path) -> None:
    """Killed ones too, from their progress. It is stored beside the answers of a finished job."""
    (tmp_path / "in.jsonl").write_bytes(b'{"n": 1}\n' * 10)
    spec = job(tmp_path, tmp_path / "in.jsonl")
    manifest = surveyed(spec)
    for _ in range(2):
        killed = Tracker(spec)
        killed.begin(10, 0, 0)
        killed.count(done=2, tokens_out=5, tokens_cached=1)
        killed.set("running")
    book = ledger.recover(spec, manifest)
    failed = Tracker(spec)
    failed.begin(10, 4, 0)
    summary.write_summary(spec, manifest, book, failed, "failed")
    failed.fail("no")
    assert not (tmp_path / "out" / "summary.json").exists()
    last = Tracker(spec)
    last.begin(10, 4, 0)
    last.count(done=5, errors=1, tokens_in=3, tokens_out=7, tokens_cached=2)
    book.add("rows", range(9))
    book.add("errors", [9])
    message = summary.write_summary(spec, manifest, book, last, "done")

    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == json.loads(
        json.dumps(message)
    )
    assert [run["ended"] for run in message["runs"]] == ["lost", "lost", "failed", "done"]
    assert [run["done"] for run in message["runs"]] == [2, 2, 0, 5]
    assert (
        message["state"],
        message["rows"],
        message["done"],
        message["errors"],
        message["tokens_out"],
    ) == (
        "done",
        10,
        9,
        1,
        17,
    )
    assert message["tokens_cached"] == 4
    assert set(message["versions"]) == {"vllm", "ray", "torch", "python"}
