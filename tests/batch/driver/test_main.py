"""The driver around a pipeline: finished rows are committed, and every outcome is reported. Without
pending rows no pipeline starts.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from launcher.batch.driver import __main__ as driver
from launcher.batch.driver import budget
from launcher.batch.driver.job_file import Failed
from launcher.batch.driver.results import Converter, Part
from tests.batch.driver.jobs import answered, failed, pending_rows
from tests.ssh.processes import awaited

Pipeline = Callable[..., Iterator[list[dict[str, Any]]]]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work folder of a job over ten rows."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(10)))
    folder = tmp_path / "work"
    folder.mkdir()
    requests = {
        "version": 1,
        "job": "demo",
        "cluster": "lab",
        "mode": "engine",
        "work": str(folder),
        "identity": {"model": "tiny"},
        "digest": "d1",
        "model": "tiny",
        "prompt": {"column": "text"},
        "read": {"paths": [str(source)], "format": "jsonl"},
        "keep": {},
        "write": {
            "path": str(tmp_path / "out"),
            "format": "jsonl",
            "rows_per_file": 4,
            "seconds": 30,
        },
    }
    (folder / "job.json").write_text(json.dumps(requests))
    return folder


@pytest.fixture
def monitors() -> list[budget.CurrentMonitor]:
    """Return what the pipelines of a test were given."""
    return []


@pytest.fixture
def run(
    work: Path, monkeypatch: pytest.MonkeyPatch, monitors: list[budget.CurrentMonitor]
) -> Iterator[Callable[[Pipeline], int]]:
    """Run the driver with a fake pipeline of mode `engine`, and restore SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)

    def started(pipeline: Pipeline) -> int:
        def converted(
            job: Any, manifest: Any, pending: Any, progress: Any, current: Any
        ) -> Iterator[list[Part]]:
            monitors.append(current)
            rows = pipeline(job, manifest, pending, progress)
            return map(Converter(job, manifest.types).convert, rows)

        monkeypatch.setitem(driver.MODES, "engine", SimpleNamespace(run=converted))
        return driver.main(str(work))

    yield started
    signal.signal(signal.SIGTERM, before)


def read_progress(work: Path) -> dict[str, Any]:
    return json.loads((work / "progress.json").read_text())


