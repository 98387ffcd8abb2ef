"""A recipe with a variant, hardware and features → one `vllm serve` command. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from launcher.core.errors import RequestError
from launcher.inventory.mistakes import did_you_mean
from launcher.recipes.library import Hardware
from launcher.recipes.schema import Feature, Layer, Mode, Recipe, Variant
from launcher.recipes.vllm_command import VllmCommand, last_of_each, options

# Formats that only Blackwell's tensor cores have.
_PRECISION_HARDWARE = {"nvfp4": {"generation": "blackwell"}, "fp4": {"generation": "blackwell"}}


def merge(
    name: str,
    recipe: Recipe,
    hardware: Hardware,
    gpus: int,
    *,
    variant: str | None = None,
    features: Mapping[str, str] | None = None,
) -> VllmCommand:
    """Return the command of a recipe on `gpus` GPUs of all nodes.

    Of an argument or variable that is set twice, the last counts: base, variant, hardware,
    features. `features` has the modes of those that are chosen (empty: the recipe's; `off`).

    Raises RequestError: the variant or a feature does not exist, or nothing runs on this hardware.
    """
    key, why = _variant(name, recipe, hardware, gpus, variant)
    checkpoint = recipe.variants.get(key, Variant())
    turned_on, notes = _features(name, recipe, hardware, key, features or {})
    exact = checkpoint.hardware_overrides.get(hardware.name)
    layers = [
        Layer(extra_args=recipe.model.base_args, extra_env=recipe.model.base_env),
        checkpoint,
        exact,
        _of_generation(hardware, recipe.hardware_overrides),
        _of_generation(hardware, checkpoint.hardware_overrides),
        *(Layer(extra_args=args) for args in turned_on.values()),
    ]
    env: dict[str, str] = {}
    words: list[str] = []
    for layer in filter(None, layers):
        words += layer.extra_args
        env |= layer.extra_env
    images = recipe.model.docker_image | checkpoint.docker_image
    own = next(iter(exact.docker_image.values()), "") if exact else ""
    off = [each for each in recipe.features if each not in turned_on]
    return VllmCommand(
        origin=f"the recipe {name}",
        model=checkpoint.model_id or recipe.model.model_id,
        options=tuple(last_of_each(options(words))),
        env=env,
        image=own or images.get(hardware.accelerator, ""),
        version=max(recipe.model.min_vllm_version, checkpoint.min_vllm_version, key=numbers),
        notes=(
            f"recipe {name}: variant {key} on {hardware.name or 'unknown hardware'} ({why})",
            f"features: {', '.join(turned_on) or 'none'}"
            + (f"; off: {', '.join(off)} (`--feature NAME`)" if off else ""),
            *notes,
            *_notes(recipe, checkpoint, hardware),
        ),
    )


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, for comparing; none of `nightly`."""
    start = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, start[1].split("."))) if start else ()


def _variant(
    name: str, recipe: Recipe, hardware: Hardware, gpus: int, chosen: str | None
) -> tuple[str, str]:
    """Return the variant to serve, and why: the default where it fits, else the largest."""
    if hardware.excluded(recipe.meta.hardware):
        raise RequestError(
            f"{name} does not run on {hardware.name}, according to its recipe",
            hint=f"see its hardware: `vlaunch recipes show {name}`",
        )
    variants = recipe.variants or {"default": Variant()}
    if chosen is not None and chosen not in variants:
        raise RequestError(
            f"{name} has no variant `{chosen}`{did_you_mean(chosen, variants)}",
            hint=f"its variants: {', '.join(variants)}",
        )
    memory = hardware.vram_gb / hardware.gpu_count * gpus
    order = sorted(variants, key=lambda key: (key != "default", -variants[key].vram_minimum_gb))
    rejected: list[str] = []
    for key in [chosen] if chosen else order:
        if wrong := _unfit(variants[key], hardware, memory):
            rejected.append(f"variant {key} {wrong}")
        else:
            needed = variants[key].vram_minimum_gb
            return key, "; ".join([f"needs {needed:g} GB" if needed else "fits", *rejected])
    if chosen:
        return chosen, f"chosen, but {rejected[0]}"
    raise RequestError(
        f"no variant of {name} runs on these nodes",
        evidence=rejected,
        hint=f"to try anyway: `--variant {order[-1]}`",
    )


