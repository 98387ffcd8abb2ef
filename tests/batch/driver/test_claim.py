"""Two drivers and one output: the newer owns it, the older fails, and each row is written once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest

from launcher.batch.driver import __main__ as driver
from launcher.batch.driver import claim, ledger, storage
from launcher.batch.driver.job_file import Failed
from launcher.batch.driver.progress import Tracker
from launcher.batch.driver.results import Converter
from launcher.batch.job import Job, to_json
from tests.batch.driver.jobs import RowSink, answered, job, pending_rows, surveyed
from tests.ssh.processes import awaited

ROWS = 12
SERVER = Path(__file__).parents[2] / "integration" / "s3_server.py"


@pytest.fixture(
    params=["disk", "other", pytest.param("s3", marks=pytest.mark.processes)],
)
def address(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An output: on a disk, on another filesystem of pyarrow, and in an S3 server."""
    if request.param == "disk":
        yield str(tmp_path / "out")
        return
    if request.param == "other":
        far = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
        monkeypatch.setattr(storage, "connect_filesystem", lambda _: (far, "bucket"))
        yield "s3://bucket/out"
        return
    with subprocess.Popen(
        [sys.executable, str(SERVER), "127.0.0.1", "rows"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        server = json.loads(process.stdout.readline())
        host = server["url"].removeprefix("http://")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server["secret"])
        yield f"s3://rows/out?endpoint_override={host}&scheme=http&region=us-east-1"
        process.stdin.close()
        process.wait(timeout=20)


def prepared(folder: Path, work: str, out: str, **changes: Any) -> Job:
    """Return the job on a head of its own, with files of two rows."""
    source = folder / "in.jsonl"
    if not source.exists():
        source.write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(ROWS)))
    write = {"format": "jsonl", "rows_per_file": 2}
    return job(folder, source, work=str(folder / work), out=out, write=write, **changes)


def start(spec: Job) -> RowSink:
    manifest = surveyed(spec)
    return RowSink(spec, ledger.recover(spec, manifest), manifest, Tracker(spec))


def answer(sink: RowSink, *numbers: int) -> None:
    """Commit a file with these rows."""
    sink.add_rows([answered(number, answer=sink.job.work) for number in numbers])
    sink.flush()


def answer_all(sink: RowSink) -> None:
    """Answer every pending row, as the driver does until its end."""
    manifest = surveyed(sink.job)
    answer(sink, *pending_rows(manifest, sink.ledger.all_pending(manifest)))
    sink.close()
    sink.ledger.finish(manifest)


def rows(address: str) -> Counter[int]:
    """Count the rows of the output."""
    folder = storage.open_location(address).child("rows")
    lines = [line for name in folder.names() for line in folder.child(name).read().splitlines()]
    return Counter(json.loads(line)["row"] for line in lines)


def once() -> Counter[int]:
    return Counter(range(ROWS))


def test_the_older_of_two_drivers_fails(tmp_path: Path, address: str) -> None:
    """It names the newer one, whose rows and files stay; both never report success."""
    older = start(prepared(tmp_path, "old", address))
    answer(older, 0, 1)
    newer = start(prepared(tmp_path, "new", address))
    answer(newer, 11, 10)
    with pytest.raises(Failed, match="no longer belongs to this driver") as caught:
        answer(older, 2, 3)
    assert str(tmp_path / "new") in caught.value.evidence
    answer_all(newer)
    with pytest.raises(Failed):
        older.ledger.finish(surveyed(older.job))

    assert rows(address) == once()
    assert newer.ledger.done == ROWS
    assert newer.ledger.claim is not None
    assert str(tmp_path / "old") in newer.ledger.claim.before


def test_the_older_driver_fails_even_without_rows_to_write(tmp_path: Path) -> None:
    """As when the newer one has written its last rows."""
    out = str(tmp_path / "out")
    older = start(prepared(tmp_path, "old", out))
    answer_all(start(prepared(tmp_path, "new", out)))

    with pytest.raises(Failed, match="no longer belongs"):
        older.ledger.finish(surveyed(older.job))


def test_a_removed_claim_is_lost(tmp_path: Path) -> None:
    """The output may have been removed by another cluster."""
    sink = start(prepared(tmp_path, "old", str(tmp_path / "out")))
    (tmp_path / "out" / "ledger" / "run.json").unlink()

    with pytest.raises(Failed, match="no longer belongs") as caught:
        answer(sink, 0)
    assert "run.json is missing" in caught.value.evidence


@pytest.mark.parametrize("crash", [False, True])
def test_a_commit_during_a_takeover_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    """The older driver has passed the test when the newer claims the output: its file appears
    late, in the end or before a third run.
    """
    out = str(tmp_path / "out")
    older = start(prepared(tmp_path, "old", out))
    answer(older, 0, 1)
    with slow_commit(monkeypatch, "part-000002.jsonl", older, 2, 3) as release:
        newer = start(prepared(tmp_path, "new", out))
        answer(newer, 2, 4)
        if crash:
            release()
            newer = start(prepared(tmp_path, "new", out))
            answer_all(newer)
        else:
            answer(newer, 3, *range(5, ROWS))
            release()
            assert rows(out)[2] == 2
            answer_all(newer)

    assert rows(out) == once()
    names = sorted(path.name for path in (tmp_path / "out" / "rows").iterdir())
    assert names[:2] == ["part-000001.jsonl", "part-001002.jsonl"]
    again = start(prepared(tmp_path, "new", out)).ledger
    assert again.claim is not None
    assert (again.done, again.claim.before) == (ROWS, "")


