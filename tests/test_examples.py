"""The inventories in `inventory/`: they load, editors accept them, and example.yaml shows every key
there is.
"""

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


def test_there_is_an_example_for_each_common_cluster() -> None:
    """Somebody starts from each."""
    expected = {"example", "single-node", "h100-infiniband", "roce", "gb200", "dgx-spark", "amd"}

    assert expected | {"cpu"} <= {path.stem for path in _EXAMPLES}


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads(path: Path) -> None:
    """As it is, without editing."""
    assert load(path).nodes


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_editors_accept_an_example(path: Path) -> None:
    """The schema that its first line points to exists and fits."""
    text = path.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith(_FIRST_LINE)
    schema = json.loads((path.parent / first.removeprefix(_FIRST_LINE)).read_text(encoding="utf-8"))

    jsonschema.validate(
        document.parse_document(text).data, schema, cls=jsonschema.Draft202012Validator
    )


def test_the_reference_shows_every_key() -> None:
    """At its own place, not only by name."""
    shown = {
        tuple(step for step in where if not isinstance(step, int))
        for where in document.parse_document(
            (_ROOT / "inventory" / "example.yaml").read_text(encoding="utf-8")
        ).lines
    }

    # Below `secrets` come names of variables, so its keys are one step further down.
    sources = {where[-1] for where in shown if where[:1] == ("secrets",) and len(where) == 3}
    assert [
        ".".join(key) for key in _keys(InventoryFile) if key[0] != "secrets" and key not in shown
    ] == []
    assert {
        key[-1] for key in _keys(InventoryFile) if key[0] == "secrets" and len(key) > 1
    } == sources


def test_the_reference_tells_the_defaults() -> None:
    """A value that is called the default is the default."""
    inventory = load(_ROOT / "inventory" / "example.yaml")

    assert (inventory.cap, inventory.head.connection, inventory.require) == (32, "ssh", "auto")
    assert type(inventory.ports)() == inventory.ports


def _keys(section: Any) -> Iterator[tuple[str, ...]]:
    for name, field in fields_of(section).items():
        # A node's overrides of `ssh` may show any of the keys that the cluster's shows.
        yield (name,)
        for inner in sections_in(field.annotation):
            if (section.__name__, name) != ("NodeSection", "ssh"):
                yield from ((name, *key) for key in _keys(inner))
