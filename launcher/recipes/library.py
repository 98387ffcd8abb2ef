"""Packaged recipes with their hardware profiles, and recipes in files of the same format.

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
from launcher.inventory.partial_validation import validate_parts
from launcher.recipes.schema import Recipe
from launcher.tools.host import Gpu

_DATA = Path(__file__).parent / "data" / "recipes.json"
_T = TypeVar("_T")
# Parts of a name that no driver reports, and the number of GPUs (`rtx_pro_6000_8x`).
_NOT_IN_DRIVER = re.compile(r"dgx|spark|station|\d+x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware profile of a node; unknown values are empty or 0. `vram_gb` is the memory of all its
    GPUs; `accelerator` is one of the inventory's values (nvidia …), which recipes call brands.
    """

    name: str = ""
    accelerator: str
    generation: str = ""
    gpu_count: int = 1
    vram_gb: float = 0.0

    def pick_value(self, values: Mapping[str, _T]) -> _T | None:
        """Return the value for this hardware: by its name, generation or brand, or the default."""
        keys = (self.name, self.generation, self.accelerator, "default")
        return next((values[key] for key in keys if key in values), None)

    def is_excluded(self, support: Mapping[str, str]) -> bool:
        """True when a recipe says `unsupported` for this hardware."""
        return self.pick_value(support) == "unsupported"


def find_hardware(name: str, candidates: Mapping[str, Hardware]) -> Hardware:
    """Return the hardware of a name; raises RequestError when there is none."""
    if name not in candidates:
        raise RequestError(
            f"no recipe has hardware `{name}` for this accelerator{did_you_mean(name, candidates)}",
            evidence="known: " + ", ".join(sorted(candidates)),
            hint="choose one with `--hardware NAME`",
        )
    return candidates[name]


def match_hardware(
    gpus: Sequence[Gpu], count: int, candidates: Mapping[str, Hardware]
) -> Hardware | None:
    """Return the hardware with `count` such GPUs, else the largest with fewer, else the smallest,
    by the driver's name of a GPU, such as `NVIDIA H100 80GB HBM3`. None when none matches.
    """
    reported = set(re.findall(r"[a-z0-9]+", gpus[0].name.lower())) if gpus else set()
    matches = [hardware for name, hardware in candidates.items() if _driver_terms(name) <= reported]
    matches.sort(key=lambda hardware: hardware.gpu_count)
    fewer = [hardware for hardware in matches if hardware.gpu_count <= count]
    return next(iter(fewer[-1:] or matches[:1]), None)


@dataclass(frozen=True, kw_only=True)
class Library:
    """Packaged recipes by name (ORG/MODEL), and their hardware profiles."""

    source: str
    hardware: Mapping[str, Any]
    recipes: Mapping[str, Any]

    def hardware_by_name(self, accelerator: str) -> dict[str, Hardware]:
        """Return the hardware profiles of an accelerator by name, such as h100."""
        profiles = {name: Hardware(name=name, **data) for name, data in self.hardware.items()}
        return {key: value for key, value in profiles.items() if value.accelerator == accelerator}

    def load_recipe(self, name: str) -> Recipe:
        """Return a packaged recipe, or the one in a file; raises RequestError."""
        if name.endswith((".yaml", ".yml")):
            return read_recipe(Path(name))
        if name not in self.recipes:
            raise RequestError(
                f"no recipe `{name}`{did_you_mean(name, self.recipes)}",
                hint=f"list similar recipes: `vlaunch recipes list {name.rpartition('/')[2]}`",
            )
        return Recipe.model_validate(self.recipes[name])


def load_library() -> Library:
    """Read the packaged recipes."""
    return Library(**json.loads(_DATA.read_text(encoding="utf-8")))


def read_recipe(path: Path) -> Recipe:
    """Read a recipe in vLLM's format; raises RequestError with all mistakes and their lines."""
    try:
        content = document.read_file(path, max_bytes=1 << 20, kind="recipe")
    except document.UnusableFile as error:
        raise RequestError(
            f"the recipe {path} {error}", hint="list the packaged recipes: `vlaunch recipes list`"
        ) from None
    parsed = document.parse_document(
        content, first_key="model", example="docs/reference/recipes.md"
    )
    mistakes, recipe = list(parsed.mistakes), None
    if parsed.data is not None:
        recipe, invalid = validate_parts(parsed.data, Recipe, lambda _: None)
        mistakes += invalid
    if mistakes or recipe is None:
        raise RequestError(
            f"the recipe {path} is invalid",
            evidence=[f"{path}:{line}: {text}" for line, text in parsed.sorted_messages(mistakes)],
            hint="see a valid one: `vlaunch recipes show openai/gpt-oss-120b`",
        )
    return recipe


def _driver_terms(name: str) -> set[str]:
    return {term for term in name.split("_") if not _NOT_IN_DRIVER.fullmatch(term)}
