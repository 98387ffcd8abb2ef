"""A job's read tasks: few, small to send, for exactly the pending rows. Ray Data itself runs in the
lab.
"""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.batch.driver import source
from launcher.batch.driver.ray_internals import HEAD_RESOURCES
from tests.batch.driver.jobs import all_rows, bitmap, job, surveyed


def test_pending_rows_are_counted_over_all_splits() -> None:
    """The bits of all bitmaps."""
    assert source.count_rows({0: bitmap(*range(10), 20, first=0), 3: bitmap(100, first=99)}) == 12


def test_a_small_job_has_two_batches_per_replica() -> None:
    """Large jobs use the requested size; a small one is spread over its replicas."""
    assert source.batch_rows(64, 1_000_000, 2) == 64
    assert source.batch_rows(64, 100, 2) == 25
    assert source.batch_rows(64, 1, 8) == 1


def test_the_first_replica_up_gets_no_more_than_its_share() -> None:
    """With two replicas at most half of the batches, and at least one."""
    assert source.batches_in_flight(34, 64, 2_000, 2) == 16
    assert source.batches_in_flight(34, 64, 1_000_000, 2) == 34
    assert source.batches_in_flight(4, 256, 10, 3) == 1


def test_neighbouring_splits_with_few_pending_rows_share_a_read_task() -> None:
    """A thousand splits with one pending row are one task; a full split is its own."""
    assert list(source.group_splits(range(1_000), [1] * 1_000, 2_000)) == [list(range(1_000))]
    assert list(source.group_splits("abc", [2_000, 2_000, 5], 2_000)) == [["a"], ["b"], ["c"]]


def test_read_tasks_stay_few_for_any_number_of_rows() -> None:
    """Ten thousand splits become as many tasks as planning tolerates; a block of rows is one."""
    tasks = list(
        source.group_splits(range(10_000), [2_000] * 10_000, source.rows_per_task(20_000_000, 256))
    )
    assert len(tasks) <= source.MAX_TASKS
    assert [split for task in tasks for split in task] == list(range(10_000))
    assert (
        len(list(source.group_splits("abc", [2_000] * 3, source.rows_per_task(6_000, None)))) == 1
    )


def test_a_read_task_has_only_its_own_splits_and_files(tmp_path: Path) -> None:
    """It does not grow with the job."""
    paths = [tmp_path / f"{index:03}.jsonl" for index in range(50)]
    for index, path in enumerate(paths):
        path.write_text("".join(json.dumps({"text": f"{index}-{row}"}) + "\n" for row in range(3)))
    spec = job(tmp_path, *paths)
    manifest = surveyed(spec)
    thin = source.thin_manifest(manifest, manifest.splits[40:42])
    assert [file.path for file in thin.files] == [str(path) for path in paths[40:42]]
    assert len(pickle.dumps(thin)) * 5 < len(pickle.dumps(manifest))
    blocks = list(
        source.read_blocks(
            spec, thin, {40: bitmap(121, 122, first=120), 41: bitmap(123, first=123)}
        )
    )
    assert [block.column("_row").to_pylist() for block in blocks] == [[121, 122], [123]]


def test_blocks_of_one_split_stay_small(tmp_path: Path) -> None:
    """A split can be a whole compressed file."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 100_000}) + "\n" for _ in range(200)))
    spec = job(tmp_path, path)
    manifest = surveyed(spec)
    pending = {split.index: all_rows(split) for split in manifest.splits}
    blocks = list(source.read_blocks(spec, manifest, pending))
    assert sum(block.num_rows for block in blocks) == 200
    assert max(block.nbytes for block in blocks) < 2 * source.BLOCK_BYTES


def test_every_block_has_the_same_schema(tmp_path: Path) -> None:
    """For valid and bad rows, and any columns: Ray Data never has to reconcile blocks."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\nnot json\n\xff\n{"other": [1, {"x": null}]}\n')
    spec = job(tmp_path, path)
    manifest = surveyed(spec)
    schemas = {
        str(block.schema)
        for row in range(4)
        for block in source.read_blocks(spec, manifest, {0: bitmap(row, first=0)})
    }
    assert len(schemas) == 1


def test_paths_are_read_on_the_head_even_beside_addresses() -> None:
    """Other nodes may not have them."""
    assert source.task_resources(("/data/a.jsonl",)) == {"resources": HEAD_RESOURCES}
    assert source.task_resources(("s3://bucket/a.jsonl", "/data/a.jsonl")) == {
        "resources": HEAD_RESOURCES
    }
    assert source.task_resources(("s3://bucket/a.jsonl", "gs://bucket/b.jsonl")) == {}


def test_a_deeply_nested_row_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader had more stack left."""

    def deep(*_: object, **__: object) -> str:
        raise RecursionError

    data = pickle.dumps({"text": [[]]})
    monkeypatch.setattr(json, "dumps", deep)
    assert source.input_excerpt(data) == "(nested too deep to be shown)"


def test_bytes_of_pending_rows(tmp_path: Path) -> None:
    """Of plain files and Parquet row groups by their sizes, of archives by their mean."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 20)
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 10))
    manifest = surveyed(job(tmp_path, tmp_path / "in"))
    pending = {0: bitmap(0, 3, first=0), 1: bitmap(20, first=20)}

    assert source.count_bytes(manifest, pending) == 2 * 14 + manifest.files[1].bytes / 10

    texts = ["x" * 10] * 5 + [f"{number}" * 1000 for number in range(5)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=5, compression="none")
    (tmp_path / "work" / "manifest.json").unlink()
    manifest = surveyed(job(tmp_path, path, read={"format": "parquet"}))
    first, second = map(manifest.split_row_bytes, manifest.splits)
    assert second > 20 * first
