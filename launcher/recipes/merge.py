"""Merge of a recipe's variant, hardware and features into one `vllm serve` command. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from launcher.core.errors import RequestError
from launcher.inventory.mistakes import did_you_mean
from launcher.recipes.library import Hardware, version_numbers
from launcher.recipes.schema import ArgumentLayer, Feature, FeatureArgs, Mode, Recipe, Variant
from launcher.recipes.vllm_command import VllmCommand, drop_overridden, parse_options

# Formats that need Blackwell's tensor cores.
_PRECISION_HARDWARE = {"nvfp4": {"generation": "blackwell"}, "fp4": {"generation": "blackwell"}}


def merge_recipe(
    name: str,
    recipe: Recipe,
    hardware: Hardware,
    gpus: int,
    *,
    variant: str | None = None,
    features: Mapping[str, str] | None = None,
) -> VllmCommand:
    """Return the command of a recipe on `gpus` GPUs of all nodes.

    Later layers override earlier ones: base, variant, hardware, features. `features` maps chosen
    features to their modes (empty: the recipe's mode; or `off`).

    Raises RequestError: the variant or a feature does not exist, or nothing runs on this hardware.
    """
    key, why = _choose_variant(name, recipe, hardware, gpus, variant)
    checkpoint = recipe.variants.get(key, Variant())
    turned_on, notes = _enable_features(name, recipe, hardware, key, features or {})
    exact = checkpoint.hardware_overrides.get(hardware.name)
    layers = [
        ArgumentLayer(extra_args=recipe.model.base_args, extra_env=recipe.model.base_env),
        checkpoint,
        exact,
        _generation_layer(hardware, recipe.hardware_overrides),
        _generation_layer(hardware, checkpoint.hardware_overrides),
        *(ArgumentLayer(extra_args=part.args, extra_env=part.env) for part in turned_on.values()),
    ]
    env: dict[str, str] = {}
    argv: list[str] = []
    for layer in filter(None, layers):
        argv += layer.extra_args
        env |= layer.extra_env
    images = recipe.model.docker_image | checkpoint.docker_image
    own = next(iter(exact.docker_image.values()), "") if exact else ""
    off = [feature for feature in recipe.features if feature not in turned_on]
    versions = recipe.model.min_vllm_version, checkpoint.min_vllm_version
    return VllmCommand(
        origin=f"the recipe {name}",
        model=checkpoint.model_id or recipe.model.model_id,
        options=tuple(drop_overridden(parse_options(argv))),
        env=env,
        image=own or images.get(hardware.accelerator, ""),
        version=max(versions, key=version_numbers),
        notes=(
            f"recipe {name}: variant {key} on {hardware.name or 'unknown hardware'} ({why})",
            f"features: {', '.join(turned_on) or 'none'}"
            + (f"; off: {', '.join(off)} (`--feature NAME`)" if off else ""),
            *notes,
            *_hardware_notes(recipe, checkpoint, hardware),
        ),
    )


def _choose_variant(
    name: str, recipe: Recipe, hardware: Hardware, gpus: int, chosen: str | None
) -> tuple[str, str]:
    """Return the variant to serve, with the reason: the default if it fits, else the largest."""
    if hardware.is_excluded(recipe.meta.hardware):
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
        needed = _memory_needed(variants[key], hardware)
        if problem := _unfit_reason(variants[key], hardware, needed, memory):
            rejected.append(f"variant {key} {problem}")
        else:
            return key, "; ".join([f"needs {needed:g} GB" if needed else "fits", *rejected])
    if chosen:
        return chosen, f"chosen, but {rejected[0]}"
    raise RequestError(
        f"no variant of {name} runs on these nodes",
        evidence=rejected,
        hint=f"to try anyway: `--variant {order[-1]}`",
    )


def _memory_needed(variant: Variant, hardware: Hardware) -> float:
    """Return the memory that a variant needs, in GB; hardware with memory beside its GPUs' may need
    less of that.
    """
    exact = variant.hardware_overrides.get(hardware.name)
    return (exact.vram_minimum_gb if exact else 0.0) or variant.vram_minimum_gb


def _unfit_reason(variant: Variant, hardware: Hardware, needed: float, memory: float) -> str:
    """Return why a variant does not run on hardware with `memory` GB (0: unknown)."""
    if variant.supported_hardware and hardware.name not in variant.supported_hardware:
        return f"is for {', '.join(variant.supported_hardware)}"
    needs = variant.precision_hardware or _PRECISION_HARDWARE.get(variant.precision, {})
    properties = {"brand": hardware.accelerator, "generation": hardware.generation}
    if any(properties.get(key) != value.lower() for key, value in needs.items()):
        return f"({variant.precision}) needs {' '.join(needs.values())}"
    if memory and needed > memory:
        return f"needs {needed:g} GB, the GPUs have {memory:.0f} GB"
    return ""


def _enable_features(
    name: str, recipe: Recipe, hardware: Hardware, variant: str, chosen: Mapping[str, str]
) -> tuple[dict[str, FeatureArgs], list[str]]:
    """Return the arguments of each enabled feature, and notes on unusable ones."""
    for key in chosen:
        if key not in recipe.features:
            raise RequestError(
                f"{name} has no feature `{key}`{did_you_mean(key, recipe.features)}",
                hint=f"its features: {', '.join(recipe.features) or 'none'}",
            )
    modes = recipe.variants.get(variant, Variant()).default_modes
    optional = {*recipe.opt_in_features, *recipe.hardware_opt_in_features.get(hardware.name, ())}
    turned_on: dict[str, FeatureArgs] = {}
    notes = []
    for key, feature in recipe.features.items():
        mode = chosen.get(key, "off" if key in optional and key not in modes else "")
        if mode == "off":
            continue
        preferred = [mode] if mode else [modes.get(key, ""), feature.default_mode, *feature.modes]
        selected, problem = _choose_mode(feature, hardware, variant, preferred)
        if selected is not None:
            turned_on[key] = hardware.pick_value(selected.hardware_overrides) or selected
        elif key in chosen:
            raise RequestError(
                f"the feature {key} cannot be used: {problem}",
                hint=f"leave it out, or see its modes: `vlaunch recipes show {name}`",
            )
        else:
            notes.append(f"feature {key} is off: {problem}")
    return turned_on, notes


def _choose_mode(
    feature: Feature, hardware: Hardware, variant: str, preferred: Sequence[str]
) -> tuple[Mode | None, str]:
    """Return the first usable mode of `preferred`, or the reason why there is none."""
    if hardware.is_excluded(feature.hardware):
        return None, f"it does not run on {hardware.name}"
    if not feature.modes and not preferred[0]:
        return feature, ""
    fitting = {
        key: mode
        for key, mode in feature.modes.items()
        if variant in (mode.variants or [variant]) and not hardware.is_excluded(mode.hardware)
    }
    selected = next((fitting[key] for key in preferred if key in fitting), None)
    return selected, f"its modes for {variant} are: {', '.join(fitting) or 'none'}"


def _generation_layer(
    hardware: Hardware, overrides: Mapping[str, ArgumentLayer]
) -> ArgumentLayer | None:
    return overrides.get(hardware.generation) or overrides.get(hardware.accelerator)


def _hardware_notes(recipe: Recipe, variant: Variant, hardware: Hardware) -> Iterator[str]:
    verified = [key for key, status in recipe.meta.hardware.items() if status == "verified"]
    if not hardware.name:
        yield "arguments for one kind of GPU are left out; name it: `--hardware NAME`"
    elif hardware.name not in verified:
        yield f"not verified on {hardware.name}; verified on: {', '.join(verified) or 'none'}"
    if tp := hardware.pick_value(variant.tp):
        yield f"the recipe serves this variant with TP {tp} (`--tp {tp}`)"
    if recipe.model.default_frontend == "rust":
        yield (
            "the recipe prefers vLLM's Rust front end; vlaunch starts the Python one unless `env:`"
            ' of the inventory has VLLM_USE_RUST_FRONTEND: "1"'
        )
    for dependency in recipe.dependencies:
        if not dependency.optional and dependency.brand.lower() in ("", hardware.accelerator):
            yield f"the image must contain the packages of: {' '.join(dependency.command.split())}"
