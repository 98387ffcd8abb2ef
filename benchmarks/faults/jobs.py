"""The batch job of the campaign: its files, its output rows, and its folder on the head."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from benchmarks.faults.cases import REAL, Case
from benchmarks.faults.testbed import CLUSTER, FaultTestbed
from launcher.lab.host_configs import MODEL
from launcher.lab.layout import HF_HOME

ROWS = 200
PADDED = 20_000_000  # bytes of an input whose copy takes several seconds
_SECONDS = 0.1  # of the class for a row
_CLASS = f"""
    import time


    class Slow:
        def __call__(self, batch):
            time.sleep({_SECONDS} * len(batch["id"]))
            return {{"length": [len(question) for question in batch["question"]]}}
"""
_ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 67108864,
}


def write_job(testbed: FaultTestbed, case: Case) -> Path:
    """Write the job's file, its input and its class; return the path of the file."""
    path = testbed.folder / f"{_job_name(case)}.yaml"
    padding = {"padding": "x" * (PADDED // ROWS)} if case.fault == "ssh-reset" else {}
    questions = [
        {"id": f"q{index}", "question": f"What comes after {index}?", **padding}
        for index in range(ROWS)
    ]
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    document: dict[str, Any] = {
        "read": path.with_suffix(".jsonl").name,
        "write": {"path": f"out/{path.stem}", "rows_per_file": 20, "seconds": 1},
    }
    if case.engine == REAL:
        sampling = {"max_tokens": 64, "ignore_eos": True, "temperature": 0}
        engine = {"args": _ENGINE, "replicas": 2, "batch_size": 10}
        document |= {
            "model": MODEL,
            "prompt": "{{ question }}",
            "sampling": sampling,
            "engine": engine,
        }
    else:
        (testbed.folder / "slow.py").write_text(textwrap.dedent(_CLASS))
        # Each takes more than half of a node's CPUs: two do not fit on one node.
        document["predict"] = {
            "class": "slow.py:Slow",
            "batch_size": 10,
            "replicas": 2,
            "num_cpus": 1.5,
        }
    path.write_text(yaml.safe_dump(document))
    return path


def output_dir(job: Path) -> Path:
    """Return the folder of a job's answers."""
    return job.parent / "out" / job.stem


def read_rows(job: Path) -> Iterator[int]:
    """Yield the number of every row in the output, answered or failed, as often as it occurs."""
    for path in sorted((output_dir(job) / "rows").glob("*.parquet")):
        yield from (
            int(row) for row in pq.read_table(path, columns=["row"]).column("row").to_pylist()
        )
    for path in sorted(output_dir(job).glob("*/*.jsonl")):
        yield from (int(json.loads(line)["row"]) for line in path.read_text().splitlines())


def partial_files(job: Path) -> list[str]:
    """Return messages about partial files in the output."""
    return [
        f"half-written {path.name}"
        for kind in ("rows", "errors")
        for path in (output_dir(job) / kind).glob(".*")
    ]


def count_bytes(testbed: FaultTestbed, case: Case) -> int:
    """Return the size in bytes of a job's files on the head."""
    return sum(
        path.stat().st_size
        for path in _work_dir(testbed, _job_name(case)).rglob("*")
        if path.is_file()
    )


def remove_job(testbed: FaultTestbed, job: Path) -> None:
    """Remove a job's folder from the head, and its output: answers stay by design, and would fill
    the lab hosts.
    """
    for path in (_work_dir(testbed, job.stem), output_dir(job)):
        shutil.rmtree(path, ignore_errors=True)


def _job_name(case: Case) -> str:
    return f"{case.fault}-{case.seed}-{case.engine}"


def _work_dir(testbed: FaultTestbed, name: str) -> Path:
    return (
        testbed.root_dir(testbed.head) / HF_HOME.lstrip("/") / "vlaunch" / CLUSTER / "batch" / name
    )
