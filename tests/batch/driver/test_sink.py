"""Result rows as complete files: sizes, times, types, limits and write errors."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from launcher.batch.driver import ledger, sink, storage
from launcher.batch.driver.job_file import Failed
from launcher.batch.driver.progress import Tracker
from launcher.batch.job import Job
from tests.batch.driver.jobs import RowSink, answered, failed, job, surveyed
from tests.ssh.processes import awaited

ROWS = 5000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(b'{"id": "r%d", "n": %d}\n' % (n, n) for n in range(ROWS)))
    return path


def open_sink(spec: Job) -> RowSink:
    manifest = surveyed(spec)
    return RowSink(spec, ledger.recover(spec, manifest), manifest, Tracker(spec))


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted((out / kind).glob("part-*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


def test_answers_and_errors_are_written_side_by_side(tmp_path: Path, source: Path) -> None:
    """Ordered by number; copied columns come before the results; errors have reasons."""
    result = open_sink(job(tmp_path, source, keep={"n": None}, read={"id": "id"}))
    keep = pickle.dumps({"n": 7, "id": "r7"})
    assert (
        result.add_rows(
            [
                answered(7, _keep=keep, _cached=1),
                failed(9, "bad", _keep=pickle.dumps({"id": "r9"})),
                answered(2),
            ]
        )
        == 3
    )
    result.close()

    rows = lines(tmp_path / "out", "rows")
    assert [row["row"] for row in rows] == [2, 7]
    assert list(rows[1]) == [
        "row",
        "n",
        "id",
        "answer",
        "finish_reason",
        "prompt_tokens",
        "output_tokens",
    ]
    assert lines(tmp_path / "out", "errors") == [
        {"row": 9, "id": "r9", "reason": "bad", "stage": "inference", "input": "raw"}
    ]
    assert (result.ledger.done, result.ledger.errors) == (2, 1)
    shown = result.progress.shown()
    assert (shown["done"], shown["errors"], shown["tokens_in"], shown["tokens_out"]) == (2, 1, 6, 4)
    assert shown["tokens_cached"] == 1


def test_repeated_rows_are_dropped(tmp_path: Path, source: Path) -> None:
    """In one call, in a later one, and as an error after an answer; they are not counted."""
    result = open_sink(job(tmp_path, source))
    assert result.add_rows([answered(1), answered(1), answered(2)]) == 2
    assert result.add_rows([answered(2), failed(1)]) == 0
    result.close()

    assert [row["row"] for row in lines(tmp_path / "out", "rows")] == [1, 2]
    assert (result.ledger.done, result.progress.done, result.progress.errors) == (2, 2, 0)


def test_a_file_has_rows_per_file_rows(tmp_path: Path, source: Path) -> None:
    """The rest waits for its deadline, or for the end."""
    rows = open_sink(job(tmp_path, source, write={"rows_per_file": 4}))
    rows.add_rows([answered(n) for n in range(10)])
    rows.settle()
    assert [
        len(path.read_bytes().splitlines()) for path in sorted((tmp_path / "out/rows").iterdir())
    ] == [4, 4]
    rows.close()

    assert len(lines(tmp_path / "out", "rows")) == 10


def test_waiting_rows_are_committed(tmp_path: Path, source: Path) -> None:
    """A crash costs only these seconds."""
    result = open_sink(job(tmp_path, source, write={"seconds": 1e-9}))
    result.add_rows([answered(1)])
    result.tick()

    assert len(lines(tmp_path / "out", "rows")) == 1


def test_large_rows_do_not_wait_for_others(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer has a limit of bytes, too."""
    monkeypatch.setattr(sink, "LARGEST", 100_000)
    result = open_sink(job(tmp_path, source))
    result.add_rows([answered(n, answer="x" * 30_000) for n in range(4)])
    result.settle()

    assert len(lines(tmp_path / "out", "rows")) == 4
    assert result.buffers["rows"].bytes == 0


