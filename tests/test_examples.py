"""The inventories in `inventory/`: they load, editors accept them, example.yaml has every key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from launcher.inventory import document
from launcher.inventory.load import load
from launcher.inventory.schema import InventoryFile, fields_of, sections_in

_ROOT = Path(__file__).parents[1]
_EXAMPLES = sorted((_ROOT / "inventory").glob("*.yaml"))
_FIRST_LINE = "# yaml-language-server: $schema="


def test_common_clusters_have_examples() -> None:
    expected = {"example", "single-node", "h100-infiniband", "roce", "gb200", "dgx-spark", "amd"}

    assert expected | {"cpu"} <= {path.stem for path in _EXAMPLES}


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads(path: Path) -> None:
    """Without editing."""
    assert load(path).nodes


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_editors_accept_an_example(path: Path) -> None:
    """The schema in its first line exists and accepts it."""
    text = path.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith(_FIRST_LINE)
    schema = json.loads((path.parent / first.removeprefix(_FIRST_LINE)).read_text(encoding="utf-8"))

    jsonschema.validate(
        document.parse_document(text).data, schema, cls=jsonschema.Draft202012Validator
    )


def test_the_reference_shows_every_key() -> None:
    """At its own path, not only by name."""
    shown = {
        tuple(step for step in where if not isinstance(step, int))
        for where in document.parse_document(
            (_ROOT / "inventory" / "example.yaml").read_text(encoding="utf-8")
        ).lines
    }

    # `secrets` maps names of variables to sections, so its keys are one level deeper.
    sources = {where[-1] for where in shown if where[:1] == ("secrets",) and len(where) == 3}
    # Shown in comments, because others exclude them.
    shown |= {("front", "node"), ("front", "tls", "kind")}
    assert [
        ".".join(key) for key in _keys(InventoryFile) if key[0] != "secrets" and key not in shown
    ] == []
    assert {
        key[-1] for key in _keys(InventoryFile) if key[0] == "secrets" and len(key) > 1
    } == sources


def test_the_reference_shows_the_defaults() -> None:
    """Values that the file calls defaults."""
    inventory = load(_ROOT / "inventory" / "example.yaml")

    assert (inventory.cap, inventory.head.connection, inventory.require) == (32, "ssh", "auto")
    assert type(inventory.ports)() == inventory.ports


def _keys(section: Any) -> Iterator[tuple[str, ...]]:
    for name, field in fields_of(section).items():
        # The cluster's `ssh` section shows the keys of a node's.
        yield (name,)
        for inner in sections_in(field.annotation):
            if (section.__name__, name) != ("NodeSection", "ssh"):
                yield from ((name, *key) for key in _keys(inner))
