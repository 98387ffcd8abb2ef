"""A sample recipe, hardware and inventories for tests."""

from __future__ import annotations

from pathlib import Path

from launcher.core.domain import Inventory
from launcher.inventory.load import loads
from launcher.recipes import library
from launcher.recipes.library import Hardware, find_hardware
from launcher.recipes.schema import Recipe

FILE = Path(__file__).parents[1] / "fixtures" / "recipes" / "dense.yaml"


def recipe() -> Recipe:
    """Return the sample recipe."""
    return library.read_recipe(FILE)


def hardware(name: str, accelerator: str = "nvidia") -> Hardware:
    """Return the packaged recipes' hardware."""
    return find_hardware(name, library.load_library().hardware_by_name(accelerator))


def nodes(suffix: str = "", image: str = "vllm/vllm-openai:v0.33.0") -> Inventory:
    """Return an inventory of two nodes with eight GPUs each."""
    text = (
        f"cluster: c\nimage: {image}\n{suffix}\nnodes:\n"
        "  - {host: 'n[01-02]', ip: '10.0.0.[1-2]', gpus: 8}\n"
    )
    return loads(text, Path("inventory.yaml"))
