"""Any file: loading gives an inventory or InventoryError."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.domain import Inventory
from launcher.core.errors import InventoryError
from launcher.inventory.load import loads
from launcher.inventory.schema import InventoryFile, fields_of
from tests import fuzz

_EXAMPLES = sorted((Path(__file__).parents[2] / "inventory").glob("*.yaml"))
_NODE_KEYS = ["host", "name", "ip", "gpus", "head", "env", "network"]
_KEYS = sorted({*fields_of(InventoryFile), *_NODE_KEYS, "interface", "hca", "<<"})
_values = fuzz.values(_KEYS, ["gpu[1-2]", "10.0.0.[1-2]", "[", "host"])


def _load(text: str) -> None:
    try:
        inventory = loads(text, Path("fuzz.yaml"))
    except InventoryError as error:
        fuzz.check(error.mistakes, "fuzz.yaml")
    else:
        assert isinstance(inventory, Inventory)


@fuzz.quick
@given(st.text(max_size=300))
def test_arbitrary_text(text: str) -> None:
    """Any content."""
    _load(text)


@fuzz.quick
@given(fuzz.yamls_own)
def test_text_of_yamls_own_characters(text: str) -> None:
    """Difficult for the parser."""
    _load(text)


@fuzz.quick
@given(st.dictionaries(st.sampled_from(_KEYS), _values, max_size=8))
def test_existing_keys_with_arbitrary_values(data: dict[str, object]) -> None:
    """With values of other types."""
    _load(yaml.safe_dump(data, allow_unicode=True))


@fuzz.quick
@given(st.lists(st.dictionaries(st.sampled_from(_NODE_KEYS), _values), max_size=4))
def test_arbitrary_nodes(nodes: list[dict[str, object]]) -> None:
    """The rules between nodes run on the rest."""
    _load(yaml.safe_dump({"cluster": "a", "image": "b", "nodes": nodes}))


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_examples_with_lines_and_characters_changed(path: Path) -> None:
    """Near-valid files cover the most mistakes."""
    for text in fuzz.near(path.read_text(encoding="utf-8")):
        _load(text)
