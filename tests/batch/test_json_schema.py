"""The schema of job files, for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import launcher.batch
from launcher.batch.job import Job
from launcher.inventory.schema import json_schema

GOOD: dict[str, Any] = {"model": "a", "read": "b.jsonl", "write": "c"}


def _valid(job: object) -> bool:
    return jsonschema.Draft202012Validator(json_schema(Job)).is_valid(job)


def test_the_file_in_the_package_is_the_schema() -> None:
    """Regenerate it with `vlaunch schema --job > launcher/batch/schema.json`."""
    written = Path(launcher.batch.__file__).with_name("schema.json").read_text(encoding="utf-8")

    assert json.loads(written) == json_schema(Job)


def test_it_is_a_valid_schema() -> None:
    """Of its named draft."""
    jsonschema.Draft202012Validator.check_schema(json_schema(Job))


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"read": ["a.csv", "b.csv"]},
        {"read": {"paths": "a.csv", "row_bytes": "1MiB"}},
        {"prompt": "{{ a }}"},
        {"prompt": {"chat": [{"role": "user", "content": "{{ a }}"}]}},
        {"keep": ["a"]},
        {"keep": {"a": "text", "b": None}},
        {"engine": {"replicas": [1, 2], "args": {"max-model-len": 5}}},
        {"engine": {"replicas": "1-2"}},
        {"data_parallel": 2},
        {"predict": "a.py:B"},
        {"predict": {"class": "a.b:C", "args": {"x": [1]}}},
        {"preprocess": "a.py:b"},
        {"sampling": {"stop": "x", "structured_outputs": {"json": {}}}},
        {"write": {"path": "c", "seconds": 1.5}},
    ],
)
def test_it_accepts_what_the_loader_accepts(extra: dict[str, object]) -> None:
    """Short forms included."""
    assert _valid(GOOD | extra)


@pytest.mark.parametrize(
    "extra",
    [
        {"jobb": "a"},
        {"job": "A B"},
        {"mode": "x"},
        {"read": {"format": "csv"}},
        {"prompt": {"chat": [{"role": "x", "content": "a"}]}},
        {"keep": {"a": "int"}},
        {"engine": {"tp": 0}},
        {"engine": {"args": []}},
        {"predict": {"class": "a"}},
        {"sampling": {"top_p": 2}},
        {"limits": {"errors": -1}},
    ],
)
def test_it_rejects_what_the_loader_rejects(extra: dict[str, object]) -> None:
    """Except for rules between keys, which only the loader has."""
    assert not _valid(GOOD | extra)


def test_every_key_is_explained() -> None:
    """Editors show the description."""
    assert [path for path, key in _keys(json_schema(Job)) if not key.get("description")] == []


def _keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    sections = {"": schema, **schema["$defs"]}
    for name, section in sections.items():
        yield from (
            (f"{name}.{key}", value) for key, value in section.get("properties", {}).items()
        )
