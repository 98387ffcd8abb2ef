"""A recipe for `vlaunch serve`: its flags, and what of it is served on a cluster."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from launcher import placement
from launcher.cli import recipe_source
from launcher.errors import RequestError

if TYPE_CHECKING:
    from launcher.capacity.cluster import Cluster
    from launcher.cli.command import Call
    from launcher.cli.plan_inputs import Model
    from launcher.cli.recipe_source import Named
    from launcher.cli.session import Session
    from launcher.cli.start import Asked
    from launcher.model import Inventory
    from launcher.recipes.choice import Choice, Fit
    from launcher.recipes.hardware import Hardware
    from launcher.recipes.schema import Recipe
    from launcher.recipes.serving import Content, Serving, Wish
    from launcher.site import Site

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--recipe",
        metavar="NAME",
        shell_complete=recipe_source.complete,
        help="Serve as this recipe says: ORG/MODEL of `vlaunch recipes list`, or a file.",
    ),
    click.option("--variant", metavar="NAME", help="Of a recipe: the checkpoint, such as fp8."),
    click.option(
        "--strategy", metavar="NAME", help="Of a recipe: its split, such as multi_node_tp_pp."
    ),
    click.option(
        "--hardware", metavar="NAME", help="Of a recipe: what these nodes are, such as h100."
    ),
    click.option(
        "--feature",
        "features",
        metavar="NAME[=MODE]",
        multiple=True,
        help="Of a recipe: turn this on, too.",
    ),
    click.option(
        "--without-feature",
        "left_out",
        metavar="NAME",
        multiple=True,
        help="Of a recipe: leave this out.",
    ),
    click.option(
        "--recipes",
        "source",
        metavar="SOURCE",
        help="Of a recipe: a folder, an archive or a URL with recipes (else: those that are kept).",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says of a recipe; `name` is None where none is asked for."""

    name: str | None = None
    variant: str | None = None
    strategy: str | None = None
    hardware: str | None = None
    features: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    source: str | None = None

    @property
    def more(self) -> dict[str, str]:
        """The features that are asked for, each with its mode."""
        return {name: mode for name, _, mode in (each.partition("=") for each in self.features)}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What nodes said: their GPU and how many of it, the version of vLLM in the image (None: not
    known), and whether the variants that are there fit.
    """

    gpu: str = ""
    gpus: int = 0
    version: str | None = None
    fits: Mapping[str, Fit] = field(default_factory=dict)


def flags(function: F) -> F:
    """Add the flags of a recipe, which the function gets as one value, `recipe`."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        name = given.pop("recipe")
        said = {each: given.pop(each) for each in Flags.__dataclass_fields__ if each != "name"}
        if name is None and any(said.values()):
            raise click.UsageError(
                "--variant, --strategy, --hardware, --feature, --without-feature and --recipes go"
                " with --recipe"
            )
        return function(*args, recipe=Flags(name=name, **said), **given)

    for option in reversed(_OPTIONS):
        called = option(called)
    return cast("F", called)


def applied(call: Call, flags: Flags, asked: Asked, *, timeout: float | None) -> Asked:
    """Return a server as its recipe has it; what was asked for without it wins. `timeout` is what
    the command line says of it.

    Raises RequestError with everything that speaks against the recipe here.
    """
    from launcher.recipes.serving import Wish

    whole = call.inventory
    wish = Wish(
        args=asked.args,
        tp=asked.tp,
        pp=asked.pp,
        dp=asked.dp,
        strategy=flags.strategy is not None,
        backend=asked.backend,
    )
    here = placement.narrow(whole, asked.nodes, asked.gpus)
    found = serving(call, flags, here, wish)
    policy = asked.policy
    if timeout is None and found.timeout > policy.start_timeout:
        policy = replace(policy, start_timeout=found.timeout)
    own = [f"the model is {asked.model}, in place of {found.model}"] if asked.model else []
    return replace(
        asked,
        model=asked.model or found.model,
        args=found.args,
        env=found.env,
        tp=found.tp,
        pp=found.pp,
        dp=found.dp,
        policy=policy,
        told=(*found.notes, *own),
    )


def serving(call: Call, flags: Flags, inventory: Inventory, wish: Wish) -> Serving:
    """Return what the recipe says on the nodes of `inventory`, which are asked unless the call is
    offline.

    Raises RequestError with everything that speaks against it.
    """
    from launcher.recipes import serving as plans
    from launcher.recipes import sparkrun

    named = recipe_source.named(flags.name or "", flags.source)
    if isinstance(named, recipe_source.Alone):
        said = sparkrun.recipe(named.written, named.name)
        _without_choice(flags)
        content = sparkrun.content(said, named.name, inventory)
        version = _version(inventory.image)
        return plans.serving(content, inventory, wish, version)
    flags = replace(flags, variant=flags.variant or named.variant or None)
    recipe = named.said.value
    seen = unasked(inventory) if call.offline else _look(call, inventory, recipe, flags, wish)
    content = described(named, flags, inventory, seen, wish)
    return plans.serving(content, inventory, wish, seen.version)


def _without_choice(flags: Flags) -> None:
    asked = {
        "--variant": flags.variant,
        "--strategy": flags.strategy,
        "--feature": flags.features,
        "--without-feature": flags.left_out,
    }
    given = [name for name, value in asked.items() if value]
    if given:
        raise RequestError(
            f"a recipe of sparkrun has one way: {' and '.join(given)} cannot be chosen",
            hint="leave that out; the split: `--tp`, `--pp` and `--dp`",
        )


