"""Our own recipes, read."""

from __future__ import annotations

from pathlib import Path

from launcher.inventory.load import loads
from launcher.model import Inventory
from launcher.recipes import choice, source
from launcher.recipes.choice import Choice
from launcher.recipes.hardware import Hardware, named
from launcher.recipes.library import Library

FOLDER = Path(__file__).parents[1] / "fixtures" / "recipes"


def library() -> Library:
    """The recipes in `tests/fixtures/recipes`."""
    return source.library(source.local(FOLDER), "acme")


def hardware(name: str) -> Hardware:
    """A profile of theirs."""
    return named(name, library().profiles)


def chosen(
    recipe: str,
    on: str,
    strategy: str | None = None,
    *,
    variant: str = "default",
    more: dict[str, str] | None = None,
) -> Choice:
    """A choice, with the strategy that is named or that the recipe would take."""
    found, here = library(), hardware(on)
    said = found.recipe(f"acme/{recipe}").value
    nodes = choice.nodes_for(said.variants[variant], here)
    spread = choice.strategy_for(said, here, found.strategies, strategy, nodes)
    features, _ = choice.features_for(said, here, variant, spread.name, more=more or {})
    return Choice(recipe=said, hardware=here, variant=variant, strategy=spread, features=features)


def nodes(count: int = 2, gpus: int = 8, more: str = "") -> Inventory:
    """An inventory."""
    text = (
        f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\n{more}\nnodes:\n"
        f"  - {{host: 'n[01-{count:02}]', ip: '10.0.0.[1-{count}]', gpus: {gpus}}}\n"
    )
    return loads(text, Path("inventory.yaml"))