def test_parquet_files_have_one_schema(tmp_path: Path, source: Path) -> None:
    """Even with an empty column; readers take them as one table. A result wins over a copied
    column.
    """
    (tmp_path / "in.jsonl").write_bytes(
        b'{"n": 1, "tags": ["a"], "answer": "mine", "score": 1.5}\n' * 9
    )
    rows = open_sink(
        job(tmp_path, source, keep=None, write={"format": "parquet", "rows_per_file": 2})
    )
    keep = pickle.dumps({"n": 1, "tags": '["a"]', "answer": "mine", "score": 1.5, "later": 1})
    rows.add_rows(
        [
            answered(0, _keep=keep),
            answered(1, _keep=keep),
            answered(2),
            answered(3, finish_reason=None),
        ]
    )
    rows.close()

    table = pq.read_table(tmp_path / "out" / "rows")
    assert {field.name: str(field.type) for field in table.schema} == {
        "row": "int64",
        "n": "int64",
        "tags": "string",
        "score": "double",
        "answer": "string",
        "finish_reason": "string",
        "prompt_tokens": "int64",
        "output_tokens": "int64",
    }
    assert table.to_pylist()[0]["answer"] == "answer 0"
    assert rows.progress.shown()["warnings"] == [
        "column later is not kept: the first rows lack it; name it under `keep`",
        "input column `answer` is not in the answers: a result has this name;"
        " rename it in the input to keep it",
    ]


def predicted(number: int, **columns: Any) -> dict[str, Any]:
    return {"_row": number, "_error": "", "_stage": "", "_raw": "", "_keep": b"", **columns}


def test_columns_of_a_class_come_from_the_first_file(tmp_path: Path, source: Path) -> None:
    """Lists stay lists, objects become JSON; the next run reuses them; a mismatching row is an
    error row.
    """
    spec = job(tmp_path, source, mode="predict", write={"format": "parquet"})
    result = open_sink(spec)
    result.add_rows(
        [
            predicted(n, label="cat", score=0.5, vector=[1.0, 2.0], more={"a": n}, nothing=None)
            for n in range(3)
        ]
    )
    result.flush()
    result = open_sink(spec)
    result.add_rows(
        [
            predicted(3, label="dog", score=1, vector=None, more=None, nothing="now"),
            predicted(4, label=5, score=0.1),
        ]
    )
    result.add_rows([predicted(5, label="x", extra=1), predicted(6)])
    result.close()

    table = pq.read_table(tmp_path / "out" / "rows")
    assert table["row"].to_pylist() == [0, 1, 2, 3, 6]
    assert table.schema.field("vector").type == pa.list_(pa.float64())
    assert (table["more"].to_pylist()[1], table["nothing"].to_pylist()[3]) == ('{"a": 1}', "now")
    errors = lines(tmp_path / "out", "errors")
    assert [(error["row"], error["stage"]) for error in errors] == [(4, "write"), (5, "write")]
    assert errors[0]["reason"].startswith("column label does not hold string as before")
    assert "column extra is new" in errors[1]["reason"]
    assert "'label': 5" in errors[0]["input"]
    assert (result.ledger.done, result.ledger.errors) == (5, 2)
    assert (result.progress.done, result.progress.errors) == (2, 2)


def test_values_in_json_lines(tmp_path: Path, source: Path) -> None:
    """NaN becomes null, decimals text, bytes base64; unserializable values are error rows."""
    result = open_sink(job(tmp_path, source, mode="predict"))
    result.add_rows([predicted(0, a=float("nan"), b=Decimal("1.5"), c=b"\xff", d=[float("inf")])])
    result.add_rows([predicted(1, a=object()), predicted(2, a="\ud800"), predicted(3, a="é")])
    result.close()

    assert lines(tmp_path / "out", "rows") == [
        {"row": 0, "a": None, "b": "1.5", "c": "/w==", "d": [None]},
        {"row": 3, "a": "é"},
    ]
    assert [line["row"] for line in lines(tmp_path / "out", "errors")] == [1, 2]


def test_an_input_column_never_replaces_the_number(tmp_path: Path, source: Path) -> None:
    """With all columns copied, one of them called `row`."""
    result = open_sink(job(tmp_path, source, keep=None))
    result.add_rows([answered(4, _keep=pickle.dumps({"row": "mine", "n": 1}))])
    result.close()

    (row,) = lines(tmp_path / "out", "rows")
    assert (row["row"], row["n"], next(iter(row))) == (4, 1, "row")


def test_a_failure_without_a_message(tmp_path: Path, source: Path) -> None:
    """A class's values may raise anything."""

    class Mute:
        def tolist(self) -> None:
            raise RuntimeError("\n")

    result = open_sink(job(tmp_path, source, mode="predict"))
    result.add_rows([predicted(0, a=Mute()), predicted(1, a="b")])
    result.close()

    assert lines(tmp_path / "out", "rows") == [{"row": 1, "a": "b"}]
    assert [line["reason"] for line in lines(tmp_path / "out", "errors")] == ["RuntimeError"]


