"""The batch job of the campaign: its files, the rows that came out of it, and its folder on the
head.
"""

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
from benchmarks.faults.practice import CLUSTER, Practice
from launcher.lab.host_configs import MODEL
from launcher.lab.layout import HF_HOME

ROWS = 200
PADDED = 20_000_000  # bytes of an input that takes a while to travel
_SECONDS = 0.1  # that the class takes for a row
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


def write(practice: Practice, case: Case) -> Path:
    """Write the job's file, its input and its class; return the job's file."""
    path = practice.folder / f"{_name(case)}.yaml"
    padding = {"padding": "x" * (PADDED // ROWS)} if case.fault == "ssh-reset" else {}
    asked = [
        {"id": f"q{index}", "question": f"What comes after {index}?", **padding}
        for index in range(ROWS)
    ]
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
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
        (practice.folder / "slow.py").write_text(textwrap.dedent(_CLASS))
        # More than half of a node's CPUs each: the two do not fit one node.
        document["predict"] = {
            "class": "slow.py:Slow",
            "batch_size": 10,
            "replicas": 2,
            "num_cpus": 1.5,
        }
    path.write_text(yaml.safe_dump(document))
    return path


def output(job: Path) -> Path:
    """Return where a job's answers are gathered."""
    return job.parent / "out" / job.stem


def rows(job: Path) -> Iterator[int]:
    """Yield the number of every row in the output, answered or not, as often as it is there."""
    for path in sorted((output(job) / "rows").glob("*.parquet")):
        yield from (
            int(row) for row in pq.read_table(path, columns=["row"]).column("row").to_pylist()
        )
    for path in sorted(output(job).glob("*/*.jsonl")):
        yield from (int(json.loads(line)["row"]) for line in path.read_text().splitlines())


def torn(job: Path) -> list[str]:
    """Name half-written files in the output."""
    return [
        f"half-written {path.name}"
        for kind in ("rows", "errors")
        for path in (output(job) / kind).glob(".*")
    ]


def arrived(practice: Practice, case: Case) -> int:
    """Return how many bytes of a job's files are on the head."""
    return sum(
        path.stat().st_size for path in _work(practice, _name(case)).rglob("*") if path.is_file()
    )


def forget(practice: Practice, job: Path) -> None:
    """Remove a job's folder from the head, and its output: answers stay by design, and would fill
    the practice hosts.
    """
    for path in (_work(practice, job.stem), output(job)):
        shutil.rmtree(path, ignore_errors=True)


def _name(case: Case) -> str:
    return f"{case.fault}-{case.seed}-{case.engine}"


def _work(practice: Practice, name: str) -> Path:
    return (
        practice.files(practice.head) / HF_HOME.lstrip("/") / "vlaunch" / CLUSTER / "batch" / name
    )
