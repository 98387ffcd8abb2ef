"""A dataclass as a section of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
from pydantic import ValidationError

import launcher.inventory
from launcher.core.values import Bounds, Converter, FromMapping, User
from launcher.inventory.schema import InventoryFile, Section, fields_of, json_schema

GOOD: dict[str, Any] = {
    "cluster": "a",
    "image": "b",
    "nodes": [{"host": "gpu[1-2]", "ip": "10.0.0.[1-2]", "gpus": 8}],
}


def _read(value: object) -> object:
    return {"one": 1}.get(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Noun:
    """A noun."""

    user: User
    """Login
    name.
    """
    share: Annotated[float, Bounds(gt=0, le=2)] = 1.0
    count: Annotated[int, Converter(_read, int | str)] | None = None
    words: tuple[str, ...] = ()


class File(Section):
    """A file with one section."""

    noun: FromMapping[Noun]


def test_it_is_read_from_a_mapping() -> None:
    """A key without a value counts as unset, and lists become tuples."""
    written = {"user": "ops", "share": None, "count": "one", "words": ["a", "b"]}

    assert File.model_validate({"noun": written}).noun == Noun(
        user="ops", count=1, words=("a", "b")
    )


@pytest.mark.parametrize(
    ("written", "kind", "where"),
    [
        ({}, "missing", ("noun", "user")),
        ({"user": "a b"}, "value_error", ("noun", "user")),
        ({"user": "ops", "share": 0}, "greater_than", ("noun", "share")),
        ({"user": "ops", "share": 2.5}, "less_than_equal", ("noun", "share")),
        ({"user": "ops", "share": "1"}, "float_type", ("noun", "share")),
        ({"user": "ops", "count": True}, "int_type", ("noun", "count")),
        ({"user": "ops", "words": "a"}, "tuple_type", ("noun", "words")),
        ({"user": "ops", "other": None}, "unexpected_keyword_argument", ("noun", "other")),
        ("ops", "dataclass_type", ("noun",)),
    ],
)
def test_it_is_as_strict_as_a_section(written: Any, kind: str, where: tuple[str, ...]) -> None:
    """No conversions between types, no unknown keys."""
    with pytest.raises(ValidationError) as raised:
        File.model_validate({"noun": written})

    assert [(error["type"], error["loc"]) for error in raised.value.errors()] == [(kind, where)]


def test_a_fields_docstring_describes_it() -> None:
    """In editors, and in messages about a missing key."""
    assert fields_of(Noun)["user"].description == "Login name."
    assert list(fields_of(Noun)) == ["user", "share", "count", "words"]


def test_editors_know_the_bounds() -> None:
    """And the alternatives of a value."""
    keys = File.model_json_schema()["$defs"]["Noun"]["properties"]

    assert (keys["share"]["exclusiveMinimum"], keys["share"]["maximum"]) == (0, 2)
    assert [key["type"] for key in keys["count"]["anyOf"]] == ["integer", "string", "null"]


def test_keys_of_base_classes_are_described() -> None:
    """In editors, and in messages: pydantic uses only the class itself."""
    keys = json_schema()["properties"]

    assert keys["image"]["description"].startswith("vLLM image")
    assert keys["hf_home"]["description"].startswith("Hugging Face cache")
    assert list(fields_of(InventoryFile))[:2] == ["cluster", "image"]


def _valid(inventory: object) -> bool:
    return jsonschema.Draft202012Validator(json_schema()).is_valid(inventory)


def test_the_file_in_the_package_is_the_schema() -> None:
    """Regenerate it with `vlaunch schema > launcher/inventory/schema.json`."""
    written = Path(launcher.inventory.__file__).with_name("schema.json").read_text(encoding="utf-8")

    assert json.loads(written) == json_schema()


def test_it_is_a_valid_schema() -> None:
    """Of its named draft."""
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize(
    "extra",
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
def test_it_accepts_what_the_loader_accepts(extra: dict[str, object]) -> None:
    """Short forms included."""
    assert _valid(GOOD | extra)


@pytest.mark.parametrize(
    "extra",
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
def test_it_rejects_what_the_loader_rejects(extra: dict[str, object]) -> None:
    """Except for rules between keys."""
    assert not _valid(GOOD | extra)


def test_every_key_is_explained() -> None:
    """Editors show the description."""
    assert [path for path, key in _keys(json_schema()) if not key.get("description")] == []


def _keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    sections = {"": schema, **schema["$defs"]}
    for name, section in sections.items():
        yield from (
            (f"{name}.{key}", value) for key, value in section.get("properties", {}).items()
        )
