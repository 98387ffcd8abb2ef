"""The packaged recipes, and recipes in files of the same format.

`data/recipes.json` holds the keys of `schema.py` from one commit of vllm-project/recipes
(`data/NOTICE`); `make recipes` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.core.errors import RequestError
from launcher.inventory import document
from launcher.inventory.mistakes import did_you_mean
from launcher.inventory.partial_validation import validated
from launcher.recipes.hardware import Hardware
from launcher.recipes.schema import Recipe

_DATA = Path(__file__).parent / "data" / "recipes.json"


@dataclass(frozen=True, kw_only=True)
class Library:
    """The packaged recipes by name, ORG/MODEL, and the kinds of nodes that they know."""

    source: str
    hardware: Mapping[str, Any]
    recipes: Mapping[str, Any]

    def hardware_of(self, accelerator: str) -> dict[str, Hardware]:
        """Return the kinds of nodes with such GPUs by name, such as h100."""
        found = [Hardware(name=name, **data) for name, data in self.hardware.items()]
        return {each.name: each for each in found if each.accelerator == accelerator}

    def recipe(self, name: str) -> Recipe:
        """Return a packaged recipe, or the one in a file; raises RequestError."""
        if name.endswith((".yaml", ".yml")):
            return read_file(Path(name))
        if name not in self.recipes:
            raise RequestError(
                f"no recipe `{name}`{did_you_mean(name, self.recipes)}",
                hint=f"search for it: `vlaunch recipes list {name.rpartition('/')[2]}`",
            )
        return Recipe.model_validate(self.recipes[name])


def load() -> Library:
    """Read the packaged recipes."""
    return Library(**json.loads(_DATA.read_text(encoding="utf-8")))


def read_file(path: Path) -> Recipe:
    """Read a recipe in vLLM's format; raises RequestError with every mistake and its line."""
    try:
        content = document.read_file(path, most=1 << 20, kind="recipe")
    except document.UnusableFile as error:
        raise RequestError(
            f"the recipe {path} {error}", hint="list the packaged recipes: `vlaunch recipes list`"
        ) from None
    written = document.parse(content, first="model", example="docs/recipes.md")
    mistakes, recipe = list(written.mistakes), None
    if written.data is not None:
        recipe, found = validated(written.data, Recipe, lambda _: None)
        mistakes += found
    if mistakes or recipe is None:
        raise RequestError(
            f"the recipe {path} has mistakes",
            evidence=[f"{path}:{line}: {mistake}" for line, mistake in written.told(mistakes)],
            hint="see a correct one: `vlaunch recipes show openai/gpt-oss-120b`",
        )
    return recipe
