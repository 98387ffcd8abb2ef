"""The schema for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import launcher.inventory
from launcher.inventory.json_schema import json_schema

GOOD: dict[str, Any] = {
    "cluster": "a",
    "image": "b",
    "nodes": [{"host": "gpu[1-2]", "ip": "10.0.0.[1-2]", "gpus": 8}],
}


def _valid(inventory: object) -> bool:
    return jsonschema.Draft202012Validator(json_schema()).is_valid(inventory)


def test_the_file_in_the_package_is_the_schema() -> None:
    """Regenerate it with `vlaunch schema > launcher/inventory/schema.json`."""
    written = Path(launcher.inventory.__file__).with_name("schema.json").read_text(encoding="utf-8")

    assert json.loads(written) == json_schema()


def test_it_is_a_valid_schema() -> None:
    """Of the draft that it names."""
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ray": "2.60.0"},
        {"ray": {"object_store": "2GiB"}},
        {"ray": "none", "serve": {"stuck": 60, "restarts": None}},
        {"shm": "host"},
        {"shm": 1024},
        {"mounts": ["/a:/b:ro", {"source": "/a", "target": "/c"}]},
        {"env": {"A": 1, "B": "x", "C": 1.5}},
        {"secrets": {"A": {"env": "B"}}},
        {"serve": {"args": ["--x", 1]}},
    ],
)
def test_it_accepts_what_the_loader_accepts(more: dict[str, object]) -> None:
    """Short forms included."""
    assert _valid(GOOD | more)


@pytest.mark.parametrize(
    "more",
    [
        {"gpu": 8},
        {"cluster": "a;b"},
        {"image": "A B"},
        {"accelerator": "tpu"},
        {"env": {"A": True}},
        {"nodes": []},
        {"nodes": [{"host": "a"}]},
        {"ssh": {"port": "22"}},
        {"network": {"interface": "a" * 16}},
        {"hf_home": "relative"},
    ],
)
def test_it_refuses_what_the_loader_refuses(more: dict[str, object]) -> None:
    """As far as a schema can tell: rules between keys are the loader's."""
    assert not _valid(GOOD | more)


def test_every_key_is_explained() -> None:
    """Editors show the description."""
    assert [path for path, key in _keys(json_schema()) if not key.get("description")] == []


def _keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    sections = {"": schema, **schema["$defs"]}
    for name, section in sections.items():
        yield from (
            (f"{name}.{key}", value) for key, value in section.get("properties", {}).items()
        )
