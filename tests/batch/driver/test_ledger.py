"""Ownership of a folder, accounting of rows, and recovery after any crash of the writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from launcher.batch.driver import ledger, storage
from launcher.batch.driver.job_file import Refused
from launcher.batch.driver.manifest import Manifest
from launcher.batch.driver.progress import Tracker
from launcher.batch.job import Job
from tests.batch.driver.jobs import RowSink, answered, failed, job, pending_rows, surveyed
from tests.ssh.processes import awaited

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent.parent
ROWS = 12


def prepared(folder: Path, **changes: Any) -> tuple[Job, Manifest]:
    """Return a job over twelve rows that writes four rows a file."""
    if not (folder / "in.jsonl").exists():
        (folder / "in.jsonl").write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(ROWS)))
    spec = job(
        folder, folder / "in.jsonl", **{"write": {"format": "jsonl", "rows_per_file": 4}, **changes}
    )
    return spec, surveyed(spec)


def run(spec: Job, manifest: Manifest) -> None:
    """Play the driver: answer every pending row, with an error for every fifth."""
    book = ledger.recover(spec, manifest, spec.retry_errors)
    sink = RowSink(spec, book, manifest, Tracker(spec))
    for number in pending_rows(manifest, book.all_pending(manifest)):
        sink.add_rows([failed(number) if number % 5 == 0 else answered(number)])
    sink.close()


def written(out: Path) -> dict[str, list[int]]:
    """Return the committed rows by kind."""
    return {
        kind: sorted(
            json.loads(line)["row"]
            for path in (out / kind).glob("part-*.jsonl")
            for line in path.read_bytes().splitlines()
        )
        for kind in ("rows", "errors")
        if (out / kind).exists()
    }


def complete(out: Path) -> None:
    result = written(out)
    assert result["errors"] == [number for number in range(ROWS) if number % 5 == 0]
    assert result["rows"] == [number for number in range(ROWS) if number % 5]
    hidden = [str(path) for path in out.rglob(".*")]
    assert hidden == []


class Crash(BaseException):
    """A simulated crash of the process."""


@contextmanager
def crashing(
    monkeypatch: pytest.MonkeyPatch, at: int, end: Callable[[], None]
) -> Iterator[count[int]]:
    """Crash at the n-th step of the writer: around a change of the disk, or within a file."""
    steps = count(1)

    def step() -> None:
        if next(steps) == at:
            end()

    def around(before: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            step()
            result = before(*args, **named)
            step()
            return result

        return wrapped

    def halfway(path: str, data: bytes) -> None:
        step()
        Path(path).write_bytes(data[: len(data) // 2])
        step()
        whole(path, data)
        step()

    def one_by_one(folder: storage.Location, names: list[str]) -> None:
        for name in names:
            step()
            delete(folder, [name])

    whole, delete = storage.write_synced, ledger.delete_replaced
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_synced", halfway)
        patch.setattr(storage, "rename_synced", around(storage.rename_synced))
        patch.setattr(storage, "sync_folder", around(storage.sync_folder))
        patch.setattr(storage.Location, "delete", around(storage.Location.delete))
        patch.setattr(ledger, "delete_replaced", one_by_one)
        patch.setattr(storage.os, "makedirs", around(os.makedirs))
        yield steps


def crash() -> None:
    raise Crash


@pytest.mark.parametrize(("retry", "merged"), [(False, 1000), (True, 1000), (False, 3), (True, 2)])
def test_a_crash_at_any_step_loses_no_row_and_doubles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry: bool, merged: int
) -> None:
    """Nor does a second crash during the recovery; files are complete at any time. The same while
    the ledger's files are merged.
    """
    monkeypatch.setattr(ledger, "MERGED_FILES", merged)
    for at in count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        spec, manifest = prepared(folder)
        if retry:
            run(spec, manifest)
            spec, manifest = prepared(folder, retry_errors=True)
        ended = True
        for _ in range(2):
            try:
                with crashing(monkeypatch, at, crash):
                    run(spec, manifest)
            except Crash:
                ended = False
            for kind, item in written(folder / "out").items():
                assert len(item) == len(set(item)), (at, kind)
        spec, manifest = prepared(folder)
        run(spec, manifest)
        complete(folder / "out")
        again = ledger.recover(spec, manifest)
        assert (again.done, again.errors, again.all_pending(manifest)) == (9, 3, {})
        if ended:
            assert at > 25
            return


KILLED = (3, 11, 19, 26, 33)


def test_killed_processes_lose_no_row(tmp_path: Path) -> None:
    """The same with real processes that are killed."""
    script = (
        "import os, pytest; from pathlib import Path; from tests.batch.driver import test_ledger"
        " as it\nfor at in it.KILLED:\n    if not (child := os.fork()):\n        asked, manifest ="
        f" it.prepared(Path({str(tmp_path)!r}) / str(at))\n        with"
        " it.crashing(pytest.MonkeyPatch(), at, lambda: os._exit(9)): it.run(asked, manifest)\n   "
        "     os._exit(0)\n    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, at"
    )
    for at in KILLED:
        (tmp_path / str(at)).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    for at in KILLED:
        run(*prepared(tmp_path / str(at)))
        complete(tmp_path / str(at) / "out")


def test_numbers_of_parts_are_never_used_again(tmp_path: Path) -> None:
    """Not even those of deleted error files."""
    spec, manifest = prepared(tmp_path)
    run(spec, manifest)
    before = {path.stem for path in (tmp_path / "out").glob("*/part-*.jsonl")}
    book = ledger.recover(spec, manifest, retry_errors=True)
    assert (book.done, book.errors) == (9, 0)
    book = ledger.recover(spec, manifest)
    run(spec, manifest)
    after = {path.stem for path in (tmp_path / "out" / "errors").glob("part-*.jsonl")}

    assert min(after) > max(before)
    complete(tmp_path / "out")


def test_rows_count_once(tmp_path: Path) -> None:
    """A repeated row is dropped, in one call or a later one; so is an unknown one."""
    spec, manifest = prepared(tmp_path)
    book = ledger.recover(spec, manifest)

    assert book.add("rows", [3, 1, 2]) == [3, 1, 2]
    assert book.add("rows", [4, 4, 1, 5]) == [4, 5]
    assert book.add("errors", [5, 6, -1, ROWS]) == [6]
    assert (book.done, book.errors) == (5, 1)
    assert pending_rows(manifest, book.all_pending(manifest)) == [0, *range(7, ROWS)]


def test_a_folder_with_other_files_is_rejected(tmp_path: Path) -> None:
    """Its files are named and unchanged."""
    spec, manifest = prepared(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()

    with pytest.raises(Refused, match="is not empty and was not written by this job") as raised:
        ledger.recover(spec, manifest)
    assert raised.value.evidence == "thesis.tex"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_an_output_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    """With the system's message."""
    spec, manifest = prepared(tmp_path)
    (tmp_path / "out").write_text("a file")

    with pytest.raises(Refused, match="out cannot be written") as raised:
        ledger.recover(spec, manifest)
    assert "ot a directory" in raised.value.evidence


