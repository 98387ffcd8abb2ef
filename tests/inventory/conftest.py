"""Fixtures of the inventory tests: a valid inventory to break, and its mistakes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.core.domain import Inventory
from launcher.core.errors import InventoryError
from launcher.inventory.load import load, loads

Load = Callable[..., Inventory]
Mistakes = Callable[..., list[str]]

GOOD = """\
cluster: pair
image: vllm/vllm-openai:v0.32.0
nodes:
  - {host: "gpu[01-02]", ip: "10.0.0.[11-12]", gpus: 8}
"""

_TOP = "cluster: test\nimage: vllm/vllm-openai:v0.32.0\n"
_NODES = """
nodes:
  - {host: gpu01, ip: 10.0.0.11, gpus: 8}
  - {host: gpu02, ip: 10.0.0.12, gpus: 8}
"""


def _text(extra: str, nodes: str | None) -> str:
    parts = (
        textwrap.dedent(part).strip("\n") for part in (extra, _NODES if nodes is None else nodes)
    )
    return _TOP + "\n".join(part for part in parts if part) + "\n"


@pytest.fixture
def load_text() -> Load:
    """Load a valid inventory with `more` keys (from line 3 on), and other `nodes`."""

    def load(extra: str = "", nodes: str | None = None) -> Inventory:
        return loads(_text(extra, nodes), Path("/etc/vlaunch/test.yaml"))

    return load


@pytest.fixture
def mistakes(load_text: Load) -> Mistakes:
    """Return an inventory's mistakes as `LINE: path: text`; `load_text` has the arguments."""

    def find(extra: str = "", nodes: str | None = None) -> list[str]:
        try:
            load_text(extra, nodes)
        except InventoryError as error:
            return [line.removeprefix("/etc/vlaunch/test.yaml:") for line in error.mistakes]
        return []

    return find


def mistakes_of(path: Path) -> list[str]:
    """Return the mistakes of a file that does not load."""
    with pytest.raises(InventoryError) as caught:
        load(path)
    return list(caught.value.mistakes)


def mistake_of(path: Path) -> str:
    """Return the only mistake of such a file."""
    (mistake,) = mistakes_of(path)
    return mistake
