"""The arguments and variables of a choice, put together from the layers of its recipe.

Pure. The order is that of the recipes' own site, and of an argument that is given twice the last
counts: base, variant, strategy, hardware, features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.recipes.choice import Choice
from launcher.recipes.schema import Overrides
from launcher.recipes.words import Option, last, options


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one part of a recipe adds."""

    name: str
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = None


def layers(choice: Choice) -> list[Layer]:
    """Return the parts of a recipe that a choice takes, the first first."""
    recipe, checkpoint, hardware = choice.recipe, choice.checkpoint, choice.hardware
    model, strategy = recipe.model, choice.strategy
    found = [
        Layer(name="base", args=model.base_args, env=model.base_env),
        Layer(
            name=f"variant {choice.variant}",
            args=checkpoint.extra_args,
            env=checkpoint.extra_env,
        ),
        _of(f"variant {choice.variant}", checkpoint.hardware_overrides.get(hardware.id)),
        Layer(name=f"strategy {strategy.name}", args=strategy.vllm_args, env=strategy.env),
        *_of_strategy(choice),
        *(
            Layer(name=f"feature {name}", args=_feature(choice, name, mode))
            for name, mode in choice.features.items()
        ),
    ]
    return [each for each in found if each.args or each.env]


def arguments(choice: Choice) -> list[tuple[Option, str]]:
    """Return vLLM's arguments, each with the part of the recipe that it is from."""
    found = [(option, each.name) for each in layers(choice) for option in options(each.args)]
    kept = {id(option) for option in last([option for option, _ in found])}
    return [(option, name) for option, name in found if id(option) in kept]


def environment(choice: Choice) -> dict[str, str]:
    """Return the variables of the processes."""
    env: dict[str, str] = {}
    for each in layers(choice):
        env |= each.env or {}
    return env


def _of(name: str, overrides: Overrides | None) -> Layer:
    if overrides is None:
        return Layer(name=name)
    return Layer(name=name, args=overrides.extra_args, env=overrides.extra_env)


def _of_strategy(choice: Choice) -> list[Layer]:
    """Return what the recipe changes for the strategy and for the hardware: what a strategy says of
    a generation stands in the place of what the recipe and the variant say of it.
    """
    hardware, name = choice.hardware, f"strategy {choice.strategy.name}"
    own = choice.recipe.strategy_overrides.get(choice.strategy.name)
    found = []
    if own is not None:
        args, env = [*own.extra_args, *own.vllm_args], {**own.env, **own.extra_env}
        found.append(Layer(name=name, args=args, env=env))
    instead = hardware.overriding(own.hardware_overrides) if own else None
    on = f"hardware {hardware.generation or hardware.id}"
    if instead is not None:
        found.append(_of(on, instead))
    else:
        of_variant = hardware.overriding(choice.checkpoint.hardware_overrides)
        found.append(_of(on, hardware.overriding(choice.recipe.hardware_overrides)))
        found.append(_of(on, of_variant))
    if own is not None:
        found.append(_of(f"hardware {hardware.id}", own.hardware_overrides.get(hardware.id)))
    return found


def _feature(choice: Choice, name: str, mode: str) -> Sequence[str]:
    feature = choice.recipe.features[name]
    if mode:
        way = feature.modes[mode]
        instead = choice.hardware.of(way.hardware_overrides)
        return way.args if instead is None or instead.args is None else instead.args
    own = choice.hardware.overriding(feature.hardware_overrides)
    return feature.args if own is None or own.args is None else own.args
