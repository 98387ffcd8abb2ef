"""`job.json`, parsed by the driver."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from launcher.batch.driver import job as jobs
from launcher.batch.driver.job import Refused

WHOLE: dict[str, Any] = {
    "version": 1,
    "name": "demo",
    "cluster": "lab",
    "mode": "data-parallel",
    "work": "/elsewhere",
    "out": "s3://b/o",
    "meaning": {"model": "m"},
    "digest": "d",
    "model": "m",
    "later": "unknown to this version",
    "read": {"sources": ["/a"], "format": "csv", "id": "id", "limit": 5, "row_bytes": 99},
    "prompt": {
        "column": None,
        "template": None,
        "chat": [{"role": "user", "content": "{{ q }}"}],
        "chat_args": {"x": 1},
    },
    "sampling": {"max_tokens": 3},
    "keep": {"a": None, "b": "text"},
    "engine": {
        "args": {"dtype": "float32"},
        "tp": 2,
        "pp": 1,
        "replicas": [1, 4],
        "batch_size": 8,
        "placement": "SPREAD",
    },
    "data_parallel": {
        "size": 2,
        "expert_parallel": None,
        "timeout": 60,
        "round_rows": 16,
        "port": 29500,
        "nodes": [{"ip": "10.0.0.1", "gpus": 1}, {"ip": "10.0.0.2", "gpus": 1}],
    },
    "predict": {
        "target": "m:C",
        "args": {},
        "num_gpus": 0.5,
        "num_cpus": 2,
        "batch_size": 4,
        "replicas": [1, 2],
    },
    "preprocess": {"target": "m:f", "num_cpus": 1, "batch_size": 4, "replicas": [1, 2]},
    "write": {"format": "jsonl", "rows_per_file": 7, "seconds": 1.5},
    "limits": {"restarts": 1, "stall": 9, "errors": None},
    "retry_errors": True,
}


def test_a_complete_job(tmp_path: Path) -> None:
    """Nested values have their types; it can be pickled; its folder is the file's."""
    (tmp_path / "job.json").write_text(json.dumps(WHOLE))
    result = jobs.read_job(str(tmp_path))

    assert result.work == str(tmp_path)
    assert (
        result.read.sources,
        result.read.id,
        result.engine.replicas,
        result.engine.placement,
    ) == (
        ("/a",),
        "id",
        (1, 4),
        "SPREAD",
    )
    assert result.prompt is not None and result.prompt.chat[0].content == "{{ q }}"
    assert result.data_parallel is not None and result.data_parallel.nodes[1].ip == "10.0.0.2"
    assert result.predict is not None and result.predict.replicas == (1, 2)
    assert (result.write.rows_per_file, result.limits.errors, result.retry_errors) == (
        7,
        None,
        True,
    )
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_job_survives_a_round_trip() -> None:
    """In order: an unchanged job has an identical `job.json`."""
    expected = {name: value for name, value in WHOLE.items() if name != "later"}
    result = jobs.parse_job(WHOLE)
    spec = jobs.to_json(result)

    assert json.dumps(spec) == json.dumps({**expected, "restart": False})
    assert jobs.parse_job(spec) == result


def test_unneeded_keys_are_omitted() -> None:
    """Default values are omitted; others are written as usual."""
    spec = jobs.parse_job({**WHOLE, "task": "score", "prompt": {"pair": ["{{ a }}", "{{ b }}"]}})
    message = jobs.to_json(spec)

    assert (message["task"], message["prompt"]["pair"]) == ("score", ["{{ a }}", "{{ b }}"])
    assert jobs.parse_job(message) == spec


def test_a_minimal_job_has_every_default() -> None:
    """For sections from other versions too."""
    least = {"name": "n", "cluster": "c", "mode": "engine", "work": "/w", "out": "/o"}
    result = jobs.parse_job({**least, "read": {"sources": [], "format": "text"}})

    assert result == jobs.Job(**least, read=jobs.Read(sources=(), format="text"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot read"),
        ("{", "does not describe a job"),
        ("[]", "is of version list"),
        ('{"version": 2}', "is of version 2"),
        ('{"version": 1}', "does not describe a job"),
        (json.dumps(WHOLE | {"engine": {"replicas": [1]}}), "does not describe a job"),
        (json.dumps(WHOLE | {"engine": None}), "does not describe a job"),
        (json.dumps(WHOLE | {"data_parallel": {"size": 2}}), "does not describe a job"),
    ],
)
def test_an_invalid_job_is_rejected(tmp_path: Path, text: str | None, expected: str) -> None:
    """The hint: the same command writes it again."""
    if text is not None:
        (tmp_path / "job.json").write_text(text)

    with pytest.raises(Refused, match=expected) as raised:
        jobs.read_job(str(tmp_path))
    assert "vlaunch batch" in raised.value.hint


def test_differences_are_separate_lines() -> None:
    """Long values are cut."""
    assert jobs.identity_changes({"a": 1, "b": "x" * 500}, {"a": 1, "c": None}) == [
        f'b: "{"x" * 116}… → (nothing)',
        "c: (nothing) → null",
    ]