def test_a_commit_while_results_are_discarded_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer driver may have other settings."""
    out = str(tmp_path / "out")
    older = start(prepared(tmp_path, "old", out))
    answer(older, 0, 1)
    with slow_commit(monkeypatch, "part-000002.jsonl", older, 2, 3) as release:
        start(prepared(tmp_path, "new", out, restart=True))
        release()
        newer = start(prepared(tmp_path, "new", out))
    assert newer.ledger.done == 0
    answer_all(newer)

    assert rows(out) == once()


def test_a_merged_ledger_keeps_late_entries_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both drivers merge the older one's entries: they are read once, and no file is deleted."""
    monkeypatch.setattr(ledger, "MERGED_FILES", 3)
    out = str(tmp_path / "out")
    older = start(prepared(tmp_path, "old", out))
    answer(older, 0)
    answer(older, 1)
    left = {path: path.read_bytes() for path in (tmp_path / "out" / "ledger").glob("part-*")}
    newer = start(prepared(tmp_path, "new", out))
    answer(newer, 2)
    stale = sorted(left)[-1]
    stale.write_bytes(b"".join(left[path] for path in sorted(left)))
    newer = start(prepared(tmp_path, "new", out))
    assert newer.ledger.done == 3
    answer_all(newer)

    assert rows(out) == once()


def test_a_driver_whose_file_vanished_names_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one removes hidden files of a crash."""
    out = str(tmp_path / "out")
    older = start(prepared(tmp_path, "old", out))
    appear = storage.rename_synced

    def overtaken(hidden: str, path: str) -> None:
        monkeypatch.setattr(storage, "rename_synced", appear)
        start(prepared(tmp_path, "new", out))
        appear(hidden, path)

    monkeypatch.setattr(storage, "rename_synced", overtaken)
    with pytest.raises(Failed, match="no longer belongs to this driver"):
        answer(older, 0)


def test_the_same_work_folder_continues_without_a_takeover(tmp_path: Path, address: str) -> None:
    """Its lock proves that the driver before has ended: no gap in the files' numbers."""
    answer(start(prepared(tmp_path, "work", address)), 0, 1)
    sink = start(prepared(tmp_path, "work", address))
    answer_all(sink)

    assert sink.ledger.claim is not None and not sink.ledger.claim.before
    assert "part-000002.jsonl" in storage.open_location(address).child("rows").names()
    assert rows(address) == once()


def test_a_moved_head_continues_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the progress and the summary, which name the driver before."""

    def pipeline(spec: Job, manifest: Any, pending: Any, *_: Any) -> Iterator[Any]:
        convert = Converter(spec, manifest.types).convert
        yield convert([answered(row) for row in pending_rows(manifest, pending)])

    monkeypatch.setitem(driver.MODES, "engine", SimpleNamespace(run=pipeline))
    out = str(tmp_path / "out")
    answer(start(prepared(tmp_path, "old", out)), 0, 1)
    spec = prepared(tmp_path, "new", out)
    (tmp_path / "new" / "job.json").write_text(json.dumps({"version": 1, **to_json(spec)}))
    assert driver.main(spec.work) == 0

    progress = json.loads((tmp_path / "new" / "progress.json").read_text())
    assert str(tmp_path / "old") in progress["warnings"][0]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["done"] == ROWS
    assert rows(out) == once()


def test_an_unreadable_claim_belongs_to_another(tmp_path: Path) -> None:
    """A driver does not write over it."""
    sink = start(prepared(tmp_path, "work", str(tmp_path / "out")))
    for text in ("", "[]", "{}", '{"run": 1}', "\xff"):
        (tmp_path / "out" / "ledger" / "run.json").write_text(text)
        assert claim.read_claim(sink.ledger.out) is None
        with pytest.raises(Failed):
            sink.ledger.check_owner()


class slow_commit:
    """A commit that stops just before its file appears, until it is released."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, sink: RowSink, *numbers: int
    ) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self.pool = ThreadPoolExecutor(1)
        rename: Callable[[str, str], None] = storage.rename_synced

        def appear(hidden: str, path: str) -> None:
            if path.endswith(name):
                data = Path(hidden).read_bytes()
                self.reached.set()
                assert self.released.wait(30)
                Path(hidden).write_bytes(data)  # an object store has no hidden file to remove
            rename(hidden, path)

        monkeypatch.setattr(storage, "rename_synced", appear)
        self.commit: Future[None] = self.pool.submit(answer, sink, *numbers)

    def __enter__(self) -> Callable[[], None]:
        assert awaited(self.reached.is_set)
        return self.release

    def release(self) -> None:
        self.released.set()
        self.commit.result(30)

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.pool.shutdown()