def test_another_jobs_folder_is_rejected(tmp_path: Path) -> None:
    """Two jobs never write to one folder."""
    ledger.recover(*prepared(tmp_path))
    other, manifest = prepared(tmp_path, job="other", work=str(tmp_path / "work2"))

    with pytest.raises(Refused, match="belongs to the job `demo`"):
        ledger.recover(other, manifest)


def test_a_changed_job_is_rejected_with_the_difference(tmp_path: Path) -> None:
    """Existing answers came from other settings."""
    ledger.recover(*prepared(tmp_path))
    changed, manifest = prepared(
        tmp_path, identity={"model": "huge"}, digest="d2", work=str(tmp_path / "work2")
    )

    with pytest.raises(Refused, match="with other settings") as raised:
        ledger.recover(changed, manifest)
    assert raised.value.evidence == 'model: "tiny" → "huge"'
    assert "--discard-results" in raised.value.hint


def test_another_input_is_rejected_without_the_work_folder(tmp_path: Path) -> None:
    """Row numbers would mean other rows."""
    spec, manifest = prepared(tmp_path)
    ledger.recover(spec, manifest)
    (tmp_path / "work" / "manifest.json").unlink()
    (tmp_path / "in.jsonl").write_bytes(b'{"n": 1}\n')

    with pytest.raises(Refused, match="with another input"):
        ledger.recover(spec, surveyed(spec))


