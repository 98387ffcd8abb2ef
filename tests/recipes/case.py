"""A made-up recipe, hardware and inventories for tests."""

from __future__ import annotations

from pathlib import Path

from launcher.core.domain import Inventory
from launcher.inventory.load import loads
from launcher.recipes import library
from launcher.recipes.library import Hardware, hardware_named
from launcher.recipes.schema import Recipe

FILE = Path(__file__).parents[1] / "fixtures" / "recipes" / "dense.yaml"


def recipe() -> Recipe:
    """The made-up recipe."""
    return library.read_file(FILE)


def hardware(name: str, accelerator: str = "nvidia") -> Hardware:
    """Hardware of the packaged recipes."""
    return hardware_named(name, library.load().hardware_of(accelerator))


def nodes(more: str = "", image: str = "vllm/vllm-openai:v0.32.0") -> Inventory:
    """An inventory of two nodes with eight GPUs each."""
    text = (
        f"cluster: c\nimage: {image}\n{more}\nnodes:\n"
        "  - {host: 'n[01-02]', ip: '10.0.0.[1-2]', gpus: 8}\n"
    )
    return loads(text, Path("inventory.yaml"))
