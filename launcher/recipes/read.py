"""The text of a recipe, of hardware or of a strategy → what it says, or every mistake in it.

What this version of vlaunch does not know is no mistake: it is named, for it may matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from launcher.errors import RequestError
from launcher.inventory import document
from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake, Where, shown, spell
from launcher.inventory.partial_validation import validated
from launcher.recipes.schema import Recipe, Strategy, Taxonomy

_Shape = TypeVar("_Shape")
_STAND_INS: Mapping[Where, object] = {("model", "model_id"): "x/y", ("name",): "x"}
_HINT = "nothing was started; the recipe has to be mended where it comes from"


class RecipeError(RequestError):
    """A recipe, or what belongs to it, cannot be read; every mistake in it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said(Generic[_Shape]):
    """What a file says, and the places in it that are not known here."""

    value: _Shape
    unknown: tuple[str, ...] = ()


def recipe(text: str, name: str) -> Said[Recipe]:
    """Read a recipe in YAML or JSON, from the file of this name; raises RecipeError."""
    written = parsed(text, name, first="meta")
    if written.data is not None:
        _with_strategies(written.data)
    return _checked(written, name, Recipe, _broken)


def taxonomy(text: str, name: str) -> Said[Taxonomy]:
    """Read what kinds of nodes there are; raises RecipeError."""
    return _read(text, name, Taxonomy, first="hardware_profiles")


def strategy(text: str, name: str) -> Said[Strategy]:
    """Read a strategy; raises RecipeError."""
    return _read(text, name, Strategy, first="name")


def parsed(text: str, name: str, *, first: str) -> Document:
    """Read YAML, or JSON where the file's name ends so, of which `first` is the first key."""
    if not name.endswith(".json"):
        return document.parse(text, first=first, example="docs/recipes.md")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        told = f"not valid JSON: {error if isinstance(error, ValueError) else 'too deep'}"
        return Document(data=None, lines={}, mistakes=(Mistake(where=(), text=told),))
    if isinstance(data, dict):
        return Document(data=data, lines={}, mistakes=())
    text = f"should be a mapping that starts with `{first}:`, not {shown(data)}"
    return Document(data=None, lines={}, mistakes=(Mistake(where=(), text=text),))


def checked(written: Document, name: str, shape: type[_Shape]) -> Said[_Shape]:
    """Return what a file says as a `shape`; raises RecipeError with every mistake."""
    return _checked(written, name, shape, lambda _: [])


def refused(name: str, written: Document, mistakes: Sequence[Mistake]) -> RecipeError:
    """Return the error that tells every mistake, in the order of lines."""
    lines = written.told(mistakes)
    number = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    return RecipeError(
        f"{number} in `{name}`", evidence=[f"{name}:{at}: {said}" for at, said in lines], hint=_HINT
    )


def _read(
    text: str, name: str, shape: type[_Shape], *, first: str, rules: Any = lambda _: []
) -> Said[_Shape]:
    return _checked(parsed(text, name, first=first), name, shape, rules)


def _checked(written: Document, name: str, shape: type[_Shape], rules: Any) -> Said[_Shape]:
    mistakes = list(written.mistakes)
    made: _Shape | None = None
    unknown: list[Mistake] = []
    if written.data is not None:
        made, found = validated(written.data, shape, _stand_in)
        unknown = [each for each in found if each.unknown]
        mistakes += [each for each in found if not each.unknown]
    if made is not None and not mistakes:
        mistakes = rules(made)
    if mistakes or made is None:
        raise refused(name, written, mistakes)
    return Said(value=made, unknown=tuple(spell(each.where) for each in unknown))


def _with_strategies(said: dict[str, Any]) -> None:
    """Find the strategies of a recipe as its site has it: they are those of its command lines."""
    command = said.get("recommended_command")
    if "compatible_strategies" in said or not isinstance(command, dict):
        return
    first, others = command.get("strategy"), command.get("alternatives")
    names = [first, *(others if isinstance(others, dict) else [])]
    found = [each for each in names if isinstance(each, str) and not each.startswith("kv_store")]
    said["compatible_strategies"] = found
    if found and found[0].startswith("single_node_"):
        said.setdefault("default_strategy", found[0])


def _stand_in(where: Where) -> object:
    """What is wrong is taken out; a model stands in for a missing one, so that the rest is read."""
    return _STAND_INS.get(where)


def _broken(said: Recipe) -> list[Mistake]:
    """Say what does not go together: words that name nothing in the recipe."""
    features = said.features
    found = [
        _names(("opt_in_features", at), key, features, "feature")
        for at, key in enumerate(said.opt_in_features)
    ]
    for name, variant in said.variants.items():
        for key, mode in variant.default_modes.items():
            where: Where = ("variants", name, "default_modes", key)
            found.append(_names(where, key, features, "feature"))
            modes = features[key].modes if key in features else {}
            found += [_names(where, mode, modes, "mode")] if modes else []
    for name, feature in features.items():
        if feature.modes and feature.default_mode:
            where = ("features", name, "default_mode")
            found.append(_names(where, feature.default_mode, feature.modes, "mode"))
        if feature.modes and feature.args:
            text = "has `args` and `modes`, of which only one counts"
            found.append(Mistake(where=("features", name), text=text))
    return [each for each in found if each is not None]


def _names(where: Where, word: str, known: Any, kind: str) -> Mistake | None:
    if word in known:
        return None
    return Mistake(where=where, text=f"names no {kind} of this recipe: {shown(word)}")
