"""Whatever a file holds, loading gives an inventory or InventoryError, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.errors import InventoryError
from launcher.inventory.load import loads
from launcher.inventory.schema import InventoryFile
from launcher.model import Inventory

_EXAMPLES = sorted((Path(__file__).parents[2] / "inventory").glob("*.yaml"))
_NODE_KEYS = ["host", "name", "ip", "gpus", "head", "env", "network"]
_KEYS = sorted({*InventoryFile.model_fields, *_NODE_KEYS, "interface", "hca", "<<"})
_quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

_words = st.sampled_from(["gpu[1-2]", "10.0.0.[1-2]", "[", "host"])
_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), _words)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(_KEYS), st.text(max_size=8)), inner, max_size=4)
    ),
    max_leaves=12,
)


def _load(text: str) -> None:
    try:
        inventory = loads(text, Path("fuzz.yaml"))
    except InventoryError as error:
        assert error.mistakes
        for line in error.mistakes:
            assert line.startswith("fuzz.yaml:")
            assert len(line.splitlines()) == 1
            line.encode()  # what is told can be printed
    else:
        assert isinstance(inventory, Inventory)


@_quick
@given(st.text(max_size=300))
def test_arbitrary_text(text: str) -> None:
    """Anything at all."""
    _load(text)


@_quick
@given(st.text(alphabet="{}[]:,-&*!|>'\"%@`#?<= \n\tab01", max_size=200))
def test_text_of_yamls_own_characters(text: str) -> None:
    """Anything that may trip the parser."""
    _load(text)


@_quick
@given(st.dictionaries(st.sampled_from(_KEYS), _values, max_size=8))
def test_known_keys_with_arbitrary_values(data: dict[str, object]) -> None:
    """Anything where something else belongs."""
    _load(yaml.safe_dump(data, allow_unicode=True))


@_quick
@given(st.lists(st.dictionaries(st.sampled_from(_NODE_KEYS), _values), max_size=4))
def test_arbitrary_nodes(nodes: list[dict[str, object]]) -> None:
    """The rules between nodes run on what is left."""
    _load(yaml.safe_dump({"cluster": "a", "image": "b", "nodes": nodes}))


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_examples_with_lines_and_characters_changed(path: Path) -> None:
    """Near the truth is where mistakes are made."""
    chance = random.Random(7)
    text = path.read_text(encoding="utf-8")
    for _ in range(25):
        lines = text.splitlines()
        at = chance.randrange(len(lines))
        change = chance.randrange(4)
        if change == 0:
            del lines[at]
        elif change == 1:
            lines.insert(at, lines[chance.randrange(len(lines))])
        elif change == 2:
            lines[at] = lines[at].replace(":", chance.choice(["", ": :", ": [", ": !x", ": &a"]))
        else:
            middle = chance.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:middle] + chance.choice("{}[]:,-&*!\t\"'\x00é") + lines[at][middle + 1 :]
        _load("\n".join(lines))
