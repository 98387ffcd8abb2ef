"""CPU time of a batch's driver per row, from blocks of answers to complete files.

    python -m benchmarks.batch_writing [--rounds 3] [--only "64 B" …] [--format parquet …]

The rows have an id of the input and a random answer, in blocks of 256 rows in random order, as
replicas return them. The blocks are built first: their cost, the replicas', is a column of its
own. Then the driver's part runs, without Ray: all its threads count. Files are written, but do not
wait for the disk. The unit of the ratio is a loop that encodes the smallest rows as JSON, and
nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from launcher.batch.driver import ledger, results
from launcher.batch.driver.job_file import parse_job
from launcher.batch.driver.manifest import File, Manifest, Split
from launcher.batch.driver.progress import Tracker
from launcher.batch.driver.results import Converter
from launcher.batch.driver.sink import Sink
from launcher.batch.job import Job

BATCH = 256  # rows of a block: the default of `engine.batch_size`
GOAL = 3.0  # µs per row of 64 B
SPLITS = 100  # of the input
FORMATS = ("parquet", "jsonl")
SIZES = {"64 B": 64, "1 KiB": 1024, "4 KiB": 4096}
VECTORS = "1,024 floats"
ROWS = {"64 B": 200_000, "1 KiB": 50_000, "4 KiB": 20_000, VECTORS: 5_000}


class Cost(NamedTuple):
    """Microseconds per row: the driver's CPU and wall time, the replicas' CPU, the reference."""

    driver: float
    wall: float
    replica: float
    reference: float


def build_job(folder: Path, kind: str, form: str) -> Job:
    """Return a job that keeps the ids of its rows."""
    return parse_job(
        {
            "job": "bench",
            "cluster": "bench",
            "mode": "engine",
            "work": str(folder),
            "identity": {},
            "digest": "d",
            "task": "embed" if kind == VECTORS else "generate",
            "read": {"paths": [str(folder)], "format": "jsonl", "id": "id"},
            "keep": {},
            "write": {"path": str(folder / "out"), "format": form},
        }
    )


def answers(kind: str, rows: int) -> Iterator[dict[str, Any]]:
    """Yield rows as a replica's engine answers them, in random order."""
    rng = random.Random(17)
    text = "".join(rng.choices(string.ascii_letters + "     ", k=1 << 20))
    vectors = np.random.default_rng(17).standard_normal(1 << 20, np.float32)
    for number in rng.sample(range(rows), rows):
        start = rng.randrange(1 << 19)
        if kind == VECTORS:
            columns = {"embedding": vectors[start : start + 1024].tobytes()}
        else:
            answer = text[start : start + SIZES[kind]]
            columns = {"answer": answer, "finish_reason": "length", "output_tokens": 16}
        yield {
            "_row": number,
            "_error": "",
            "_stage": "",
            "_raw": "",
            "_keep": pickle.dumps({"id": f"row-{number}"}),
            **columns,
            "prompt_tokens": 24,
            "_cached": 0,
        }


def batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(itertools.islice(rows, BATCH)):
        yield batch


def build_manifest(rows: int) -> Manifest:
    """Return the manifest of one file, in splits as the driver makes them."""
    step = -(-rows // SPLITS)
    splits = tuple(
        Split(
            index=index,
            file=0,
            start=100 * first,
            end=100 * min(first + step, rows),
            first=first,
            rows=min(step, rows - first),
        )
        for index, first in enumerate(range(0, rows, step))
    )
    file = File(path="rows.jsonl", rows=rows, bytes=100 * rows, mark="")
    return Manifest(files=(file,), splits=splits, rows=rows, types={"id": "text"})


def per_row(clock: Callable[[], float], began: float, rows: int) -> float:
    """Return the microseconds per row since `began`."""
    return (clock() - began) * 1e6 / rows


def measure(kind: str, form: str, rows: int) -> Cost:
    """Write the rows of one job."""
    reference = measure_reference()
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name:
        job = build_job(Path(name), kind, form)
        manifest = build_manifest(rows)
        converter = Converter(job, manifest.types)
        blocks, replica = [], 0.0
        for batch in batches(answers(kind, rows)):
            began = time.process_time()
            blocks.append(results.pack(converter.convert(batch)))
            replica += per_row(time.process_time, began, rows)
        book = ledger.recover(job, manifest)
        sink = Sink(job, book, manifest, Tracker(job))
        began, cpu = time.monotonic(), time.process_time()
        for block in blocks:
            sink.add(results.unpack(block))
            sink.tick()
        sink.close()
        driver = per_row(time.process_time, cpu, rows)
        wall = per_row(time.monotonic, began, rows)
        if ledger.recover(job, manifest).done != rows:
            sys.exit(f"{kind}, {form}: rows are missing")
    return Cost(driver, wall, replica, reference)


def measure_reference() -> float:
    """Return the microseconds of CPU to encode a row of 64 B as JSON."""
    rows = [{"row": number, "answer": "x" * SIZES["64 B"]} for number in range(100_000)]
    began = time.process_time()
    for row in rows:
        json.dumps(row).encode()
    return per_row(time.process_time, began, len(rows))


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=ROWS)
    parser.add_argument("--format", action="append", choices=FORMATS)
    args = parser.parse_args()
    os.fsync = lambda fd: None
    jobs = list(itertools.product(args.only or ROWS, args.format or FORMATS))
    costs: dict[tuple[str, str], list[Cost]] = {job: [] for job in jobs}
    for _ in range(args.rounds):
        for kind, form in jobs:
            costs[kind, form].append(measure(kind, form, ROWS[kind]))
    print("| answer | format | driver, µs | against the loop | wall, µs | replica, µs |")
    print("|---|---|---|---|---|---|")
    missed = False
    for (kind, form), group in costs.items():
        driver = statistics.median(cost.driver for cost in group)
        low, high = min(cost.driver for cost in group), max(cost.driver for cost in group)
        goal = ""
        if kind == "64 B":
            goal = f"; goal ≤ {GOAL:g}{', missed' * (driver > GOAL)}"
            missed |= driver > GOAL
        cells = (
            kind,
            form,
            f"{driver:.1f} ({low:.1f}–{high:.1f}{goal})",
            f"{statistics.median(cost.driver / cost.reference for cost in group):.1f}×",
            f"{statistics.median(cost.wall for cost in group):.1f}",
            f"{statistics.median(cost.replica for cost in group):.1f}",
        )
        print("| " + " | ".join(cells) + " |")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
