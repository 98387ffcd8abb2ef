"""`job.json` as the driver reads it."""

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


def test_a_job_is_read_whole(tmp_path: Path) -> None:
    """Nested values have their types; it travels between processes; its folder is where it lies."""
    (tmp_path / "job.json").write_text(json.dumps(WHOLE))
    found = jobs.read_job(str(tmp_path))

    assert found.work == str(tmp_path)
    assert (found.read.sources, found.read.id, found.engine.replicas, found.engine.placement) == (
        ("/a",),
        "id",
        (1, 4),
        "SPREAD",
    )
    assert found.prompt is not None and found.prompt.chat[0].content == "{{ q }}"
    assert found.data_parallel is not None and found.data_parallel.nodes[1].ip == "10.0.0.2"
    assert found.predict is not None and found.predict.replicas == (1, 2)
    assert (found.write.rows_per_file, found.limits.errors, found.retry_errors) == (7, None, True)
    assert pickle.loads(pickle.dumps(found)) == found


def test_what_is_read_is_what_was_written() -> None:
    """In the same order: `job.json` stays the same to the byte as long as the job does."""
    known = {name: value for name, value in WHOLE.items() if name != "later"}
    found = jobs.parse_job(WHOLE)
    asked = jobs.to_json(found)

    assert json.dumps(asked) == json.dumps({**known, "restart": False})
    assert jobs.parse_job(asked) == found


def test_what_a_job_does_not_need_is_left_out() -> None:
    """Where it says nothing; else it travels as everything does."""
    asked = jobs.parse_job({**WHOLE, "task": "score", "prompt": {"pair": ["{{ a }}", "{{ b }}"]}})
    told = jobs.to_json(asked)

    assert (told["task"], told["prompt"]["pair"]) == ("score", ["{{ a }}", "{{ b }}"])
    assert jobs.parse_job(told) == asked


def test_a_job_of_the_least_words_has_every_default() -> None:
    """Sections that another version left out, too."""
    least = {"name": "n", "cluster": "c", "mode": "engine", "work": "/w", "out": "/o"}
    found = jobs.parse_job({**least, "read": {"sources": [], "format": "text"}})

    assert found == jobs.Job(**least, read=jobs.Read(sources=(), format="text"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "does not describe a job"),
        ("[]", "is of version list"),
        ('{"version": 2}', "is of version 2"),
        ('{"version": 1}', "does not describe a job"),
        (json.dumps(WHOLE | {"engine": {"replicas": [1]}}), "does not describe a job"),
        (json.dumps(WHOLE | {"engine": None}), "does not describe a job"),
        (json.dumps(WHOLE | {"data_parallel": {"size": 2}}), "does not describe a job"),
    ],
)
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    """With a hint: the same command writes it anew."""
    if text is not None:
        (tmp_path / "job.json").write_text(text)

    with pytest.raises(Refused, match=said) as raised:
        jobs.read_job(str(tmp_path))
    assert "vlaunch batch" in raised.value.hint


def test_differences_are_a_line_each() -> None:
    """Long values are cut."""
    assert jobs.identity_changes({"a": 1, "b": "x" * 500}, {"a": 1, "c": None}) == [
        f'b: "{"x" * 116}… → (nothing)',
        "c: (nothing) → null",
    ]
