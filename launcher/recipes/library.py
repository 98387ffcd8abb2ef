"""A collection of recipes: their files, where these come from, and what is read from them when it
is asked for.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from launcher.errors import RequestError
from launcher.recipes import read
from launcher.recipes.choice import runs_on
from launcher.recipes.read import RecipeError, Said
from launcher.recipes.schema import Profile, Recipe, Strategy

_YAML = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where recipes come from: `commit` where it is known, `taken` in seconds since 1970 (0: they
    were not copied), `digest` of all files.
    """

    source: str
    digest: str
    commit: str = ""
    taken: float = 0.0

    @property
    def words(self) -> str:
        """Name it for people."""
        commit = f" at commit {self.commit[:12]}" if self.commit else ""
        return f"{self.source}{commit} (sha256 {self.digest[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of a list: `variants` has for each its model, its precision and the GB that it says it
    needs, `runs` the hardware that one of them may run on; `wrong` is why it cannot be read.
    """

    name: str
    title: str = ""
    provider: str = ""
    tasks: tuple[str, ...] = ()
    hardware: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    variants: Mapping[str, tuple[str, str, float]] = field(default_factory=dict)
    runs: tuple[str, ...] = ()
    wrong: str = ""

    @property
    def text(self) -> str:
        """What words are looked for in, in lower case."""
        models = (model for model, _, _ in self.variants.values())
        return " ".join((self.name, self.title, self.provider, *self.tasks, *models)).lower()


@dataclass(frozen=True, kw_only=True)
class Library:
    """Recipes by their files: path → text. `made` is the list that was made of them before."""

    files: Mapping[str, str]
    origin: Origin
    made: tuple[Entry, ...] = ()

    @cached_property
    def paths(self) -> dict[str, str]:
        """The file of each recipe, ORG/MODEL."""
        if "models.json" in self.files:
            return {name: f"{name}.json" for name in listed(self.files["models.json"])}
        found = {}
        for path in self.files:
            if path.startswith("models/") and path.endswith(_YAML):
                found[path.removeprefix("models/").rpartition(".")[0]] = path
        return dict(sorted(found.items(), key=lambda each: each[0].lower()))

    @cached_property
    def profiles(self) -> Mapping[str, Profile]:
        """What kinds of nodes the recipes know; raises RecipeError."""
        name = next((each for each in self.files if each.startswith("taxonomy.")), "taxonomy.yaml")
        return read.taxonomy(self.files.get(name, ""), name).value.hardware_profiles

    @cached_property
    def strategies(self) -> Mapping[str, Strategy]:
        """The ways in which models are spread; raises RecipeError."""
        found = [read.strategy(text, path).value for path, text in self._strategy_files().items()]
        return {each.name: each for each in found}

    def _strategy_files(self) -> dict[str, str]:
        if "strategies.json" not in self.files:
            return {path: text for path, text in self.files.items() if path[:11] == "strategies/"}
        said: dict[str, Any] = _json(self.files["strategies.json"])
        return {f"strategies/{name}.json": json.dumps(each) for name, each in said.items()}

    def recipe(self, name: str) -> Said[Recipe]:
        """Return a recipe by its name; raises RequestError when there is none, RecipeError when it
        cannot be read.
        """
        path = self.paths.get(name)
        if path is None or path not in self.files:
            near = difflib.get_close_matches(name, list(self.paths), n=1)
            raise RequestError(
                f"no recipe `{name}` in {self.origin.source}"
                + (f"; did you mean `{near[0]}`?" if near else ""),
                hint=f"look for it: `vlaunch recipes list {name.rpartition('/')[2]}`",
            )
        return read.recipe(self.files[path], path)

    def named(self, name: str) -> tuple[str, str]:
        """Return the recipe that a name means, and the variant, where it is the model of one."""
        if name in self.paths:
            return name, ""
        for each in self.entries:
            for variant, (model, _, _) in each.variants.items():
                if name == model:
                    return each.name, variant
        return name, ""

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All recipes, by name; those that cannot be read say why."""
        return self.made or tuple(self._entry(name) for name in self.paths)

    def _entry(self, name: str) -> Entry:
        try:
            said = self.recipe(name).value
        except RecipeError as error:
            return Entry(name=name, wrong=error.evidence)
        return Entry(
            name=name,
            title=said.meta.title,
            provider=said.meta.provider,
            tasks=tuple(said.meta.tasks),
            hardware=said.meta.hardware,
            version=said.model.min_vllm_version or "",
            variants={
                key: (
                    each.model_id or said.model.model_id,
                    each.precision,
                    each.vram_minimum_gb or 0.0,
                )
                for key, each in said.variants.items()
            },
            runs=runs_on(said, self.profiles),
        )


def digest(files: Mapping[str, str]) -> str:
    """Return what changes when any file does."""
    each = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
    return hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()


def listed(text: str) -> list[str]:
    """Return the recipes that a site lists; variants with pages of their own are their recipes'."""
    said = _json(text)
    rows = said if isinstance(said, list) else []
    found = [each for each in rows if isinstance(each, dict) and "derived_from" not in each]
    return sorted({str(each.get("hf_id") or "") for each in found} - {""}, key=str.lower)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}
