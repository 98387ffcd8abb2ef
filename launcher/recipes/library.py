"""The packaged recipes, the kinds of nodes that they know, and recipes in files of the same format.

`data/recipes.json` holds the keys of `schema.py` from one commit of vllm-project/recipes
(`data/NOTICE`); `make recipes` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launcher.core.errors import RequestError
from launcher.inventory import document
from launcher.inventory.mistakes import did_you_mean
from launcher.inventory.partial_validation import validated
from launcher.recipes.schema import Recipe
from launcher.tools.host import Gpu

_DATA = Path(__file__).parent / "data" / "recipes.json"
_T = TypeVar("_T")
# Words of a name that no driver reports, and the number of GPUs (`rtx_pro_6000_8x`).
_NOT_IN_DRIVER = re.compile(r"dgx|spark|station|\d+x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A kind of node; `name` and `generation` are empty, and `vram_gb` of all its GPUs is 0, where
    they are unknown. `accelerator` is the inventory's word, and the brand in recipes.
    """

    name: str = ""
    accelerator: str
    generation: str = ""
    gpu_count: int = 1
    vram_gb: float = 0.0

    def pick(self, values: Mapping[str, _T]) -> _T | None:
        """Return the value for this hardware: by its name, generation or brand, or the default."""
        keys = (self.name, self.generation, self.accelerator, "default")
        return next((values[key] for key in keys if key in values), None)

    def excluded(self, words: Mapping[str, str]) -> bool:
        """True when a recipe says `unsupported` for this hardware."""
        return self.pick(words) == "unsupported"


def hardware_named(name: str, known: Mapping[str, Hardware]) -> Hardware:
    """Return the hardware of a name; raises RequestError when there is none."""
    if name not in known:
        raise RequestError(
            f"recipes know no hardware `{name}` of this kind{did_you_mean(name, known)}",
            evidence="known: " + ", ".join(sorted(known)),
            hint="choose one with `--hardware NAME`",
        )
    return known[name]


def hardware_of_gpus(
    gpus: Sequence[Gpu], count: int, known: Mapping[str, Hardware]
) -> Hardware | None:
    """Return the hardware with `count` such GPUs, or the largest with fewer: the driver calls one
    `NVIDIA H100 80GB HBM3`, for example. None when none matches.
    """
    reported = set(re.findall(r"[a-z0-9]+", gpus[0].name.lower())) if gpus else set()
    matches = [each for name, each in known.items() if _driver_words(name) <= reported]
    matches.sort(key=lambda each: each.gpu_count)
    fewer = [each for each in matches if each.gpu_count <= count]
    return next(iter(fewer[-1:] or matches[:1]), None)


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
    written = document.parse(content, first="model", example="docs/reference/recipes.md")
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


def _driver_words(name: str) -> set[str]:
    return {word for word in name.split("_") if not _NOT_IN_DRIVER.fullmatch(word)}
