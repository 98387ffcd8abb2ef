"""A recipe as it is told: what it has, what of it vlaunch uses, and what not. Pure."""

from __future__ import annotations

from typing import Any

from launcher.recipes.read import Said
from launcher.recipes.schema import Recipe

# Keys that are known, and have no counterpart here; pages of the site have some of their own.
NOT_USED = {
    "kv_offload_support": "KV offloading is added by hand, after `--`",
    "kv_cache_strategy_hardware": "vlaunch starts no KV store",
    "hardware_notes": "words for the site's readers",
    "omni": "vlaunch starts vLLM, not vLLM-Omni",
}
NOT_USED_OF_MODEL = {
    "install": "the image has vLLM",
    "docker_source": "the image is taken as it is",
    "flashinfer_autotune": "a switch of the site's",
}
_ROLES = ("prefill", "decode", "router", "pool_modes")


def described(said: Said[Recipe], name: str, source: str) -> dict[str, Any]:
    """Return what a recipe of this name says, and where it comes from."""
    recipe = said.value
    return {
        "recipe": name,
        "source": source,
        "title": recipe.meta.title,
        "model": recipe.model.model_id,
        "tasks": recipe.meta.tasks,
        "architecture": recipe.model.architecture,
        "parameters": recipe.model.parameter_count,
        "active_parameters": recipe.model.active_parameters,
        "context": recipe.model.context_length,
        "min_vllm_version": recipe.model.min_vllm_version,
        "nightly_required": recipe.model.nightly_required,
        "images": recipe.model.docker_image,
        "variants": {
            key: {
                "model": each.model_id or recipe.model.model_id,
                "precision": each.precision,
                "vram_minimum_gb": each.vram_minimum_gb,
                "hardware": each.supported_hardware,
                "min_vllm_version": each.min_vllm_version,
            }
            for key, each in recipe.variants.items()
        },
        "strategies": recipe.compatible_strategies,
        "default_strategy": recipe.default_strategy,
        "features": {
            key: {
                "on": key not in recipe.opt_in_features,
                "modes": list(each.modes),
                "args": each.args,
            }
            for key, each in recipe.features.items()
        },
        "hardware": recipe.meta.hardware,
        "dependencies": [
            {"command": each.command, "optional": each.optional} for each in recipe.dependencies
        ],
        "not_used": not_used(recipe),
        "unknown": list(said.unknown),
    }


def not_used(recipe: Recipe) -> dict[str, str]:
    """Return what a recipe says that has no counterpart here, and why."""
    empty: tuple[Any, ...] = (None, {}, [])
    found = {key: why for key, why in NOT_USED.items() if getattr(recipe, key) not in empty}
    for key, why in NOT_USED_OF_MODEL.items():
        if getattr(recipe.model, key) not in empty:
            found[f"model.{key}"] = why
    for name, each in recipe.features.items():
        if each.companion is not None:
            found[f"features.{name}.companion"] = "vlaunch starts no program beside vLLM"
    for name, own in recipe.strategy_overrides.items():
        for role in _ROLES:
            if getattr(own, role) not in empty:
                found[f"strategy_overrides.{name}.{role}"] = "vlaunch starts no such roles"
    return found