def test_answers_without_a_ledger_entry_are_rejected(tmp_path: Path) -> None:
    """Their rows could be written twice."""
    spec, manifest = prepared(tmp_path)
    run(spec, manifest)
    (tmp_path / "out" / "ledger" / "part-000001.json").unlink()

    with pytest.raises(Refused, match="files that are not in the ledger") as raised:
        ledger.recover(spec, manifest)
    assert "part-000001.jsonl" in raised.value.evidence


def test_a_deleted_or_truncated_file_is_redone(tmp_path: Path) -> None:
    """Its rows are pending; a partial file is removed."""
    spec, manifest = prepared(tmp_path)
    run(spec, manifest)
    first, second = sorted((tmp_path / "out" / "rows").iterdir())[:2]
    first.unlink()
    second.write_bytes(b"{")
    run(spec, manifest)

    complete(tmp_path / "out")


def change_entry(line: str, **changes: Any) -> str:
    return json.dumps({**json.loads(line), **changes})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: text.partition("\n")[0] + "\n",
        lambda text: "",
        lambda text: change_entry(text.splitlines()[-1], count=1),
        lambda text: change_entry(text.splitlines()[-1], bitmap="eJwDAAAAAAE="),
        lambda text: change_entry(text.splitlines()[-1], rows=[[0, 3]], bitmap=None),
    ],
    ids=["cut", "line lost", "empty", "count", "bitmap", "earlier version"],
)
def test_a_damaged_ledger_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[str], str]
) -> None:
    """Without guesses; nothing is deleted."""
    monkeypatch.setattr(ledger, "MERGED_FILES", 2)
    spec, manifest = prepared(tmp_path)
    run(spec, manifest)
    path = tmp_path / "out" / "ledger" / "part-000002.json"
    path.write_text(damage(path.read_text()))
    before = [item for item in (tmp_path / "out").rglob("part-*") if item.is_file()]

    with pytest.raises(Refused, match=r"part-000002\.json is damaged or of an earlier version"):
        ledger.recover(spec, manifest)
    assert [item for item in (tmp_path / "out").rglob("part-*") if item.is_file()] == before


def test_a_ledger_has_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several runs; those that a crash leaves are ignored, and deleted."""
    monkeypatch.setattr(ledger, "MERGED_FILES", 3)
    spec, manifest = prepared(tmp_path, write={"format": "jsonl", "rows_per_file": 1})
    folder = tmp_path / "out" / "ledger"
    left: dict[str, bytes] = {}
    for _ in range(ROWS):
        book = ledger.recover(spec, manifest)
        sink = RowSink(spec, book, manifest, Tracker(spec))
        sink.add_rows([answered(pending_rows(manifest, book.all_pending(manifest))[-1])])
        sink.close()
        left |= {path.name: path.read_bytes() for path in folder.glob("part-*")}
        assert len(list(folder.glob("part-*"))) <= 2 + book.done // 3
    names = {f"part-{number:06d}.json" for number in range(3, ROWS + 1, 3)}
    assert {path.name for path in folder.glob("part-*")} == names
    (folder / "part-000004.json").write_bytes(left["part-000004.json"])

    assert ledger.recover(spec, manifest).done == ROWS
    assert {path.name for path in folder.glob("part-*")} == names


def test_a_slow_file_keeps_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that several threads write appear in any order; a merged ledger file would replace the
    entries of all after its first.
    """
    monkeypatch.setattr(ledger, "MERGED_FILES", 3)
    spec, manifest = prepared(tmp_path)
    book, release, put = ledger.recover(spec, manifest), threading.Event(), storage.rename_synced

    def appear(hidden: str, path: str) -> None:
        assert not path.endswith("part-000002.jsonl") or release.wait(60)
        put(hidden, path)

    monkeypatch.setattr(storage, "rename_synced", appear)
    with ThreadPoolExecutor(1) as pool:
        commit = partial(book.commit, "rows", data=b"{}\n", ending="jsonl")
        commit(rows=[0])
        slow = pool.submit(commit, rows=[1])
        assert awaited((tmp_path / "out/ledger/part-000002.json").exists)
        for row in range(2, 6):
            commit(rows=[row])
        assert len(list((tmp_path / "out/ledger").glob("part-*"))) == 6
        release.set()
        slow.result(60)

    assert ledger.recover(spec, manifest).done == 6
    assert len(list((tmp_path / "out/ledger").glob("part-*"))) == 1


