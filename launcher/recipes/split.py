"""How a recipe itself would spread its model over a cluster's GPUs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.recipes.choice import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tensor, pipeline and data parallel sizes, and over how many nodes."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1

    @property
    def words(self) -> str:
        """Name the sizes for people."""
        sizes = (("DP", self.dp), ("TP", self.tp), ("PP", self.pp))
        shown = [f"{name} {size}" for name, size in sizes if size > 1 or name == "TP"]
        return " × ".join(shown) + f" on {self.nodes} node{'' if self.nodes == 1 else 's'}"


def sizes(choice: Choice, each: int, nodes: int) -> Sizes:
    """Return the sizes of a choice's strategy on so many nodes with `each` GPUs; a strategy of one
    node takes one of them.
    """
    strategy = choice.strategy
    over_data = strategy.parallel_flag == "--data-parallel-size"
    if strategy.deploy_type != "multi_node":
        if over_data:
            return Sizes(dp=each)
        single = strategy.name == "single_node_tp"
        return Sizes(tp=_single(choice, each) if single else each)
    if strategy.parallelism == "tp_pp":
        return Sizes(tp=each, pp=nodes, nodes=nodes)
    if strategy.parallelism == "tp_dp":
        return Sizes(tp=each, dp=nodes, nodes=nodes)
    if over_data:
        return Sizes(dp=each * nodes, nodes=nodes)
    return Sizes(tp=each * nodes, nodes=nodes)


def _single(choice: Choice, each: int) -> int:
    """Return the TP of a node: what variant or recipe say of the hardware, else one GPU where the
    model fits into it, else all.
    """
    hardware, checkpoint = choice.hardware, choice.checkpoint
    own = choice.recipe.strategy_overrides.get(choice.strategy.name)
    said = hardware.of(checkpoint.tp) or (hardware.of(own.tp) if own else None)
    if said:
        return min(said, each)
    needed = checkpoint.vram_minimum_gb
    return 1 if needed and needed <= hardware.gpu_gb else each


def fewest_gpus(choice: Choice) -> int:
    """Return how many GPUs the recipe says that its strategy needs at least; 0 where it says
    nothing.
    """
    said: Any = choice.recipe.strategy_min_gpus
    if not isinstance(said, dict):
        return _whole(said)
    of_hardware = said.get(choice.hardware.id)
    return max(_least(said, choice.strategy.name), _least(of_hardware, choice.strategy.name))


def _least(said: Any, strategy: str) -> int:
    return _whole(said.get(strategy) if isinstance(said, dict) else said)


def _whole(said: Any) -> int:
    return said if isinstance(said, int) else 0
