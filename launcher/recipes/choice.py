"""What of a recipe is served on some hardware: which variant, which strategy, which features.

Pure. The rules are those of the recipes' own site (`src/lib/command-synthesis.js` and
`scripts/build-recipes-api.mjs` in vllm-project/recipes), but for what is served where it does not
fit: the site goes on to more nodes, and here another variant comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from launcher.errors import RequestError
from launcher.inventory.mistakes import did_you_mean
from launcher.recipes.hardware import Hardware
from launcher.recipes.schema import Feature, Needed, Profile, Recipe, Strategy, Variant

DEFAULT = "default"
# Formats that only Blackwell's tensor cores have.
_NEEDS = {
    "nvfp4": Needed(brand="NVIDIA", generation="blackwell"),
    "fp4": Needed(brand="NVIDIA", generation="blackwell"),
}
_MULTI = "multi_node_"
_SINGLE = "single_node_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a variant fits a cluster, and how that is known."""

    fits: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is served. `features` has each that is on, with its mode where it has several; `why` is
    what decided.
    """

    recipe: Recipe
    hardware: Hardware
    variant: str
    strategy: Strategy
    features: Mapping[str, str]
    why: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> Variant:
        """The variant itself; an empty one where the recipe has none."""
        return self.recipe.variants.get(self.variant, Variant())

    @property
    def model(self) -> str:
        """Which model vLLM is to serve."""
        return self.checkpoint.model_id or self.recipe.model.model_id


def unfit(recipe: Recipe, name: str, hardware: Hardware) -> str:
    """Return why a variant does not run on some hardware; empty when nothing speaks against it."""
    variant = recipe.variants[name]
    if variant.supported_hardware and hardware.id not in variant.supported_hardware:
        return f"variant `{name}` is for {', '.join(variant.supported_hardware)}"
    needs = variant.precision_hardware or _NEEDS.get(variant.precision)
    if needs is None:
        return ""
    other = needs.brand and needs.brand != hardware.profile.brand
    older = needs.generation and needs.generation not in hardware.profile.generation
    if not (other or older):
        return ""
    words = " ".join(filter(None, [needs.brand, needs.generation]))
    return f"variant `{name}` ({variant.precision}) needs {words}"


def runs_on(recipe: Recipe, known: Mapping[str, Profile]) -> tuple[str, ...]:
    """Return the hardware on which a variant may run. Some hardware, such as a desktop, counts only
    where the recipe names it.
    """
    return tuple(
        name
        for name, profile in known.items()
        if (not profile.restricted or name in recipe.meta.hardware)
        and recipe.meta.hardware.get(name) != "unsupported"
        and any(
            not unfit(recipe, variant, Hardware(id=name, profile=profile))
            for variant in recipe.variants
        )
    )


def of_size(variant: Variant, memory_gb: float) -> Fit | None:
    """Judge by what the recipe says it needs: bytes of weights and a fifth; None when it says
    nothing.
    """
    needed = variant.vram_minimum_gb
    if not needed or not memory_gb:
        return None
    return Fit(
        fits=needed <= memory_gb,
        why=f"{needed:g} GB by the recipe's own figure, {memory_gb:.0f} GB here",
    )


def variant_for(
    recipe: Recipe, hardware: Hardware, asked: str | None, fit: Callable[[str], Fit | None]
) -> tuple[str, str]:
    """Return the variant to serve, and why it is that one.

    Without one that is asked for, it is the default where that fits, else the largest that does.

    Raises RequestError: there is no such variant, or none runs here and fits.
    """
    known = recipe.variants
    if recipe.meta.hardware.get(hardware.id) == "unsupported":
        raise RequestError(
            f"{recipe.model.model_id} does not run on {hardware.id} yet, its recipe says",
            hint="other hardware: `--hardware NAME`",
        )
    if asked is not None:
        return _asked(recipe, hardware, asked, fit)
    if not known:
        return DEFAULT, "the recipe has one checkpoint"
    order = sorted(known, key=lambda name: (name != DEFAULT, -(known[name].vram_minimum_gb or 0.0)))
    said = []
    for name in order:
        if wrong := unfit(recipe, name, hardware):
            said.append(wrong)
            continue
        found = fit(name)
        if found is None or found.fits:
            before = f"; {'; '.join(said)}" if said else ""
            return name, (f"fits: {found.why}" if found else "its size is not known") + before
        said.append(f"variant `{name}` does not fit: {found.why}")
    smallest = min(order, key=lambda name: known[name].vram_minimum_gb or 0.0)
    raise RequestError(
        f"no variant of {recipe.model.model_id} can be served here",
        evidence=list(dict.fromkeys(said)),
        hint=f"try one in spite of that: `--variant {smallest}`; other hardware: `--hardware NAME`",
    )


def _asked(
    recipe: Recipe, hardware: Hardware, asked: str, fit: Callable[[str], Fit | None]
) -> tuple[str, str]:
    if asked not in recipe.variants:
        raise RequestError(
            f"{recipe.model.model_id} has no variant `{asked}`"
            + did_you_mean(asked, recipe.variants),
            hint=f"it has {', '.join(recipe.variants) or 'none'}",
        )
    found = fit(asked)
    warned = [unfit(recipe, asked, hardware)]
    warned += [f"it may not fit: {found.why}"] if found and not found.fits else []
    return asked, "; ".join(["as asked", *filter(None, warned)])


def offered(recipe: Recipe, hardware: Hardware, known: Mapping[str, Strategy]) -> list[str]:
    """Return the strategies that a recipe has for some hardware, in its order."""
    listed = list(recipe.compatible_strategies)
    granted = [
        name
        for name, each in recipe.strategy_hardware.items()
        if name not in listed and "supported" in each.values()
    ]
    return [
        name
        for name in (*listed, *granted)
        if name in known and _supported(recipe, name, hardware, listed)
    ]


def _supported(recipe: Recipe, name: str, hardware: Hardware, listed: list[str]) -> bool:
    gate = hardware.of(recipe.strategy_hardware.get(name, {}))
    if gate is not None:
        return gate != "unsupported"
    scales = hardware.profile.scalable or not (name.startswith(_MULTI) or name == "pd_cluster")
    return name in listed and scales


def nodes_for(variant: Variant, hardware: Hardware) -> int:
    """Return how many such nodes the recipe would take: as few as hold what it says it needs."""
    needed, each = variant.vram_minimum_gb or 0.0, hardware.profile.vram_gb
    return max(1, ceil(needed / each)) if each and hardware.profile.scalable else 1


def strategy_for(
    recipe: Recipe,
    hardware: Hardware,
    known: Mapping[str, Strategy],
    asked: str | None,
    nodes: int,
) -> Strategy:
    """Return the strategy that is asked for, or that the recipe would take on so many nodes.

    Raises RequestError: there is none of that name, or the recipe does not have it.
    """
    have = offered(recipe, hardware, known)
    if asked is None:
        name = _recommended(recipe, have, nodes)
        return known.get(name) or Strategy(name=name)
    if asked not in known:
        raise RequestError(
            f"no strategy `{asked}`" + did_you_mean(asked, known),
            hint=f"this recipe has, for {hardware.id}: {', '.join(have) or 'none'}",
        )
    if have and asked not in have:
        raise RequestError(
            f"{recipe.model.model_id} has no strategy `{asked}` for {hardware.id}",
            hint=f"it has {', '.join(have)}",
        )
    return known[asked]


def _recommended(recipe: Recipe, have: list[str], nodes: int) -> str:
    wish = recipe.default_strategy
    if wish in have:
        if nodes == 1 or not wish.startswith(_SINGLE):
            return wish
        sibling = _MULTI + wish.removeprefix(_SINGLE)
        if sibling in have:
            return sibling
    first = [f"{_MULTI}{kind}" for kind in ("tp", "dep", "tep")] if nodes > 1 else []
    usual = [name for name in have if name != "pd_cluster"]
    return next((name for name in (*first, f"{_SINGLE}tp", *usual) if name in have), f"{_SINGLE}tp")


def features_for(
    recipe: Recipe,
    hardware: Hardware,
    variant: str,
    strategy: str,
    *,
    more: Mapping[str, str],
    without: Iterator[str] | tuple[str, ...] = (),
) -> tuple[dict[str, str], list[str]]:
    """Return the features that are on, each with its mode, and what is said of those that are not.

    Args:
        recipe: what offers them.
        hardware: what they are to run on.
        variant: the name of the variant.
        strategy: the name of the strategy.
        more: those that are asked for, with the mode that is (empty: the recipe's own).
        without: those that are not wanted.

    Raises RequestError for one that the recipe does not have.
    """
    known, checkpoint = recipe.features, recipe.variants.get(variant, Variant())
    left = tuple(without)
    for name in (*more, *left):
        if name not in known:
            raise RequestError(
                f"{recipe.model.model_id} has no feature `{name}`" + did_you_mean(name, known),
                hint=f"it has {', '.join(known) or 'none'}",
            )
    optional = {*recipe.opt_in_features, *recipe.hardware_opt_in_features.get(hardware.id, [])}
    optional -= checkpoint.default_modes.keys()
    on: dict[str, str] = {}
    said = []
    for name, feature in known.items():
        if name in left or (name in optional and name not in more):
            continue
        mode, wrong = _mode(feature, name, checkpoint, variant, hardware, more.get(name, ""))
        wrong = wrong or _missing(feature, strategy, hardware)
        if not wrong:
            on[name] = mode
        elif name in more:
            raise RequestError(f"feature `{name}` cannot be had here: {wrong}")
        else:
            said.append(f"feature `{name}` is left out: {wrong}")
    return on, said


def _missing(feature: Feature, strategy: str, hardware: Hardware) -> str:
    if feature.strategies and strategy not in feature.strategies:
        return f"it is for {', '.join(feature.strategies)}"
    if _gated(feature.hardware, hardware):
        return f"it does not run on {hardware.id}"
    if feature.companion is not None:
        return "it needs another program beside vLLM, which vlaunch does not start"
    return ""


def _mode(
    feature: Feature, name: str, checkpoint: Variant, variant: str, hardware: Hardware, asked: str
) -> tuple[str, str]:
    """Return the mode of a feature, or why it has none here."""
    if not feature.modes:
        return "", (f"it has no mode `{asked}`" if asked else "")
    allowed = [
        key
        for key, mode in feature.modes.items()
        if (not mode.variants or variant in mode.variants) and not _gated(mode.hardware, hardware)
    ]
    if asked:
        here = ", ".join(allowed) or "none"
        return asked, ("" if asked in allowed else f"no mode `{asked}` here; it has {here}")
    wishes: list[Any] = [checkpoint.default_modes.get(name), feature.default_mode, *allowed]
    found = next((each for each in wishes if each in allowed), "")
    return found, ("" if found else f"none of its modes is for {variant} on {hardware.id}")


def _gated(written: Mapping[str, str], hardware: Hardware) -> bool:
    return "unsupported" in (written.get(hardware.id), written.get(hardware.generation))
