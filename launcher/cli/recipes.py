"""`vlaunch recipes`: the vLLM project's recipes, which this machine keeps a copy of."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli import options, recipe, recipe_source
from launcher.errors import RequestError

if TYPE_CHECKING:
    from launcher.model import Inventory
    from launcher.recipes.library import Library
    from launcher.recipes.serving import Serving

_FROM = click.Option(
    ["--from", "source"],
    metavar="SOURCE",
    help="A folder, a git checkout, an archive or a URL (else: the copy that is kept).",
)


@click.group()
def recipes() -> None:
    """List and show the vLLM project's recipes, and take them anew; `vlaunch serve --recipe` serves
    one.
    """


@recipes.command(
    "list", params=[_FROM, options.JSON], short_help="the recipes there are, by words and hardware"
)
@click.option("--hardware", metavar="NAME", help="Those that may run on this, such as h100.")
@click.argument("words", metavar="[WORD…]", nargs=-1)
def list_(source: str | None, as_json: bool, hardware: str | None, words: tuple[str, ...]) -> int:
    """List the recipes in whose names, titles, makers or tasks all WORDs stand."""
    from launcher.recipes.hardware import named
    from launcher.ui import recipes as ui
    from launcher.ui.json_line import dumps
    from launcher.ui.terminal import field, say

    found = recipe_source.library(source)
    if hardware:
        named(hardware, found.profiles)
    wanted = [word.lower() for word in words]
    entries = [
        each
        for each in found.entries
        if all(word in each.text for word in wanted)
        and (not hardware or hardware in each.runs or each.wrong)
    ]
    if as_json:
        click.echo(
            dumps({"origin": asdict(found.origin), "recipes": [asdict(each) for each in entries]})
        )
        return 0
    for row in ui.listed(entries):
        field(row)
    say(f"{len(entries)} of {len(found.entries)} recipes, from {found.origin.words}")
    return 0


@recipes.command(
    params=[_FROM, options.INVENTORY, options.JSON],
    short_help="what a recipe says, and what vlaunch would do with it",
)
@click.option("--hardware", metavar="NAME", help="Say what would be served on this, such as h100.")
@click.option("--variant", metavar="NAME", help="The checkpoint, such as fp8.")
@click.option("--strategy", metavar="NAME", help="The split, such as multi_node_tp_pp.")
@click.argument("name", metavar="NAME", shell_complete=recipe_source.complete)
def show(
    source: str | None,
    named: str | None,
    as_json: bool,
    hardware: str | None,
    variant: str | None,
    strategy: str | None,
    name: str,
) -> int:
    """Show a recipe: ORG/MODEL, or the model of one of its variants.

    With --hardware, say what `vlaunch serve --recipe` would start: on the nodes of an inventory
    that is named with -i, or else on as many nodes as the recipe would take. The exit code is 2
    where it would be refused.
    """
    from launcher.recipes.description import described
    from launcher.ui import recipes as ui
    from launcher.ui.json_line import dumps
    from launcher.ui.terminal import field

    meant = recipe_source.named(name, source)
    if isinstance(meant, recipe_source.Alone):
        raise RequestError(
            f"{name} is a recipe of sparkrun",
            hint=f"see what is served: `vlaunch serve --recipe {name} --dry-run --offline`",
        )
    said = described(meant.said, meant.name, meant.source)
    flags = recipe.Flags(
        name=name, variant=variant or meant.variant or None, strategy=strategy, hardware=hardware
    )
    serving = refused = None
    try:
        serving = _served(meant, flags, named) if hardware else None
    except RequestError as error:
        refused = error
    if as_json:
        why = [refused.message, *refused.evidence.splitlines()] if refused else []
        serves = None if serving is None else asdict(serving)
        click.echo(dumps({**said, "serving": serves, "refused": why}))
        return 2 if refused else 0
    for row in ui.shown(said):
        field(row)
    if refused:
        raise refused
    if serving is not None:
        for row in ui.served(serving, _command(flags, named)):
            field(row)
    return 0


def _served(meant: recipe_source.Named, flags: recipe.Flags, path: str | None) -> Serving:
    """Return what is served on the nodes of an inventory, or of as many as the recipe takes."""
    from launcher.cli.session import read
    from launcher.recipes import serving

    inventory = read(None, path) if path else _like(meant, flags)
    seen = recipe.unasked(inventory)
    backend = inventory.serve.backend
    wish = serving.Wish(
        args=inventory.serve.args, strategy=flags.strategy is not None, backend=backend
    )
    content = recipe.described(meant, flags, inventory, seen, wish)
    return serving.serving(content, inventory, wish, seen.version)


def _like(meant: recipe_source.Named, flags: recipe.Flags) -> Inventory:
    """Return nodes of the hardware that is named, as many as the recipe would take."""
    from launcher.inventory.load import loads
    from launcher.recipes import choice, content, hardware

    found = meant.said.value
    here = hardware.named(flags.hardware or "", meant.library.profiles)
    variant = found.variants.get(flags.variant or choice.DEFAULT) or next(
        iter(found.variants.values()), None
    )
    nodes = choice.nodes_for(variant, here) if variant else 1
    image = content.usual_image(here)
    text = (
        f"cluster: {here.accelerator or 'other'}\nimage: {image}\n"
        f"accelerator: {here.accelerator or 'nvidia'}\nnodes:\n  - {{host: 'node[01-{nodes:02}]',"
        f" ip: '10.0.0.[1-{nodes}]', gpus: {here.profile.gpu_count}}}\n"
    )
    return loads(text, Path("nodes.yaml"))


def _command(flags: recipe.Flags, path: str | None) -> str:
    words = ["vlaunch", "serve", "--recipe", flags.name or ""]
    for flag, value in (
        ("--variant", flags.variant),
        ("--strategy", flags.strategy),
        ("--hardware", flags.hardware),
        ("-i", path),
    ):
        words += [flag, value] if value else []
    return f"`{shlex.join(words)}`"


@recipes.command(params=[_FROM, options.JSON], short_help="take the recipes anew, and keep them")
def update(source: str | None, as_json: bool) -> int:
    """Take the recipes from github.com/vllm-project/recipes, or from SOURCE, and keep a copy.

    Each is read before the copy takes the place of the one before; the copy has a sum, by which
    damage is noticed.
    """
    from launcher.recipes import kept
    from launcher.remote.recipe_site import OFFICIAL
    from launcher.ui.json_line import dumps
    from launcher.ui.terminal import say

    found = recipe_source.taken(source or OFFICIAL)
    path = recipe_source.kept_at()
    _ = found.profiles, found.strategies  # what cannot be read is not kept
    wrong = {each.name: each.wrong for each in found.entries if each.wrong}
    if not found.entries or len(wrong) == len(found.entries):
        raise RequestError(
            f"{found.origin.source} has no recipe that can be read",
            evidence=list(wrong.values())[:1],
        )
    unknown = _unknown(found)
    kept.write(path, found)
    if as_json:
        said = {"kept": str(path), "origin": asdict(found.origin), "recipes": len(found.entries)}
        click.echo(dumps({**said, "wrong": wrong, "unknown": unknown}))
        return 0
    when = datetime.fromtimestamp(found.origin.taken).strftime("%Y-%m-%d %H:%M")
    say(
        f"{len(found.entries)} recipes from {found.origin.words}, {when}, kept in {path}", err=False
    )
    for name, why in wrong.items():
        say(f"{name} cannot be read: {why}")
    for key, names in unknown.items():
        say(f"`{key}` is not known to vlaunch, and not used: in {', '.join(names[:3])}")
    return 0


def _unknown(found: Library) -> dict[str, list[str]]:
    """Return the keys that nobody here knows, each with the recipes that have it."""
    said: dict[str, list[str]] = {}
    for each in found.entries:
        for key in () if each.wrong else found.recipe(each.name).unknown:
            said.setdefault(key, []).append(each.name)
    return said