def described(named: Named, flags: Flags, inventory: Inventory, seen: Seen, wish: Wish) -> Content:
    """Return what the recipe of a library says, of the variant, the strategy and the features that
    are chosen.
    """
    from launcher.recipes import content

    said = named.said
    choice, notes = chosen(named, flags, inventory, seen)
    source = f"recipe {named.name}, from {named.source}"
    unknown = [
        f"`{each}` of the recipe is not known to vlaunch, and not used" for each in said.unknown
    ]
    if said.value.recommended_command is not None:
        unknown.append(
            "these recipes are a site's JSON, which leaves out what a recipe changes for a"
            " strategy; an archive of the repository has it"
        )
    return content.content(
        choice, inventory, strategy=wish.strategy, why=(source, *notes), notes=unknown
    )


def chosen(
    named: Named, flags: Flags, inventory: Inventory, seen: Seen
) -> tuple[Choice, list[str]]:
    """Return what of a recipe is served, and why it is that."""
    from launcher.recipes import choice as rules

    recipe, strategies = named.said.value, named.library.strategies
    hardware = _hardware(named, flags, inventory, seen)
    memory = hardware.gpu_gb * inventory.gpus

    def fit(name: str) -> Fit | None:
        return seen.fits.get(name) or rules.of_size(recipe.variants[name], memory)

    variant, why = rules.variant_for(recipe, hardware, flags.variant, fit)
    nodes = rules.nodes_for(recipe.variants[variant], hardware) if recipe.variants else 1
    strategy = rules.strategy_for(recipe, hardware, strategies, flags.strategy, nodes)
    features, left = rules.features_for(
        recipe, hardware, variant, strategy.name, more=flags.more, without=flags.left_out
    )
    choice = rules.Choice(
        recipe=recipe, hardware=hardware, variant=variant, strategy=strategy, features=features
    )
    names = [f"{name} ({mode})" if mode else name for name, mode in features.items()]
    off = [name for name in recipe.features if name not in features]
    notes = [
        f"variant `{variant}` on {hardware.id}: {why}",
        f"features: {', '.join(names) or 'none'}"
        + (f"; off: {', '.join(off)} (`--feature NAME`)" if off else ""),
        *left,
    ]
    return choice, notes


def _hardware(named: Named, flags: Flags, inventory: Inventory, seen: Seen) -> Hardware:
    from launcher.recipes import hardware

    profiles = named.library.profiles
    if flags.hardware is not None:
        return hardware.named(flags.hardware, profiles)
    found = hardware.of_gpu(seen.gpu, seen.gpus, profiles) if seen.gpu else None
    if found is None:
        said = f"no hardware of these recipes has the GPU `{seen.gpu}`" if seen.gpu else ""
        known = [
            name
            for name, each in profiles.items()
            if hardware.Hardware(id=name, profile=each).accelerator == inventory.accelerator
        ]
        raise RequestError(
            said or "which hardware the nodes are is not known",
            evidence=f"recipes know, of this kind: {', '.join(known) or 'none'}",
            hint="name the nearest: `--hardware NAME`",
        )
    return found


def unasked(inventory: Inventory) -> Seen:
    """Return what is known where no node is asked."""
    return Seen(version=_version(inventory.image))


def _version(image: str) -> str | None:
    """Return vLLM's version as an image's tag says it."""
    found = re.search(r":v?(\d+\.\d+(?:\.\d+)*)[^/:]*$", image.partition("@")[0])
    return found[1] if found else None


def _look(call: Call, inventory: Inventory, recipe: Recipe, flags: Flags, wish: Wish) -> Seen:
    """Ask the nodes what they are, and for the variants of the recipe that they have already."""
    from launcher.cli import prepare
    from launcher.site import Site
    from launcher.state import observe

    with call.session() as session:
        facts = observe.observe(session.inventory, session.transport, [inventory.image])
        site = Site(inventory, facts)
        used = [gpu for node in inventory.nodes for gpu in facts[node.name].used(node)]
        version = _version(inventory.image) or prepare.vllm_version(session, facts)
        fits = dict(_fits(session, site, recipe, flags, wish)) if used else {}
    least = min((node.gpus for node in inventory.nodes), default=0)
    return Seen(gpu=used[0].name if used else "", gpus=least, version=version, fits=fits)


def _fits(
    session: Session, site: Site, recipe: Recipe, flags: Flags, wish: Wish
) -> Iterator[tuple[str, Fit]]:
    """Judge the variants that a node has whole, by our own reckoning of memory."""
    from launcher.capacity.cluster import Cluster, Link
    from launcher.cli import plan_inputs
    from launcher.state import preflight
    from launcher.transport import by_node

    link = plan_inputs.link_of(site, Link(), {})
    cluster = Cluster(hosts=plan_inputs.hosts_of(site), link=link)
    for name, each in recipe.variants.items():
        if flags.variant not in (None, name):
            continue
        model = each.model_id or recipe.model.model_id
        asked = [*preflight.read_config(site, model), *preflight.list_files(site, model)]
        try:
            found = plan_inputs.model_in(by_node(session.transport, asked), model)
        except RequestError:
            continue
        yield name, _fit(found, cluster, (*recipe.model.base_args, *each.extra_args, *wish.args))


def _fit(model: Model, cluster: Cluster, args: Sequence[str]) -> Fit:
    """Judge a model as `vlaunch plan` does."""
    from launcher.capacity import choice
    from launcher.capacity.flags import flags_of
    from launcher.recipes.choice import Fit

    _, architecture, size = model
    flags = flags_of(args)
    context = flags.length or architecture.context or 4096
    question = choice.Question(
        model=architecture,
        weight_bytes=size,
        cluster=cluster,
        want=choice.Want(context=context),
        flags=flags,
    )
    planned = choice.choose(question)
    words = f"{planned.option.words}, with a request of {context:,} tokens"
    return Fit(
        fits=planned.verdict != "does-not-fit",
        why=f"`vlaunch plan` says {planned.verdict}: {words}",
    )
