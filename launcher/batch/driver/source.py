"""Ray Data source of the input: read tasks over splits with pending rows, in batch-sized blocks."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..job import PlacedJob
from . import lines
from .bitmap import count_bits
from .manifest import Manifest, Split
from .ray_internals import HEAD_RESOURCES, set_claims
from .rows import read_split

if TYPE_CHECKING:
    from ray.data import Dataset

MAX_TASKS = 4_000  # most read tasks of a job: planning takes about a millisecond per task
# least rows of a read task: a thousand splits with one pending row are not a thousand tasks
TASK_ROWS = 2_000
BLOCK_BYTES = 8 * 2**20  # most bytes of a block
# processes that read, cut or prepare a large job: each handles tens of thousands of rows a second,
# and its start takes two seconds of a core, which loading engines need on a small node
WORKERS = 2
FEW_ROWS = 20_000  # rows that a single process handles quickly
# CPUs that a read task claims: replicas may have claimed all, and would wait for its rows forever
TASK_CPUS = 0

S = TypeVar("S")


def count_rows(pending: Mapping[int, bytes]) -> int:
    """Return the number of pending rows, of bitmaps by split."""
    return sum(map(count_bits, pending.values()))


def count_bytes(manifest: Manifest, pending: Mapping[int, bytes]) -> float:
    """Return the bytes of the pending rows in the input."""
    return sum(
        count_bits(bitmap) * manifest.split_row_bytes(manifest.splits[index])
        for index, bitmap in pending.items()
    )


def batch_rows(requested: int, pending: int, replicas: int) -> int:
    """Return the batch size: as requested, or less to give every replica two batches."""
    return max(1, min(requested, math.ceil(pending / (2 * max(1, replicas)))))


def batches_in_flight(requested: int, batch: int, rows: int, replicas: int) -> int:
    """Return the batches a replica may hold: at most its share, or the first one up takes all."""
    share = math.ceil(math.ceil(rows / batch) / max(1, replicas))
    return max(1, min(requested, share))


def worker_count(rows: int) -> int:
    """Return the processes that read, cut or prepare this many rows for one replica."""
    return 1 if rows <= FEW_ROWS else WORKERS


def rows_per_task(rows: int, batch: int | None) -> int:
    """Return the rows of a read task, of `rows` in all."""
    return max(TASK_ROWS, math.ceil(rows / MAX_TASKS)) if batch else rows


def group_splits(splits: Iterable[S], sizes: Iterable[int], least: int) -> Iterator[list[S]]:
    """Group consecutive splits into read tasks of at least `least` rows."""
    task: list[S] = []
    row_count = 0
    for split, size in zip(splits, sizes, strict=True):
        task.append(split)
        row_count += size
        if row_count >= least:
            yield task
            task, row_count = [], 0
    if task:
        yield task


def create_dataset(
    job: PlacedJob, manifest: Manifest, pending: Mapping[int, bytes], batch: int | None
) -> Dataset:
    """Return a Ray Data dataset of the pending rows, in blocks of `batch` rows or as one block.

    A read task yields blocks of Ray Data's size (128 MB); a streaming repartition cuts them, so
    that no replica receives everything at once.
    """
    import ray.data
    from ray.data import Datasource, TaskPoolStrategy
    from ray.data.block import BlockMetadata
    from ray.data.datasource import ReadTask

    splits = [split for split in manifest.splits if pending.get(split.index)]
    sizes = [count_bits(pending[split.index]) for split in splits]
    rows = sum(sizes)
    parts = list(group_splits(splits, sizes, rows_per_task(rows, batch)))
    readers = worker_count(rows)

    class Rows(Datasource):
        """The pending rows of this job."""

        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(
            self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
        ) -> list[Any]:
            """Return one task per group of splits, whatever parallelism Ray Data has in mind."""
            tasks = []
            for part in parts:
                todo = {split.index: pending[split.index] for split in part}
                meta = BlockMetadata(
                    num_rows=count_rows(todo), size_bytes=None, input_files=None, exec_stats=None
                )
                tasks.append(
                    ReadTask(partial(read_blocks, job, thin_manifest(manifest, part), todo), meta)
                )
            return tasks

    # With fewer tasks than blocks, Ray Data would split each task's output into hundreds of tiny
    # blocks.
    data = ray.data.read_datasource(
        Rows(),
        num_cpus=TASK_CPUS,
        concurrency=readers,
        override_num_blocks=len(parts),
        **task_resources(job.read.paths),
    )
    if batch:
        data = data.repartition(target_num_rows_per_block=batch)
        set_claims(data, TaskPoolStrategy(size=readers), num_cpus=TASK_CPUS)
    return data


def task_resources(sources: Iterable[str]) -> dict[str, Any]:
    """Return the resources that pin read tasks to the head if any source is a path."""
    return {} if all("://" in source for source in sources) else {"resources": HEAD_RESOURCES}


def thin_manifest(manifest: Manifest, splits: Sequence[Split]) -> Manifest:
    """Return the manifest with only these splits and their files: a read task must stay small."""
    positions = {file: index for index, file in enumerate(sorted({split.file for split in splits}))}
    return dataclasses.replace(
        manifest,
        files=tuple(manifest.files[file] for file in positions),
        splits=tuple(dataclasses.replace(split, file=positions[split.file]) for split in splits),
    )


def read_blocks(job: PlacedJob, manifest: Manifest, pending: Mapping[int, bytes]) -> Iterator[Any]:
    """Yield a thin manifest's pending rows in blocks: a split may be a whole compressed file."""
    for split in manifest.splits:
        rows: list[dict[str, Any]] = []
        size = 0
        for row in read_split(job, manifest, split, pending[split.index]):
            rows.append(row)
            size += len(row["_data"]) + len(row["_keep"]) + len(row["_raw"])
            if len(rows) >= TASK_ROWS or size >= BLOCK_BYTES:
                yield to_block(rows)
                rows, size = [], 0
        if rows:
            yield to_block(rows)


def input_excerpt(data: bytes) -> str:
    """Return a row's pickled columns as shown in an error row."""
    columns = pickle.loads(data)  # noqa: S301 - pickled by our own read task
    if list(columns) == ["text"] and isinstance(columns["text"], str):
        return lines.excerpt(columns["text"])
    try:
        return lines.excerpt(json.dumps(columns, ensure_ascii=False, default=str))
    except (TypeError, ValueError):  # a Parquet map with keys other than text
        return lines.excerpt(columns)
    except RecursionError:  # it was read with a less deep stack
        return "(nested too deep to be shown)"


def raw_input(row: Mapping[str, Any]) -> str:
    """Return a row's input as shown in an error row."""
    return row["_raw"] or (input_excerpt(row["_data"]) if row.get("_data") else "")


def to_block(rows: Sequence[Mapping[str, Any]], extra_columns: Sequence[str] = ("_data",)) -> Any:
    """Return rows as an Arrow table of fixed schema: users' columns travel pickled.

    `extra_columns` follow the columns of every row.
    """
    import pyarrow as pa

    text, data = pa.large_string(), pa.large_binary()
    fields = {"_row": pa.int64(), "_error": text, "_stage": text, "_raw": text, "_keep": data}
    fields |= {name: data if name in ("_data", "_tokens") else text for name in extra_columns}
    return pa.table(
        {name: pa.array([row[name] for row in rows], type=kind) for name, kind in fields.items()}
    )