def test_too_many_errors_fail_the_job_after_a_commit(tmp_path: Path, source: Path) -> None:
    """The next run fails before it loads a model."""
    spec = job(tmp_path, source, limits={"errors": 2})
    result = open_sink(spec)
    result.add_rows([failed(0), failed(1), answered(2)])
    with pytest.raises(Failed, match=r"failed rows: 3, and `limits\.errors` is 2") as raised:
        result.add_rows([failed(3)])

    assert "--retry-errors" in raised.value.hint
    assert len(lines(tmp_path / "out", "errors")) == 3
    result.flush()
    with pytest.raises(Failed, match="failed rows: 3"):
        open_sink(spec)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EACCES, "cannot write"),
        (errno.EIO, "cannot be"),
    ],
)
def test_a_full_disk_is_explained(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: str
) -> None:
    """Without a retry, as the file may exist. No partial file is visible to the next run."""
    spec = job(tmp_path, source)
    result = open_sink(spec)
    result.add_rows([answered(n) for n in range(3)])

    def full(path: str, data: bytes) -> None:
        Path(path).write_bytes(data[:10])
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_synced", full)
        with pytest.raises(Failed, match=expected) as raised:
            result.flush()
    assert "run `vlaunch batch` again" in raised.value.hint
    assert list((tmp_path / "out" / "rows").iterdir()) == []
    with pytest.raises(Failed, match=expected):
        result.add_rows([answered(4)])
    again = open_sink(spec)
    assert again.ledger.done == 0
    again.add_rows([answered(n) for n in range(3)])
    again.close()

    assert len(lines(tmp_path / "out", "rows")) == 3