def written(work: Path) -> list[int]:
    """Return the row numbers of all committed files, sorted."""
    lines = [
        line
        for path in sorted((work.parent / "out").glob("*/part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return sorted(json.loads(line)["row"] for line in lines)


def everything(
    job: Any, manifest: Any, pending: Any, progress: Any
) -> Iterator[list[dict[str, Any]]]:
    for row in pending_rows(manifest, pending):
        yield [failed(row) if row == 3 else answered(row)]


def test_every_row_ends_as_an_answer_or_an_error(
    work: Path, run: Callable[[Pipeline], int]
) -> None:
    """The status is 0 although a row failed."""
    assert run(everything) == 0
    assert written(work) == list(range(10))
    message = read_progress(work)
    assert (message["state"], message["rows"], message["done"], message["errors"]) == (
        "done",
        10,
        9,
        1,
    )
    assert json.loads((work / "summary.json").read_text())["state"] == "done"


def test_bytes_of_rows_weigh_the_remaining_work(work: Path, run: Callable[[Pipeline], int]) -> None:
    """Those of pending rows only; finished and failed rows reduce them."""
    trackers: list[Any] = []
    begun: list[float] = []

    def pipeline(
        job: Any, manifest: Any, pending: Any, progress: Any
    ) -> Iterator[list[dict[str, Any]]]:
        trackers.append(progress)
        begun.append(progress.forecast.bytes_left)
        yield [answered(0), failed(1)] if len(begun) == 1 else []
        raise RuntimeError("no")

    assert (run(pipeline), run(pipeline)) == (1, 1)
    size = (work.parent / "in.jsonl").stat().st_size
    assert begun == pytest.approx([size, size * 0.8])
    assert trackers[0].forecast.bytes_left == pytest.approx(size * 0.8)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_replaced_columns_are_reported_before_the_start(
    work: Path, run: Callable[[Pipeline], int], form: str
) -> None:
    """Once each, also in the summary: a question set may have a column `answer`."""
    source = {"text": "2+2?", "answer": "4", "row": "r1", "finish_reason": "human"}
    (work.parent / "in.jsonl").write_text(json.dumps(source) + "\n")
    spec = json.loads((work / "job.json").read_text())
    spec["keep"], spec["write"]["format"] = None, form
    (work / "job.json").write_text(json.dumps(spec))
    before: list[tuple[str, ...]] = []

    def pipeline(
        job: Any, manifest: Any, pending: Any, progress: Any
    ) -> Iterator[list[dict[str, Any]]]:
        before.append(progress.warnings)
        yield [answered(0, _keep=pickle.dumps(source))]

    assert run(pipeline) == 0
    expected = [
        f"input column `{name}` is not in the answers: a result has this name;"
        " rename it in the input to keep it"
        for name in ("answer", "finish_reason", "row")
    ]
    assert list(before[0]) == read_progress(work)["warnings"] == expected
    assert json.loads((work.parent / "out" / "summary.json").read_text())["warnings"] == expected


def test_a_finished_job_starts_no_pipeline(work: Path, run: Callable[[Pipeline], int]) -> None:
    """Not even its module is loaded."""

    def never(*_: Any) -> Iterator[list[dict[str, Any]]]:
        raise AssertionError("started")

    assert run(everything) == 0
    assert run(never) == 0
    assert written(work) == list(range(10))


def test_answers_before_a_failure_stay_and_are_not_repeated(
    work: Path, run: Callable[[Pipeline], int]
) -> None:
    """The next run gets only the pending rows."""
    prompts: list[list[int]] = []

    def breaks(
        job: Any, manifest: Any, pending: Any, progress: Any
    ) -> Iterator[list[dict[str, Any]]]:
        rows = pending_rows(manifest, pending)
        prompts.append(rows)
        yield [answered(row) for row in rows[:3]]
        if len(prompts) == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        yield [answered(row) for row in rows[3:]]

    assert run(breaks) == 1
    message = read_progress(work)
    assert message["state"] == "failed"
    assert message["error"]["message"] == "a GPU ran out of memory"
    assert written(work) == [0, 1, 2]
    assert run(breaks) == 0
    assert prompts[1] == [3, 4, 5, 6, 7, 8, 9]
    assert written(work) == list(range(10))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_killed_driver_continues_in_an_archive(work: Path, tmp_path: Path, ending: str) -> None:
    """The ledger numbers the rows of compressed files like those of plain ones."""
    source = tmp_path / f"in.jsonl.{ending}"
    data = (tmp_path / "in.jsonl").read_bytes()
    source.write_bytes(
        gzip.compress(data) if ending == "gz" else pa.compress(data, codec="zstd", asbytes=True)
    )
    spec = json.loads((work / "job.json").read_text())
    spec["read"]["paths"] = [str(source)]
    (work / "job.json").write_text(json.dumps(spec))
    program = """
import os, pickle, sys, types
from launcher.batch.driver import __main__ as driver, results, rows
from tests.batch.driver.jobs import answered

def pipeline(job, manifest, pending, *_):
    converter = results.Converter(job, manifest.types)
    for split in manifest.splits:
        for row in rows.read_split(job, manifest, split, pending[split.index]):
            number = row["_row"]
            answer = answered(number, answer=pickle.loads(row["_data"])["text"])
            yield converter.convert([answer])
            if number == 5 and sys.argv[2] == "die":
                os._exit(9)

driver.MODES["engine"] = types.SimpleNamespace(run=pipeline)
os._exit(driver.main(sys.argv[1]))
"""
    ends = [
        subprocess.run([sys.executable, "-c", program, str(work), end], check=False).returncode
        for end in ("die", "live")
    ]

    assert ends == [9, 0]
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "out").glob("rows/part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    answers = sorted((line["row"], line["answer"]) for line in lines)
    assert answers == [(row, f"row {row}") for row in range(10)]
    assert [run["ended"] for run in json.loads((work / "summary.json").read_text())["runs"]] == [
        "lost",
        "done",
    ]


def test_missing_rows_fail_the_job(work: Path, run: Callable[[Pipeline], int]) -> None:
    """A pipeline that ends early has not finished the job."""

    def loses(
        job: Any, manifest: Any, pending: Any, progress: Any
    ) -> Iterator[list[dict[str, Any]]]:
        yield [answered(row) for row in pending_rows(manifest, pending)[:-2]]

    assert run(loses) == 1
    assert read_progress(work)["error"]["message"] == "rows without an answer: 2"


def test_sigterm_keeps_answers(work: Path, run: Callable[[Pipeline], int]) -> None:
    """The state is `stopped`, even while the pipeline hangs."""
    release = threading.Event()

    def hangs(
        job: Any, manifest: Any, pending: Any, progress: Any
    ) -> Iterator[list[dict[str, Any]]]:
        yield [answered(0), answered(1)]
        os.kill(os.getpid(), signal.SIGTERM)
        release.wait(60)

    assert run(hangs) == 143
    release.set()
    assert read_progress(work)["state"] == "stopped"
    assert written(work) == [0, 1]


def test_the_watchdog_stops_a_hanging_pipeline(
    work: Path, run: Callable[[Pipeline], int], monitors: list[Any]
) -> None:
    """Its verdict is the job's failure."""
    release = threading.Event()

    class Watch:
        verdict = Failed(
            "no row was finished for 60 seconds", "the worker's last line", "run it again"
        )

    def hangs(
        job: Any, manifest: Any, pending: Any, progress: Any
    ) -> Iterator[list[dict[str, Any]]]:
        monitors[-1].monitor = Watch()
        yield [answered(0)]
        release.wait(60)

    assert run(hangs) == 1
    release.set()
    assert read_progress(work)["error"] == {
        "message": "no row was finished for 60 seconds",
        "evidence": "the worker's last line",
        "hint": "run it again",
    }
    assert written(work) == [0]


def test_a_second_driver_of_a_job_is_rejected(
    work: Path,
    run: Callable[[Pipeline], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without changing the first one's progress."""
    monkeypatch.setattr(driver, "PATIENCE", 0.2)
    with (work / "lock").open("a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        assert run(everything) == 1
    assert "another driver is using" in capsys.readouterr().err
    assert not (work / "progress.json").exists()


def test_a_changed_job_is_rejected(work: Path, run: Callable[[Pipeline], int]) -> None:
    """The state has the reason; no file is written."""
    assert run(everything) == 0
    content = json.loads((work / "job.json").read_text())
    (work / "job.json").write_text(
        json.dumps({**content, "identity": {"model": "other"}, "digest": "d2"})
    )
    assert run(everything) == 1
    assert read_progress(work)["state"] == "refused"


def test_an_unwritable_summary_fails_the_job_with_a_message(
    work: Path, run: Callable[[Pipeline], int]
) -> None:
    """In the state; the next run counts as the second one."""

    def blocked(*args: Any) -> Iterator[list[dict[str, Any]]]:
        (work.parent / "out" / "summary.json").mkdir()
        yield from everything(*args)

    assert run(blocked) == 1
    assert read_progress(work)["state"] == "failed"
    assert (
        "summary.json"
        in read_progress(work)["error"]["message"] + read_progress(work)["error"]["evidence"]
    )
    (work.parent / "out" / "summary.json").rmdir()
    assert run(everything) == 0
    summary = json.loads((work / "summary.json").read_text())
    assert [run["ended"] for run in summary["runs"]] == ["failed", "done"]


def test_a_failure_is_reported_without_a_summary(
    work: Path, run: Callable[[Pipeline], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk."""
    (work / "summary.json").mkdir()

    def breaks(*_: Any) -> Iterator[list[dict[str, Any]]]:
        yield [answered(0)]
        raise RuntimeError("No space left on device")

    assert run(breaks) == 1
    assert read_progress(work)["error"]["message"] == "a disk is full, or /dev/shm"
    assert "cannot write summary.json" in capsys.readouterr().err


def test_code_that_exits_does_not_silence_the_driver(
    work: Path, run: Callable[[Pipeline], int]
) -> None:
    """Its finished answers stay."""

    def leaves(*_: Any) -> Iterator[list[dict[str, Any]]]:
        yield [answered(0)]
        sys.exit("enough")

    assert run(leaves) == 1
    assert read_progress(work)["state"] == "failed"
    assert "enough" in read_progress(work)["error"]["message"]
    assert written(work) == [0]


def test_only_the_first_signal_interrupts(
    work: Path, run: Callable[[Pipeline], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one during the survey, or one during a failure report, changes nothing."""

    def twice(*_: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(driver.survey, "survey_input", twice)
    message = driver.BatchRun.end

    def signalled(*args: Any) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return message(*args)

    monkeypatch.setattr(driver.BatchRun, "end", signalled)
    assert run(everything) == 143
    assert read_progress(work)["state"] == "stopped"


def test_a_lock_on_a_removed_file_does_not_count(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next driver would have its own lock."""
    numbers, removed = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        if not removed:
            removed.append((work / "lock").unlink())
        numbers(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with driver.lock_work(str(work)) as lock_file:
        assert os.path.samestat(os.fstat(lock_file.fileno()), (work / "lock").stat())


def test_a_driver_whose_lock_was_removed_commits_no_more(
    work: Path, run: Callable[[Pipeline], int]
) -> None:
    """The next driver of the job would have its own lock."""

    def unlocked(
        job: Any, manifest: Any, pending: Any, progress: Any
    ) -> Iterator[list[dict[str, Any]]]:
        yield [answered(row) for row in range(4)]
        assert awaited(lambda: written(work) == [0, 1, 2, 3])
        (work / "lock").unlink()
        yield [answered(row) for row in range(4, 10)]

    assert run(unlocked) == 1
    assert "no longer belongs to this driver" in read_progress(work)["error"]["message"]
    assert written(work) == [0, 1, 2, 3]
    assert run(everything) == 0
    assert written(work) == list(range(10))


def test_a_mistake_while_writing_is_reported_as_it_is(
    work: Path, run: Callable[[Pipeline], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a disk that cannot be written; the next run continues."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(driver.ledger.Ledger, "commit", broken)
        assert run(everything) == 1
    error = read_progress(work)["error"]
    assert "a mistake" in error["message"] + error["evidence"]
    assert "written" not in error["message"]
    assert run(everything) == 0
    assert written(work) == list(range(10))


def test_a_folder_without_locks_is_no_second_driver(
    work: Path,
    run: Callable[[Pipeline], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on some network filesystems."""

    def unable(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unable)
    assert run(everything) == 1
    text = capsys.readouterr().err
    assert "cannot lock " in text
    assert "another driver" not in text
