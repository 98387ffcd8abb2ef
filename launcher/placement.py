"""Which TP × PP, and why: from the cluster's GPUs and, where it could be read, the model's `config.json`. Pure arithmetic.

Sources: vLLM's parallelism guide (TP inside a node, PP between nodes) and the checks of `vllm/config/model.py` (0.32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any

from launcher.errors import PlacementError
from launcher.model import Backend, Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A split of a model, the reason for it, and how many ranks each node is expected to hold.

    `warnings` say what works but costs something: TP across the network, GPUs left over.
    """

    tp: int
    pp: int
    why: str
    nodes: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Ranks, and so GPUs, in all."""
        return self.tp * self.pp

    @property
    def crosses(self) -> bool:
        """True when a TP group has ranks on several nodes: a group is local exactly when no node's share ends inside it."""
        return self.tp > 1 and any(end % self.tp for end in accumulate(count for _, count in self.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model's `config.json` says about how it can be split; `None` where it says nothing."""

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    hidden: int | None = None


def choose(
    inventory: Inventory,
    tp: int | None,
    pp: int | None,
    model_config: Mapping[str, Any] | None = None,
    *,
    backend: Backend = "ray",
) -> Placement:
    """Choose a split: TP = GPUs per node and PP = nodes, unless something else is asked for.

    Args:
        inventory: its nodes bring the GPUs.
        tp: tensor parallel size, or None to derive it.
        pp: pipeline parallel size, or None to derive it.
        model_config: the model's `config.json`, or None when nobody could read it.
        backend: who hands out the ranks; each does it in its own way.

    Raises:
        PlacementError: the split cannot run; the message says why, the hint what would.
    """
    shape = shape_of(model_config)
    chosen_tp, chosen_pp, why = _sizes(inventory, tp, pp)
    wrong = impossible(inventory, chosen_tp, chosen_pp, shape)
    if wrong:
        raise PlacementError(
            f"TP {chosen_tp} × PP {chosen_pp} cannot run: {wrong}",
            evidence=f"{why}; {_brings(inventory)}",
            hint=_instead(inventory, shape),
        )
    mp = backend == "mp"
    nodes = share(inventory, chosen_tp, chosen_pp) if mp else _fill(inventory, chosen_tp * chosen_pp)
    placed = Placement(tp=chosen_tp, pp=chosen_pp, why=why, nodes=nodes)
    return replace(placed, warnings=tuple(_warnings(inventory, placed, shape)))


def shape_of(config: Mapping[str, Any] | None) -> ModelShape:
    """Read heads and layers from a `config.json`; a multimodal model keeps its language part under `text_config`."""
    if not config:
        return ModelShape()
    parts: list[Mapping[str, Any]] = [config]
    parts += [
        part for name in ("text_config", "llm_config", "language_config") if isinstance(part := config.get(name), Mapping)
    ]

    def number(*names: str) -> int | None:
        found = (part[name] for part in reversed(parts) for name in names if isinstance(part.get(name), int))
        return next((value for value in found if not isinstance(value, bool) and value > 0), None)

    heads = number("num_attention_heads", "n_head", "n_heads")
    return ModelShape(
        heads=heads,
        kv_heads=number("num_key_value_heads", "num_kv_heads", "n_head_kv"),
        layers=number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        hidden=number("hidden_size", "n_embd", "d_model"),
    )


def impossible(inventory: Inventory, tp: int, pp: int, shape: ModelShape) -> str:
    """Return why a split cannot run, in words; empty when nothing known speaks against it."""
    if tp < 1 or pp < 1:
        return "both must be at least 1"
    if tp * pp > inventory.gpus:
        return f"it needs {tp * pp} GPUs, the cluster has {inventory.gpus}"
    if shape.heads is not None and shape.heads % tp:
        return f"the model's {shape.heads} attention heads cannot be divided by TP {tp}"
    if shape.kv_heads is not None and shape.kv_heads % tp and tp % shape.kv_heads:
        return f"the model's {shape.kv_heads} key/value heads can be neither divided by TP {tp} nor repeated to fill it"
    if shape.layers is not None and shape.layers < pp:
        return f"the model's {shape.layers} layers are fewer than the {pp} stages of PP {pp}"
    return ""


def share(inventory: Inventory, tp: int, pp: int) -> tuple[tuple[str, int], ...]:
    """Hand out ranks as vLLM's own multi-node mode needs it: the head first, then as few nodes as hold all in equal shares.

    vLLM gives each of its nodes the same number of ranks (`local_world_size`, vllm/config/parallel.py).

    Raises:
        PlacementError: no number of nodes can share the ranks equally.
    """
    ordered = (inventory.head, *sorted(inventory.workers, key=lambda node: -node.gpus))
    for count in range(1, len(ordered) + 1):
        each, rest = divmod(tp * pp, count)
        if not rest and all(node.gpus >= each for node in ordered[:count]):
            return tuple((node.name, each) for node in ordered[:count])
    raise PlacementError(
        f"TP {tp} × PP {pp} cannot be shared equally between nodes, which the mp backend needs",
        evidence=_brings(inventory),
        hint="use `--backend ray`, or a TP × PP that every node takes the same part of",
    )


def _sizes(inventory: Inventory, tp: int | None, pp: int | None) -> tuple[int, int, str]:
    total, count = inventory.gpus, len(inventory.nodes)
    if tp is not None and pp is not None:
        return tp, pp, "as asked"
    if tp is not None:
        if count == 1:
            return tp, 1, f"TP {tp} as asked; one node needs no pipeline"
        return tp, _rest(inventory, "tp", tp), f"TP {tp} as asked, the PP that uses all {total} GPUs"
    if pp is not None:
        return _rest(inventory, "pp", pp), pp, f"PP {pp} as asked, the TP that uses all {total} GPUs"
    if total == 1:
        return 1, 1, "there is one GPU"
    if count == 1:
        return total, 1, "one node: TP across its GPUs, no pipeline"
    sizes = {node.gpus for node in inventory.nodes}
    if len(sizes) > 1:
        common = gcd(*sizes)
        options = [f"`--tp {common} --pp {total // common}`"] + ([f"`--tp 1 --pp {total}`"] if common > 1 else [])
        raise PlacementError(
            "the nodes have different numbers of GPUs, so TP = GPUs per node has no answer",
            evidence=_brings(inventory),
            hint=f"ask for a split that keeps TP groups inside nodes: {' or '.join(options)}",
        )
    return sizes.pop(), count, "TP = GPUs per node, PP = nodes"


def _rest(inventory: Inventory, asked: str, size: int) -> int:
    total = inventory.gpus
    if size >= 1 and size <= total and total % size == 0:
        return total // size
    # More than there is is said by `impossible`; what does not divide needs the other size spelled out.
    if size < 1 or size > total:
        return 1
    other = "pp" if asked == "tp" else "tp"
    raise PlacementError(
        f"{asked.upper()} {size} does not divide the cluster's {total} GPUs",
        evidence=_brings(inventory),
        hint=f"give both to use fewer GPUs: `--{asked} {size} --{other} {total // size}`",
    )


def _brings(inventory: Inventory) -> str:
    return "GPUs: " + ", ".join(f"{node.name} {node.gpus}" for node in inventory.nodes)


def _fill(inventory: Inventory, world: int) -> tuple[tuple[str, int], ...]:
    """Hand out ranks as vLLM sorts them: the head first, each node's together (v1/executor/ray_executor_v2.py)."""
    left, nodes = world, []
    for node in (inventory.head, *inventory.workers):
        here = min(left, node.gpus)
        if here:
            nodes.append((node.name, here))
        left -= here
    return tuple(nodes)


def _warnings(inventory: Inventory, placed: Placement, shape: ModelShape) -> list[str]:
    said, tp = [], placed.tp
    if placed.crosses:
        said.append(
            f"TP {tp} crosses nodes: every layer waits for the network between them, which only pays with InfiniBand or RoCE"
        )
    if placed.world < inventory.gpus:
        said.append(f"{inventory.gpus - placed.world} of {inventory.gpus} GPUs stay unused")
    if shape.kv_heads is not None and tp > shape.kv_heads:
        said.append(
            f"TP {tp} exceeds the model's {shape.kv_heads} key/value heads, so each is kept {tp // shape.kv_heads} times"
        )
    return said


def _instead(inventory: Inventory, shape: ModelShape) -> str:
    """Name up to three splits that work, those that use most GPUs and keep TP inside nodes first."""
    total = inventory.gpus
    smallest = min(node.gpus for node in inventory.nodes)
    options = [
        (tp, pp) for tp in range(1, total + 1) for pp in range(1, total // tp + 1) if not impossible(inventory, tp, pp, shape)
    ]
    options.sort(key=lambda each: (-each[0] * each[1], smallest % each[0] != 0, -each[0]))
    if not options:
        return "no split of this model fits the cluster"
    return "these work: " + ", ".join(f"`--tp {tp} --pp {pp}`" for tp, pp in options[:3])