def test_readers_get_complete_files(tmp_path: Path, source: Path) -> None:
    """While files are written, every named one is complete."""
    rows = open_sink(
        job(tmp_path, source, keep={"n": None}, write={"format": "parquet", "rows_per_file": 10})
    )
    over, calls, wrong = threading.Event(), set(), []

    def reader() -> None:
        while not over.is_set():
            for path in (tmp_path / "out" / "rows").iterdir():
                if path.name not in calls:
                    try:
                        if pq.read_metadata(path).num_rows != 10:
                            wrong.append(path.name)
                    except Exception as error:
                        wrong.append(f"{path.name}: {error}")
                    calls.add(path.name)

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        for start in range(0, 600, 50):
            rows.add_rows([answered(n) for n in range(start, start + 50)])
            assert awaited(lambda least=start // 50: len(calls) > least)  # the reader has run
        rows.close()
    finally:
        over.set()
        thread.join(timeout=60)

    assert wrong == []
    assert len(calls) > 10


def test_a_signal_waits_for_the_file(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop during a commit would leave its outcome open."""

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    renamed = storage.rename_synced

    def signalled(hidden: str, path: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        renamed(hidden, path)

    result = open_sink(job(tmp_path, source))
    result.add_rows([answered(1)])
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(storage, "rename_synced", signalled)
            with pytest.raises(Stop):
                result.flush()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert len(lines(tmp_path / "out", "rows")) == 1
    result.flush()
    assert len(lines(tmp_path / "out", "rows")) == 1


def test_a_thread_that_fails_stops_the_job_with_its_own_error(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later file is committed, not even one that is encoded already."""
    result = open_sink(job(tmp_path, source, write={"rows_per_file": 2}))
    begun: list[Any] = []
    encoded = threading.Event()
    commit, encode = result.ledger.commit, result.encoder.encode

    def failing(*file: Any) -> None:
        begun.append(file)
        assert encoded.wait(60)
        if len(begun) == 2:
            raise ZeroDivisionError("a mistake")
        commit(*file)

    def last_sets(kind: str, tables: list[Any]) -> Any:
        answer = encode(kind, tables)
        if tables[0]["row"][0].as_py() == 4:
            encoded.set()
        return answer

    monkeypatch.setattr(result.ledger, "commit", failing)
    monkeypatch.setattr(result.encoder, "encode", last_sets)
    result.add_rows([answered(n) for n in range(6)])
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        result.flush()
    for act in (result.tick, lambda: result.add_rows([answered(6)]), result.close):
        with pytest.raises(ZeroDivisionError, match="a mistake"):
            act()

    assert len(begun) == 2
    assert [row["row"] for row in lines(tmp_path / "out", "rows")] == [0, 1]


def test_a_failure_in_a_thread_is_noticed_without_new_rows(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline may not yield another row for a long time."""
    result = open_sink(job(tmp_path, source, write={"rows_per_file": 1}))
    monkeypatch.setattr(result.encoder, "encode", lambda *_: 1 // 0)
    result.add_rows([answered(1)])

    def has_failed() -> bool:
        try:
            result.tick()
        except ZeroDivisionError:
            return True
        return False

    assert awaited(has_failed)
    assert lines(tmp_path / "out", "rows") == []


def test_a_fenced_driver_commits_nothing(tmp_path: Path, source: Path) -> None:
    """Neither a file nor a ledger entry; what came before stays."""
    spec, allowed = job(tmp_path, source), [True]
    manifest = surveyed(spec)

    def fence() -> None:
        if not allowed[0]:
            raise Failed("the lock is lost")

    book = ledger.recover(spec, manifest)
    result = RowSink(spec, book, manifest, Tracker(spec), fence)
    result.add_rows([answered(1)])
    result.flush()
    allowed[0] = False
    result.add_rows([answered(2), failed(3)])
    with pytest.raises(Failed, match="the lock is lost"):
        result.flush()

    parts = sorted(path.name for path in (tmp_path / "out").glob("*/part-*"))
    assert parts == ["part-000001.json", "part-000001.jsonl"]


def test_the_pipeline_waits_for_a_slow_disk(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a few files are in memory; all are committed in order."""
    result = open_sink(job(tmp_path, source, write={"rows_per_file": 1}))
    release = threading.Event()
    commit = result.ledger.commit

    def slow(*file: Any) -> None:
        assert release.wait(60)
        commit(*file)

    monkeypatch.setattr(result.ledger, "commit", slow)
    adding = threading.Thread(target=lambda: result.add_rows([answered(n) for n in range(9)]))
    adding.start()
    assert awaited(lambda: len(result.files) == sink.IN_FLIGHT)
    assert adding.is_alive()
    assert result.buffers["rows"].rows == 9 - sink.IN_FLIGHT
    release.set()
    adding.join(60)
    result.close()

    assert [row["row"] for row in lines(tmp_path / "out", "rows")] == list(range(9))


def test_files_reach_an_object_store_at_the_same_time(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One upload has a fraction of a network's speed."""
    far = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    monkeypatch.setattr(storage, "connect_filesystem", lambda _: (far, ""))
    spec = job(tmp_path, source, write={"rows_per_file": 1}, out="s3://bucket/out")
    result = open_sink(spec)
    everyone = threading.Barrier(sink.UPLOADS)
    commit = result.ledger.commit

    def meet(*file: Any) -> None:
        everyone.wait(60)
        commit(*file)

    monkeypatch.setattr(result.ledger, "commit", meet)
    result.add_rows([answered(n) for n in range(2 * sink.UPLOADS)])
    result.close()

    assert ledger.recover(spec, surveyed(spec)).done == 2 * sink.UPLOADS


def test_columns_of_a_class_may_differ_between_batches(tmp_path: Path, source: Path) -> None:
    """The schema holds the values of the whole first file: numbers for integers and floats, JSON
    for a mixture; a column may be missing or empty in a batch.
    """
    result = open_sink(job(tmp_path, source, mode="predict", write={"format": "parquet"}))
    result.add_rows([predicted(0, a=1, b="x", c=None, d=[]), predicted(1, a=2, b="y")])
    result.add_rows([predicted(2, a=0.5, b={"z": 1}, c=7, d=[1.5])])
    result.flush()
    result.add_rows([predicted(3, a=3, b="w", c=None, d=[]), predicted(4, a=None, c=8)])
    result.close()

    table = pq.read_table(tmp_path / "out" / "rows")
    assert {field.name: str(field.type) for field in table.schema} == {
        "row": "int64",
        "a": "double",
        "b": "string",
        "c": "int64",
        "d": "list<element: double>",
    }
    assert table["a"].to_pylist() == [1.0, 2.0, 0.5, 3.0, None]
    assert table["b"].to_pylist() == ['"x"', '"y"', '{"z": 1}', '"w"', None]
    assert table["c"].to_pylist() == [None, None, 7, None, 8]
    assert table["d"].to_pylist() == [[], None, [1.5], [], None]
    assert lines(tmp_path / "out", "errors") == []


@pytest.mark.parametrize(
    ("evidence", "hint"),
    [
        ("AWS Error SLOW_DOWN during UploadPart operation: Please reduce your rate", "overloaded"),
        ("AWS Error NETWORK_CONNECTION during UploadPart operation: curlCode: 7", "overloaded"),
        ("AWS Error NO_SUCH_BUCKET during CreateMultipartUpload operation", "is writable"),
    ],
)
def test_an_unavailable_store_is_explained(evidence: str, hint: str) -> None:
    """The store's state is to be checked, not its permissions."""
    explained = sink.explain_error(OSError(evidence), "s3://bucket/out")

    assert (explained.message, explained.evidence) == (
        "s3://bucket/out cannot be written",
        evidence,
    )
    assert hint in explained.hint
    assert "run `vlaunch batch` again" in explained.hint
