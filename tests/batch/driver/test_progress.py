"""A job's progress, as read by others while it runs."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.batch.driver import progress
from launcher.batch.driver.progress import Tracker
from tests.batch.driver.jobs import job


def read(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "work" / "progress.json").read_text())
    assert isinstance(result, dict)
    return result


def test_the_file_follows_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`set` and `fail` write at once; numbers are written at intervals."""
    monkeypatch.setenv("VLAUNCH_JOB", "batch-demo-1")
    with Tracker(job(tmp_path, "x")) as tracker:
        assert (read(tmp_path)["state"], read(tmp_path)["rows"]) == ("starting", None)
        tracker.set("reading", "a file")
        tracker.begin(100, 20, 5)
        tracker.count(done=3, errors=1, tokens_in=7, tokens_out=9)
        tracker.replicas(1, 2)
        tracker.restarted(1)
        tracker.warn("careful")
        tracker.warn("careful")
        tracker.set("running")
        message = read(tmp_path)
        assert (message["done"], message["errors"], message["before"], message["tokens_out"]) == (
            23,
            6,
            25,
            9,
        )
        assert (message["replicas"], message["restarts"], message["warnings"]) == (
            {"ready": 1, "wanted": 2},
            1,
            ["careful"],
        )
        assert message["submission"] == "batch-demo-1"
        tracker.count(done=1)
        deadline = time.monotonic() + 60
        while read(tmp_path)["done"] != 24 and time.monotonic() < deadline:
            tracker.ended.wait(0.05)
        assert read(tmp_path)["done"] == 24
        tracker.fail("it broke", "line 1\nline 2", "mend it")

    assert read(tmp_path)["state"] == "failed"
    assert read(tmp_path)["error"] == {
        "message": "it broke",
        "evidence": "line 1\nline 2",
        "hint": "mend it",
    }


def test_rates_are_those_of_the_last_half_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rows of earlier runs; the remaining time follows from the rate."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    tracker = Tracker(job(tmp_path, "x"))
    tracker.begin(10_000, 500, 0)
    tracker.set("running")
    assert tracker.rates() == (0.0, 0.0, None)
    for _ in range(100):
        now[0] += 1
        tracker.count(done=10, tokens_out=50)
        tracker.rates()
    assert tracker.rates() == (10.0, 50.0, 850.0)
    for _ in range(40):
        now[0] += 1
        tracker.rates()

    assert tracker.rates() == (0.0, 0.0, None)
    assert len(tracker.window) < 40


def test_gpu_hours_are_those_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of replicas that load, too; a killed run's until its last report."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    spec = job(tmp_path, "x", engine={"tp": 2})
    for run in range(2):
        tracker = Tracker(spec)
        tracker.replicas(0, 3, 3)
        now[0] += 1800
        tracker.replicas(3, 3)
        now[0] += 600
        tracker.replicas(1, 3, 1)
        now[0] += 900
        tracker.set("failed" if run else "running")
        now[0] += 7200  # after its end, or killed

    tracker.write()
    assert tracker.gpu_hours == pytest.approx(2 * (3 + 1 + 1))
    assert read(tmp_path)["gpu_hours"] == pytest.approx(10)


def test_texts_are_sanitized_and_short(tmp_path: Path) -> None:
    """A log or a row may contain anything, and terminals show it."""
    tracker = Tracker(job(tmp_path, "x"))
    tracker.fail("\x1b[31mred\x1b[0m \ud800 \x07" + "x" * 5000, "e" * 20_000 + "the end", "h")
    text = read(tmp_path)["error"]

    assert text["message"].startswith("red \\ud800 xxx")
    assert (len(text["message"]), len(text["evidence"])) == (1000, 8000)
    assert text["evidence"].endswith("the end")


def test_a_full_disk_does_not_stop_the_thread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is written again as soon as possible."""
    tracker = Tracker(job(tmp_path, "x"))
    with tracker:
        (tmp_path / "work").rename(tmp_path / "away")
        tracker.set("running")
        assert "cannot be written" in capsys.readouterr().err
        (tmp_path / "away").rename(tmp_path / "work")
        deadline = time.monotonic() + 60
        while read(tmp_path)["state"] != "running" and time.monotonic() < deadline:
            tracker.ended.wait(0.05)
        assert tracker.thread.is_alive()

    assert read(tmp_path)["state"] == "running"
    assert not tracker.thread.is_alive()


def test_readers_get_complete_files(tmp_path: Path) -> None:
    """It is replaced atomically, never rewritten in place."""
    tracker = Tracker(job(tmp_path, "x"))
    tracker.write()
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            tracker.warn(f"warning {time.monotonic()}")
            tracker.write()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(500):
            assert read(tmp_path)["version"] == 1
    finally:
        over.set()
        thread.join(timeout=60)


def test_the_final_state_stays(tmp_path: Path) -> None:
    """The thread of an abandoned pipeline may still report that it runs."""
    spec = job(tmp_path)
    for end in (
        lambda tracker: tracker.set("stopped"),
        lambda tracker: tracker.fail("no", state="failed"),
    ):
        tracker = Tracker(spec)
        end(tracker)
        state = tracker.state
        tracker.set("running")
        assert tracker.state == state
        assert json.loads((Path(spec.work) / "progress.json").read_text())["state"] == state
