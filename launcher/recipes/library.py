"""Recipes with their hardware profiles, packaged or imported, and recipes in files of the same
format.

`data/recipes.json` holds the keys of `schema.py` from a release of vLLM (`data/NOTICE`); `make
recipes` writes it. `vlaunch recipes update` writes a file like it for the user.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from launcher.core.errors import RequestError
from launcher.inventory import document
from launcher.inventory.mistakes import did_you_mean
from launcher.inventory.partial_validation import validate_parts
from launcher.recipes.schema import Recipe, unknown_keys
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
    """Recipes by name (ORG/MODEL), and their hardware profiles; `vllm` is the version of vLLM that
    they are from, empty if unknown.
    """

    source: str
    vllm: str = ""
    hardware: Mapping[str, Any]
    recipes: Mapping[str, Any]

    def hardware_by_name(self, accelerator: str) -> dict[str, Hardware]:
        """Return the hardware profiles of an accelerator by name, such as h100."""
        profiles = {item.name: item for item in self.all_hardware()}
        return {key: value for key, value in profiles.items() if value.accelerator == accelerator}

    def all_hardware(self) -> list[Hardware]:
        """Return all hardware profiles."""
        return [Hardware(name=name, **data) for name, data in self.hardware.items()]

    def load_recipe(self, name: str) -> Recipe:
        """Return a recipe by name, or the one in a file; raises RequestError."""
        if name.endswith((".yaml", ".yml")):
            return read_recipe(Path(name))
        if name not in self.recipes:
            raise RequestError(
                f"no recipe `{name}`{did_you_mean(name, self.recipes)}",
                hint=f"list similar recipes: `vlaunch recipes list {name.rpartition('/')[2]}`",
            )
        return Recipe.model_validate(self.recipes[name])


def load_library() -> Library:
    """Read the imported recipes, or the packaged ones if those are of a newer vLLM."""
    packaged, path = load_packaged(), user_file()
    if not path.is_file():
        return packaged
    try:
        imported = Library(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(
            f"cannot read the imported recipes in {path}",
            evidence=str(error),
            hint="import them again: `vlaunch recipes update`; to use the packaged ones:"
            f" `rm {path}`",
        ) from None
    newer = version_numbers(packaged.vllm) > version_numbers(imported.vllm)
    return packaged if imported.vllm and newer else imported


def load_packaged() -> Library:
    """Read the packaged recipes."""
    return Library(**json.loads(_DATA.read_text(encoding="utf-8")))


def user_file() -> Path:
    """Return the path of the imported recipes."""
    return platformdirs.user_data_path("vlaunch") / "recipes.json"


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for comparisons; none of `nightly`."""
    start = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, start[1].split("."))) if start else ()


def read_recipe(path: Path) -> Recipe:
    """Read a recipe in vLLM's format; raises RequestError with all mistakes and their lines."""
    try:
        content = document.read_file(path, max_bytes=1 << 20, kind="recipe")
    except document.UnusableFile as error:
        raise RequestError(
            f"the recipe {path} cannot be used",
            evidence=error.describe(path),
            hint="list the packaged recipes: `vlaunch recipes list`",
        ) from None
    parsed = parse_recipe(content)
    if parsed.recipe is None:
        raise RequestError(
            f"the recipe {path} is invalid",
            evidence=[f"{path}:{mistake}" for mistake in parsed.mistakes],
            hint="see a valid one: `vlaunch recipes show openai/gpt-oss-120b`",
        )
    return parsed.recipe


@dataclass(frozen=True, slots=True)
class ParsedRecipe:
    """A recipe, or None with mistakes, each with its line; and its keys that vlaunch does not
    know.
    """

    recipe: Recipe | None
    mistakes: tuple[str, ...]
    unknown_keys: tuple[str, ...]


def parse_recipe(text: str) -> ParsedRecipe:
    """Parse the text of a recipe in vLLM's format."""
    parsed = document.parse_document(text, first_key="model")
    unknown = tuple(dict.fromkeys(unknown_keys(parsed.data, Recipe)))
    mistakes, recipe = list(parsed.mistakes), None
    if parsed.data is not None:
        recipe, invalid = validate_parts(parsed.data, Recipe, lambda _: None)
        mistakes += invalid
    lines = tuple(f"{line}: {text}" for line, text in parsed.sorted_messages(mistakes))
    return ParsedRecipe(None if mistakes else recipe, lines, unknown)


def _driver_terms(name: str) -> set[str]:
    return {term for term in name.split("_") if not _NOT_IN_DRIVER.fullmatch(term)}
