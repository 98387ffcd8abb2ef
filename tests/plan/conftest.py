"""Inventories for plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.inventory.load import loads
from launcher.model import Inventory

Load = Callable[..., Inventory]


@pytest.fixture
def load() -> Load:
    """Load an inventory of two nodes with more keys at the top, or other nodes."""

    def make(more: str = "", nodes: str = "") -> Inventory:
        two = (
            "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8}, {host: gpu02, ip: 10.0.0.12, gpus: 8}]"
        )
        return loads(
            f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\n{more}\n{nodes or two}\n",
            Path("inventory.yaml"),
        )

    return make
