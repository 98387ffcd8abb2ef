"""Which recipes are meant: those that this machine keeps, or those of a folder, an archive or a
URL.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.errors import RequestError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from launcher.inventory.document import Document
    from launcher.recipes.library import Library
    from launcher.recipes.read import Said
    from launcher.recipes.schema import Recipe

VARIABLE = "VLAUNCH_RECIPES"
_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class Named:
    """A recipe, what it says, and where it comes from; `library` has what hardware and strategies
    are. `variant` is set where the model of one was named.
    """

    name: str
    said: Said[Recipe]
    source: str
    library: Library
    variant: str = ""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A recipe of sparkrun's, by the name of its file: it needs no library."""

    name: str
    written: Document


def kept_at() -> Path:
    """Return where this machine keeps its copy of recipes."""
    import platformdirs

    from launcher.recipes import kept

    return platformdirs.user_data_path("vlaunch") / kept.FILE


def library(source: str | None) -> Library:
    """Return the recipes of a source, else those of VLAUNCH_RECIPES, else those that are kept.

    Raises RequestError, or VlaunchError when a URL cannot be reached.
    """
    from launcher.recipes import kept

    source = source or os.environ.get(VARIABLE)
    return taken(source) if source else kept.load(kept_at())


def taken(name: str) -> Library:
    """Take the recipes of a folder, an archive or a URL as they are now."""
    from launcher.recipes import source

    if name.startswith(("http://", "https://")):
        from launcher.remote import recipe_site

        return source.library(recipe_site.take(name), name, time.time())
    path = Path(name)
    return source.library(source.local(path), str(path.absolute()), time.time())


def named(name: str, source: str | None) -> Named | Alone:
    """Return the recipe of a name, or of a file; raises RequestError."""
    if name.endswith(_FILES):
        return _alone(Path(name), source)
    found = library(source)
    recipe, variant = found.named(name)
    return Named(
        name=recipe,
        said=found.recipe(recipe),
        source=found.origin.words,
        library=found,
        variant=variant,
    )


def _alone(path: Path, source: str | None) -> Named | Alone:
    """Read a file with one recipe: what it does not say itself, hardware and strategies, is that of
    the recipes around it, else of those that are kept.
    """
    from launcher.inventory import text
    from launcher.recipes import read, sparkrun
    from launcher.recipes.source import MOST_OF_A_FILE

    try:
        content = text.read(path, most=MOST_OF_A_FILE, kind="recipe")
    except text.Unusable as error:
        raise RequestError(
            f"`{path}` cannot be used",
            evidence=str(error),
            hint="name a recipe of `vlaunch recipes list`, or the file of one",
        ) from None
    written = read.parsed(content, str(path), first="meta")
    if sparkrun.is_one(written):
        return Alone(name=str(path), written=written)
    around = next(
        (each for each in path.absolute().parents if (each / "taxonomy.yaml").exists()), None
    )
    said = read.recipe(content, str(path))
    return Named(
        name=said.value.model.model_id,
        said=said,
        source=str(path),
        library=library(source or (str(around) if around else None)),
    )


def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the names of recipes that begin so, for the shell."""
    from click.shell_completion import CompletionItem

    from launcher.errors import VlaunchError

    try:
        names = [each.name for each in library(None).entries]
    except VlaunchError:
        names = []
    return [CompletionItem(name) for name in names if name.lower().startswith(begun.lower())]
