"""`job.json`, parsed by the driver."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from launcher.batch.driver.job_file import Refused, parse_job, read_job
from launcher.batch.job import to_json

WHOLE: dict[str, Any] = {
    "job": "demo",
    "model": "m",
    "task": "generate",
    "mode": "data-parallel",
    "read": {"paths": ["/a"], "format": "csv", "id": "id", "limit": 5, "row_bytes": 99},
    "prompt": {"chat": [{"role": "user", "content": "{{ q }}"}], "chat_args": {"x": 1}},
    "sampling": {"max_tokens": 3, "stop": ["a"], "structured_outputs": {"json": {"a": [1]}}},
    "keep": {"a": None, "b": "text"},
    "engine": {
        "args": {"dtype": "float32"},
        "tp": 2,
        "pp": 1,
        "replicas": [1, 4],
        "batch_size": 8,
        "placement": "spread",
        "order": "given",
    },
    "data_parallel": {"size": 2, "timeout": 60.0, "round_rows": 16},
    "predict": {
        "class": "m:C",
        "files": [],
        "args": {},
        "num_gpus": 0.5,
        "num_cpus": 2.0,
        "batch_size": 4,
        "replicas": [1, 2],
    },
    "preprocess": {
        "function": "m:f",
        "files": [],
        "num_cpus": 1.0,
        "batch_size": 4,
        "replicas": [1, 2],
    },
    "write": {"path": "s3://b/o", "format": "jsonl", "rows_per_file": 7, "seconds": 1.5},
    "limits": {"restarts": 1, "stall": 9.0},
    "cluster": "lab",
    "work": "/elsewhere",
    "identity": {"model": "m"},
    "digest": "d",
    "rank_port": 29500,
    "rank_hosts": [{"ip": "10.0.0.1", "gpus": 1}, {"ip": "10.0.0.2", "gpus": 1}],
    "retry_errors": True,
    "restart": False,
}
LEAST = {"cluster": "c", "work": "/w", "read": "/i", "write": "/o"}


def test_a_complete_job(tmp_path: Path) -> None:
    """Nested values have their types; it can be pickled; its folder is the file's."""
    (tmp_path / "job.json").write_text(json.dumps({"version": 1, **WHOLE}))
    result = read_job(str(tmp_path))

    assert result.work == str(tmp_path)
    assert (result.name, result.mode, result.read.paths) == ("demo", "data-parallel", ("/a",))
    assert (result.engine.replicas, result.engine.placement) == ((1, 4), "spread")
    assert result.prompt is not None and result.prompt.chat is not None
    assert result.prompt.chat[0].content == "{{ q }}"
    assert result.rank_hosts[1].ip == "10.0.0.2"
    assert result.predict is not None and result.predict.class_ == "m:C"
    assert (result.limits.errors, result.retry_errors) == (None, True)
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_job_survives_a_round_trip() -> None:
    """In order: an unchanged job has an identical `job.json`."""
    result = parse_job(WHOLE)
    spec = to_json(result)

    assert json.dumps(spec) == json.dumps(WHOLE)
    assert parse_job(spec) == result


def test_a_minimal_job_has_every_default() -> None:
    """Of `launcher/batch/job.py`."""
    result = parse_job(LEAST)

    assert (result.mode, result.engine.batch_size, result.limits.stall) == ("engine", 256, 1800.0)
    assert parse_job({**LEAST, "data_parallel": {"size": 2}}).mode == "data-parallel"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot read"),
        ("{", "does not describe a job"),
        ("[]", "is of version list"),
        ('{"version": 2}', "is of version 2"),
        ('{"version": 1}', "does not describe a job"),
        (json.dumps({"version": 1, **LEAST, "engine": {"replicas": [1]}}), "does not describe"),
        (json.dumps({"version": 1, **LEAST, "engine": 1}), "does not describe a job"),
        (json.dumps({"version": 1, **LEAST, "data_parallel": {}}), "does not describe a job"),
    ],
)
def test_an_invalid_job_is_rejected(tmp_path: Path, text: str | None, expected: str) -> None:
    """The hint: the same command writes it again."""
    if text is not None:
        (tmp_path / "job.json").write_text(text)

    with pytest.raises(Refused, match=expected) as raised:
        read_job(str(tmp_path))
    assert "vlaunch batch" in raised.value.hint