def _unfit(variant: Variant, hardware: Hardware, memory: float) -> str:
    """Return why a variant does not run on some hardware with so many GB (0: unknown)."""
    if variant.supported_hardware and hardware.name not in variant.supported_hardware:
        return f"is for {', '.join(variant.supported_hardware)}"
    needs = variant.precision_hardware or _PRECISION_HARDWARE.get(variant.precision, {})
    own = {"brand": hardware.accelerator, "generation": hardware.generation}
    if any(own.get(key) != value.lower() for key, value in needs.items()):
        return f"({variant.precision}) needs {' '.join(needs.values())}"
    if memory and variant.vram_minimum_gb > memory:
        return f"needs {variant.vram_minimum_gb:g} GB, the GPUs have {memory:.0f} GB"
    return ""


def _features(
    name: str, recipe: Recipe, hardware: Hardware, variant: str, chosen: Mapping[str, str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the arguments of each feature that is on, and notes on those that cannot be."""
    for key in chosen:
        if key not in recipe.features:
            raise RequestError(
                f"{name} has no feature `{key}`{did_you_mean(key, recipe.features)}",
                hint=f"its features: {', '.join(recipe.features) or 'none'}",
            )
    modes = recipe.variants.get(variant, Variant()).default_modes
    optional = {*recipe.opt_in_features, *recipe.hardware_opt_in_features.get(hardware.name, ())}
    turned_on: dict[str, list[str]] = {}
    notes = []
    for key, feature in recipe.features.items():
        mode = chosen.get(key, "off" if key in optional and key not in modes else "")
        if mode == "off":
            continue
        wishes = [mode] if mode else [modes.get(key, ""), feature.default_mode, *feature.modes]
        form, wrong = _form(feature, hardware, variant, wishes)
        if form is not None:
            turned_on[key] = (hardware.pick(form.hardware_overrides) or form).args
        elif key in chosen:
            raise RequestError(
                f"the feature {key} cannot be used: {wrong}",
                hint=f"leave it out, or see its modes: `vlaunch recipes show {name}`",
            )
        else:
            notes.append(f"feature {key} is off: {wrong}")
    return turned_on, notes


def _form(
    feature: Feature, hardware: Hardware, variant: str, wishes: Sequence[str]
) -> tuple[Mode | None, str]:
    """Return a feature's form in the first mode of `wishes` that fits, or why there is none."""
    if hardware.excluded(feature.hardware):
        return None, f"it does not run on {hardware.name}"
    if not feature.modes and not wishes[0]:
        return feature, ""
    fitting = {
        key: mode
        for key, mode in feature.modes.items()
        if variant in (mode.variants or [variant]) and not hardware.excluded(mode.hardware)
    }
    form = next((fitting[key] for key in wishes if key in fitting), None)
    return form, f"its modes for {variant} are: {', '.join(fitting) or 'none'}"


def _of_generation(hardware: Hardware, overrides: Mapping[str, Layer]) -> Layer | None:
    return overrides.get(hardware.generation) or overrides.get(hardware.accelerator)


def _notes(recipe: Recipe, variant: Variant, hardware: Hardware) -> Iterator[str]:
    verified = [key for key, word in recipe.meta.hardware.items() if word == "verified"]
    if not hardware.name:
        yield "arguments for one kind of GPU are left out; name it: `--hardware NAME`"
    elif hardware.name not in verified:
        yield f"not verified on {hardware.name}; verified on: {', '.join(verified) or 'none'}"
    if tp := hardware.pick(variant.tp):
        yield f"the recipe serves this variant with TP {tp} (`--tp {tp}`)"
    for dependency in recipe.dependencies:
        if not dependency.optional:
            yield f"the image must have what this installs: {' '.join(dependency.command.split())}"
