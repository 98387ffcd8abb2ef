"""`vlaunch recipes`: the vLLM project's recipes, packaged or imported."""

from contextlib import nullcontext
from pathlib import Path

import click

from launcher.app import options
from launcher.app.terminal import dump_json, print_field, say
from launcher.recipes.serve_options import complete_recipes


@click.group()
def recipes() -> None:
    """List, show and import the vLLM project's recipes; `vlaunch serve --recipe` serves one."""


@recipes.command("list", params=[options.JSON], short_help="List recipes")
@click.argument("words", metavar="[WORD…]", nargs=-1)
def list_(as_json: bool, words: tuple[str, ...]) -> int:
    """List the recipes that contain every WORD in their names, models, hardware or arguments.

    Matches in names come first.
    """
    from launcher.recipes import library

    def named_otherwise(item: tuple[str, object]) -> bool:
        return not all(term.lower() in item[0].lower() for term in words)

    packaged = library.load_library()
    matches = {
        name: packaged.load_recipe(name)
        for name, data in sorted(packaged.recipes.items(), key=named_otherwise)
        if all(term.lower() in f"{name} {data}".lower() for term in words)
    }
    if as_json:
        click.echo(dump_json({"source": packaged.source, "recipes": list(matches)}))
        return 0
    width = max(map(len, matches), default=0)
    for name, recipe in matches.items():
        variants = recipe.variants.items()
        sizes = (f"{key} {variant.vram_minimum_gb:g} GB" for key, variant in variants)
        verified = [key for key, status in recipe.meta.hardware.items() if status == "verified"]
        suffix = f"; verified on {', '.join(verified)}" if verified else ""
        print_field(f"{name:<{width}}  {', '.join(sizes)}{suffix}")
    say(f"{len(matches)} of {len(packaged.recipes)} recipes from {packaged.source}")
    return 0


@recipes.command(short_help="Show a recipe")
@click.argument("name", metavar="NAME", shell_complete=complete_recipes)
def show(name: str) -> int:
    """Print a recipe, ORG/MODEL or a file, in vLLM's format.

    `vlaunch serve --recipe NAME --dry-run --offline` prints the commands that would start it.
    """
    import yaml

    from launcher.recipes import library

    packaged = library.load_library()
    recipe = packaged.load_recipe(name).model_dump(exclude_defaults=True)
    source = packaged.source if name in packaged.recipes else name
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=1000)
    click.echo(f"# {source}\n{text}", nl=False)
    return 0


@recipes.command(params=[options.JSON], short_help="Import the recipes of a vLLM release")
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Checkout of vLLM, or its source distribution (default: the newest on the package index).",
)
def update(as_json: bool, source: Path | None) -> int:
    """Import recipes from vLLM's own repository, in place of the packaged ones.

    Recipes with invalid fields, and those that cannot run under vlaunch, are rejected by name.
    """
    from launcher.recipes import library, update
    from launcher.recipes.source import newest_release, read_source

    with newest_release() if source is None else nullcontext(source) as path:
        content = read_source(path)
    packaged = library.load_packaged()
    result = update.judge_recipes(content, packaged.all_hardware())
    file = update.save_recipes(result, packaged.hardware)
    if as_json:
        fields = {"source": content.origin, "imported": list(result.recipes)}
        counts = {"rejected": result.rejected, "unknown_keys": result.unknown_keys}
        click.echo(dump_json({**fields, **counts, "file": str(file)}))
        return 0
    for name, reasons in result.rejected.items():
        say(f"rejected {name}: {'; '.join(reasons)}")
    for item in result.unknown_keys.items():
        say(f"ignored: {update.describe_unknown_key(*item)}")
    say(
        f"imported {len(result.recipes)} of {len(content.texts)} recipes from {content.origin},"
        f" rejected {len(result.rejected)}: {file}"
    )
    return 0