def test_a_file_that_was_restored_is_rejected(tmp_path: Path) -> None:
    """Its rows were answered again."""
    spec, manifest = prepared(tmp_path)
    run(spec, manifest)
    path = tmp_path / "out" / "rows" / "part-000001.jsonl"
    path.rename(tmp_path / "aside")
    run(spec, manifest)
    (tmp_path / "aside").rename(path)

    with pytest.raises(Refused, match=r"part-000001\.jsonl has rows that are already counted"):
        ledger.recover(spec, manifest)


def test_starting_over_deletes_the_jobs_files(tmp_path: Path) -> None:
    """Even of a changed job; another job's folder is unchanged."""
    run(*prepared(tmp_path))
    spec, manifest = prepared(
        tmp_path,
        identity={"model": "huge"},
        digest="d2",
        work=str(tmp_path / "work2"),
        restart=True,
    )
    assert ledger.recover(spec, manifest).done == 0
    assert written(tmp_path / "out") == {"rows": [], "errors": []}
    other, manifest = prepared(tmp_path, job="other", work=str(tmp_path / "work3"), restart=True)

    with pytest.raises(Refused, match="belongs to the job `demo`"):
        ledger.recover(other, manifest)


def test_a_remote_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pyarrow's filesystems: complete files only, a merged ledger, rejected for others,
    erased by `--discard-results`.
    """
    monkeypatch.setattr(ledger, "MERGED_FILES", 2)
    store = tmp_path / "store"
    store.mkdir()
    far = pyarrow.fs.SubTreeFileSystem(str(store), pyarrow.fs.LocalFileSystem())
    monkeypatch.setattr(storage, "connect_filesystem", lambda _: (far, "bucket"))
    spec, manifest = prepared(tmp_path, out="s3://bucket/out?region=x")
    run(spec, manifest)
    complete(store / "bucket" / "out")
    assert len(list((store / "bucket" / "out" / "ledger").glob("part-*"))) == 2
    (store / "bucket" / "out" / "rows" / "part-000001.jsonl").write_bytes(b"half")
    run(spec, manifest)
    complete(store / "bucket" / "out")
    (store / "bucket" / "out" / "rows" / "mine.txt").touch()
    ledger.erase_output(spec)

    left = {path.name for path in (store / "bucket" / "out").rglob("*") if path.is_file()}
    assert left == {"mine.txt", "run.json"}


def test_an_unreadable_mark_prevents_starting_over(tmp_path: Path) -> None:
    """The owner is unknown: no file is deleted."""
    spec, manifest = prepared(tmp_path, restart=True)
    run(spec, manifest)
    (tmp_path / "out" / "ledger" / "job.json").write_text("{")
    before = written(tmp_path / "out")
    with pytest.raises(Refused, match="was not written by vlaunch"):
        ledger.recover(spec, manifest)
    assert written(tmp_path / "out") == before
