"""Import of recipes: those that are valid and can run under vlaunch replace the packaged ones."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.core.errors import RequestError
from launcher.recipes import library
from launcher.recipes.adapt import value_problems
from launcher.recipes.library import Hardware
from launcher.recipes.merge import merge_recipe
from launcher.recipes.schema import Recipe
from launcher.recipes.source import RecipeSource, read_source
from launcher.recipes.vllm_command import VllmCommand
from launcher.tools import vllm
from launcher.upstream.entries import version_range

# `uv pip install vllm==0.11.2`; the image of a cluster has a vLLM of its own.
_PINNED_VLLM = re.compile(r"\bvllm(?:\[[\w,]+\])?==(\d+(?:\.\d+)+)")
_MANY_GPUS = 10_000  # for the question if a variant fits any cluster
_SEPARATE = {"pd_cluster"}  # strategies with servers of their own for prefill and decode


@dataclass(frozen=True, kw_only=True)
class RecipeImport:
    """Recipes of a source: those to import, and the reasons for the rejection of others, by name.

    `unknown_keys` has the keys that vlaunch does not know, with the recipes that have them.
    """

    source: RecipeSource
    recipes: Mapping[str, Recipe]
    rejected: Mapping[str, Sequence[str]]
    unknown_keys: Mapping[str, Sequence[str]] = field(default_factory=dict)


def judge_recipes(source: RecipeSource, hardware: Iterable[Hardware]) -> RecipeImport:
    """Validate the fields of all recipes of a source, and decide which can run under vlaunch."""
    profiles = list(hardware)
    recipes: dict[str, Recipe] = {}
    rejected: dict[str, Sequence[str]] = {}
    unknown: dict[str, list[str]] = defaultdict(list)
    for name, text in source.texts.items():
        parsed = library.parse_recipe(text)
        for key in parsed.unknown_keys:
            unknown[key].append(name)
        if parsed.recipe is None:
            rejected[name] = [f"line {mistake}" for mistake in parsed.mistakes]
        elif reasons := rejection_reasons(name, parsed.recipe, profiles):
            rejected[name] = reasons
        else:
            recipes[name] = parsed.recipe
    return RecipeImport(source=source, recipes=recipes, rejected=rejected, unknown_keys=unknown)


def rejection_reasons(name: str, recipe: Recipe, hardware: Sequence[Hardware]) -> list[str]:
    """Return why a recipe cannot run under vlaunch; empty if it can run on any hardware."""
    if "omni" in recipe.meta.tasks:
        return ["it is for vLLM-Omni, which vlaunch does not start"]
    if recipe.compatible_strategies and _SEPARATE.issuperset(recipe.compatible_strategies):
        return ["it needs separate servers for prefill and decode, which vlaunch does not start"]
    supported = version_range("vllm")
    for dependency in recipe.dependencies:
        pinned = _PINNED_VLLM.search(dependency.command)
        if pinned and not dependency.optional and supported.reasons(pinned[1]):
            return [
                f"it needs vLLM {pinned[1]}, and vlaunch needs {supported.broken_below} or newer"
            ]
    reasons: dict[str, None] = {}
    for profile in hardware:
        try:
            problems = _command_problems(merge_recipe(name, recipe, profile, _MANY_GPUS))
        except RequestError as error:
            problems = [str(error)]
        if not problems:
            return []
        reasons |= dict.fromkeys(problems)
    return list(reasons)


def _command_problems(command: VllmCommand) -> list[str]:
    options = [option for option in command.options if not vllm.reserved_key(option.argv[0])]
    return [text for text, _ in value_problems(options, command.env)]


def check_fields(path: Path) -> list[str]:
    """Check the format of the recipes in a folder or an archive of vLLM.

    Returns a line for each invalid field, and for each key that vlaunch does not know. Raises
    RequestError if there are no recipes.
    """
    lines, unknown = list[str](), defaultdict[str, list[str]](list)
    for name, text in read_source(path).texts.items():
        parsed = library.parse_recipe(text)
        lines += [f"{name}:{mistake}" for mistake in parsed.mistakes]
        for key in parsed.unknown_keys:
            unknown[key].append(name)
    return lines + [describe_unknown_key(*item) for item in unknown.items()]


def describe_unknown_key(key: str, names: Sequence[str]) -> str:
    """Describe a key that vlaunch does not know, with the recipes that have it."""
    omitted = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"`{key}` is unknown: {', '.join(names[:3])}{omitted}"


def format_library(
    source: RecipeSource, hardware: Mapping[str, object], recipes: Mapping[str, Recipe]
) -> str:
    """Return the text of a library's file: a line per entry, so that a diff shows what changed."""
    parts = {
        "source": json.dumps(source.origin),
        "vllm": json.dumps(source.version),
        "hardware": _lines({name: json.dumps(profile) for name, profile in hardware.items()}),
        "recipes": _lines(
            {
                name: recipe.model_dump_json(exclude_defaults=True)
                for name, recipe in recipes.items()
            }
        ),
    }
    text = ",\n".join(f"{json.dumps(key)}: {value}" for key, value in parts.items())
    return f"{{\n{text}\n}}\n"


def _lines(entries: Mapping[str, str]) -> str:
    lines = [f"{json.dumps(name)}: {text}" for name, text in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def save_recipes(result: RecipeImport, hardware: Mapping[str, object]) -> Path:
    """Replace the imported recipes; raises RequestError if that fails."""
    path = library.user_file()
    text = format_library(result.source, hardware, result.recipes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, encoding="utf-8", delete=False
        ) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        raise RequestError(f"cannot write {path}", evidence=str(error)) from None
    return path
