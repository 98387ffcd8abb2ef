"""Choice of TP × PP and replicas from the cluster's GPUs and, if known, the model's `config.json`.

Sources: vLLM's parallelism guide (TP inside a node, PP between nodes), and the checks in
`vllm/config/model.py` and, for replicas, `vllm/v1/engine/utils.py` (0.32).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any

from launcher.core.domain import Backend, Inventory, Node, fold
from launcher.core.errors import PlacementError
from launcher.tools.model import ModelShape, shape_of
from launcher.tools.site.node_shares import (
    assign_mp_ranks,
    assign_ray_ranks,
    assign_replicas,
    describe_gpus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Parallel layout of a model, the reason for it, and the expected number of ranks per node.

    `warnings` are about working but costly choices, such as TP across the network or unused GPUs.
    `dp` is the number of replicas; `pcp` is the prefill context parallel size, which multiplies the
    ranks of a stage (world_size in vllm/config/parallel.py); `experts` is 0 for a dense model and
    `None` if unknown.
    """

    tp: int
    pp: int
    why: str
    nodes: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...] = ()
    dp: int = 1
    pcp: int = 1
    experts: int | None = None

    @property
    def stage_size(self) -> int:
        """Ranks per pipeline stage."""
        return self.tp * self.pcp

    @property
    def replica_size(self) -> int:
        """Ranks, and so GPUs, per replica."""
        return self.stage_size * self.pp

    @property
    def world(self) -> int:
        """Total number of ranks, and so of GPUs."""
        return self.replica_size * self.dp

    @property
    def label(self) -> str:
        """Layout as text, such as `TP 8 × PP 2`."""
        sizes = (("DP", self.dp), ("TP", self.tp), ("PCP", self.pcp), ("PP", self.pp))
        sizes_shown = [f"{name} {size}" for name, size in sizes if size > 1 or name in ("TP", "PP")]
        return " × ".join(sizes_shown)

    @property
    def crosses(self) -> bool:
        """True when a TP group has ranks on several nodes: a group is local exactly when no node's
        share ends inside it.
        """
        return self.tp > 1 and any(
            end % self.tp for end in accumulate(count for _, count in self.nodes)
        )

    @property
    def spans(self) -> bool:
        """True when a replica has ranks on several nodes."""
        return any(end % self.replica_size for end in accumulate(count for _, count in self.nodes))

    @property
    def replicas(self) -> tuple[tuple[str, int], ...]:
        """Pairs of a node and the number of replicas that start on it."""
        ends = list(accumulate(count for _, count in self.nodes))
        started = [-(-end // self.replica_size) for end in (0, *ends)]
        return tuple((name, started[i + 1] - started[i]) for i, (name, _) in enumerate(self.nodes))

    @property
    def coupled(self) -> bool:
        """True when replicas exchange tokens in every layer: a mixture of experts, or unknown."""
        return self.dp > 1 and self.experts != 0

    @property
    def networked(self) -> bool:
        """True when ranks exchange tensors over the network, unlike dense replicas inside nodes."""
        return len(self.nodes) > 1 and (self.dp == 1 or self.spans or self.coupled)


def narrow_inventory(
    inventory: Inventory, names: Sequence[str] = (), gpus: int | None = None
) -> Inventory:
    """Restrict the inventory to some nodes (none named: all) and a number of GPUs per node.

    The first node replaces a head that is not among them.

    Raises:
        PlacementError: there is no such node, or it has fewer GPUs.
    """
    nodes = _select_nodes(inventory, names)
    too_small = [node for node in nodes if gpus is not None and gpus > node.gpus]
    if too_small:
        raise PlacementError(
            f"{too_small[0].name} has {too_small[0].gpus} GPUs, not {gpus}",
            evidence=describe_gpus(inventory),
            hint=f"request at most {min(node.gpus for node in nodes)} per node: `--gpus`",
        )
    head = inventory.head if inventory.head in nodes else nodes[0]
    selected_nodes = (
        replace(node, head=node is head, gpus=node.gpus if gpus is None else gpus) for node in nodes
    )
    return replace(inventory, nodes=tuple(selected_nodes))


def _select_nodes(inventory: Inventory, names: Sequence[str]) -> list[Node]:
    """Return the named nodes without duplicates; all nodes when none is named."""
    all_names = [node.name for node in inventory.nodes]
    unknown = [name for name in names if name not in all_names]
    if unknown:
        raise PlacementError(
            f"no node `{unknown[0]}` in this cluster",
            hint=f"its nodes are {fold(all_names)}: `--nodes {fold(all_names)}`",
        )
    return [inventory.node(name) for name in dict.fromkeys(names)] or list(inventory.nodes)


def choose_placement(
    inventory: Inventory,
    tp: int | None,
    pp: int | None,
    model_config: Mapping[str, Any] | None = None,
    *,
    dp: int | None = None,
    pcp: int = 1,
    backend: Backend = "ray",
    alone: bool = True,
) -> Placement:
    """Choose a layout: TP = GPUs per node and PP = nodes by default.

    Args:
        inventory: nodes and their GPUs.
        tp: tensor parallel size, or None to derive it.
        pp: pipeline parallel size, or None to derive it.
        model_config: the model's `config.json`, or None if unknown.
        dp: number of replicas behind one endpoint, which share the GPUs equally.
        pcp: prefill context parallel size, for a single replica.
        backend: assigns ranks to nodes in its own way.
        alone: no other server is to use the GPUs that are left: warn about them.

    Raises:
        PlacementError: the layout cannot run; the hint lists layouts that can.
    """
    shape = shape_of(model_config)
    if dp is not None and dp > 1:
        if pcp > 1:
            raise PlacementError(
                f"{dp} replicas with prefill context parallelism cannot be placed",
                hint="use one of the two: `--data-parallel-size`, or -- --prefill-context-parallel",
            )
        return _place_replicas(inventory, dp, tp, pp, shape, backend, alone=alone)
    stage, chosen_pp, reason = _single_replica(inventory, tp, pp, pcp, shape)
    chosen_tp = stage // pcp
    fault = (
        explain_impossible(inventory, chosen_tp, chosen_pp, shape, pcp) if chosen_tp else _UNEVEN
    )
    placed = Placement(
        tp=chosen_tp, pp=chosen_pp, pcp=pcp, why=reason, nodes=(), experts=shape.experts
    )
    if fault or stage % pcp:
        raise PlacementError(
            f"{placed.label} cannot run: {fault or _UNEVEN}",
            evidence=f"{reason}; {describe_gpus(inventory)}",
            hint=_suggest_splits(inventory, shape, pcp),
        )
    mp = backend == "mp"
    nodes = (
        assign_mp_ranks(inventory, stage, chosen_pp)
        if mp
        else assign_ray_ranks(inventory, stage * chosen_pp)
    )
    placed = replace(placed, nodes=nodes)
    return replace(placed, warnings=tuple(_warnings(inventory, placed, shape, alone=alone)))


_UNEVEN = "the GPUs of a stage cannot be divided by PCP"


def _single_replica(
    inventory: Inventory, tp: int | None, pp: int | None, pcp: int, shape: ModelShape
) -> tuple[int, int, str]:
    """Return the ranks per stage and the stages of a single replica, and the reason.

    Nodes with one GPU each and RDMA between them form one stage: latency is what counts for
    reductions across the network, and RDMA keeps it low (eugr/spark-vllm-docker, for DGX Spark).
    """
    count = len(inventory.nodes)
    free = tp is None and pp is None and count % pcp == 0
    if (
        free
        and _is_single_gpu_rdma_cluster(inventory)
        and not explain_impossible(inventory, count // pcp, 1, shape, pcp)
    ):
        return count, 1, "one GPU per node, and RDMA between them: TP = nodes"
    return _sizes(inventory, None if tp is None else tp * pcp, pp)


def explain_impossible(
    inventory: Inventory, tp: int, pp: int, shape: ModelShape, dp: int = 1
) -> str:
    """Return the reason why a layout cannot run; empty if none is known."""
    if tp < 1 or pp < 1:
        return "both must be at least 1"
    if tp * pp * dp > inventory.gpus:
        return f"it needs {tp * pp * dp} GPUs, the cluster has {inventory.gpus}"
    return _explain_indivisible(shape, tp, pp)


def _explain_indivisible(shape: ModelShape, tp: int, pp: int) -> str:
    if text := explain_heads(shape.heads, shape.kv_heads, tp):
        return f"the model's {text}"
    if shape.layers is not None and shape.layers < pp:
        return f"the model's {shape.layers} layers are fewer than the {pp} stages of PP {pp}"
    return ""


def explain_heads(heads: int | None, kv_heads: int | None, tp: int) -> str:
    """Return vLLM's reason to refuse this TP for these numbers of heads; empty if there is none."""
    if heads is not None and heads % tp:
        return f"{heads} attention heads cannot be divided by TP {tp}"
    if kv_heads is not None and kv_heads % tp and tp % kv_heads:
        return (
            f"{kv_heads} key/value heads can be neither divided by TP {tp} nor repeated to fill it"
        )
    return ""


def _place_replicas(
    inventory: Inventory,
    dp: int,
    tp: int | None,
    pp: int | None,
    shape: ModelShape,
    backend: Backend,
    *,
    alone: bool,
) -> Placement:
    chosen_tp, chosen_pp, reason = _replica_sizes(inventory, dp, tp, pp)
    replica_size = chosen_tp * chosen_pp
    fault = explain_impossible(inventory, chosen_tp, chosen_pp, shape, dp)
    nodes = () if fault else assign_replicas(inventory, dp, replica_size, spanning=backend == "ray")
    if not nodes:
        needs_span = (
            not fault
            and backend == "mp"
            and bool(assign_replicas(inventory, dp, replica_size, spanning=True))
        )
        ray = ", or `--backend ray` for replicas of several nodes" if needs_span else ""
        raise PlacementError(
            f"{dp} replicas of TP {chosen_tp} × PP {chosen_pp} cannot run:"
            f" {fault or _explain_unfit(inventory, replica_size, needs_span)}",
            evidence=f"{reason}; {describe_gpus(inventory)}",
            hint=_suggest_replicas(inventory, dp, shape) + ray,
        )
    placed = Placement(
        tp=chosen_tp, pp=chosen_pp, why=reason, nodes=nodes, dp=dp, experts=shape.experts
    )
    warnings = _warnings(inventory, placed, shape, alone=alone)
    if backend == "ray" and shape.experts and len(nodes) > 1:
        warnings.append(
            "a replica of a mixture of experts on several nodes may hang under Ray (vLLM issues"
            " 44878, 43420 and 32400): prefer `--backend mp`"
        )
    return replace(placed, warnings=tuple(warnings))


def _replica_sizes(
    inventory: Inventory, dp: int, tp: int | None, pp: int | None
) -> tuple[int, int, str]:
    """Divide the GPUs equally between replicas, as TP inside a node."""
    if tp is not None and pp is not None:
        return tp, pp, "as requested"
    if tp is not None:
        return tp, 1, f"TP {tp} as requested; a replica inside a node needs no pipeline"
    total, replica_gpus = inventory.gpus, _equal_part(inventory, dp, pp)
    if pp is not None:
        reason = f"PP {pp} as requested, the TP that gives a replica {replica_gpus} of {total} GPUs"
        return max(1, replica_gpus // pp), pp, reason
    if replica_gpus == 0:
        return 1, 1, "a replica needs at least one GPU"
    reason = f"each replica gets {replica_gpus} of {total} GPUs"
    size = max(node.gpus for node in inventory.nodes)
    if replica_gpus > size and replica_gpus % size == 0:
        return size, replica_gpus // size, f"{reason}: TP = GPUs per node, PP = its nodes"
    return replica_gpus, 1, f"{reason} as TP"


def _equal_part(inventory: Inventory, dp: int, pp: int | None) -> int:
    """Return the GPUs per replica; 0 when there are fewer GPUs than replicas."""
    total = inventory.gpus
    replica_gpus = total // dp
    if replica_gpus and (total % dp or replica_gpus % (pp or 1)):
        request = f"{dp} replicas" + (f" of PP {pp}" if pp is not None else "")
        raise PlacementError(
            f"the cluster's {total} GPUs cannot be divided equally between {request}",
            evidence=describe_gpus(inventory),
            hint=_suggest_replicas(inventory, dp, ModelShape()),
        )
    return replica_gpus


def _explain_unfit(inventory: Inventory, replica_size: int, needs_span: bool) -> str:
    if needs_span:
        return (
            f"a replica needs {replica_size} GPUs, more than one node has, and the mp backend"
            " keeps each replica on one node"
        )
    if inventory.head.gpus < replica_size and any(
        node.gpus >= replica_size for node in inventory.workers
    ):
        return (
            f"a replica needs {replica_size} GPUs; the head must hold one but has"
            f" {inventory.head.gpus}"
        )
    fitting = sum(node.gpus // replica_size for node in inventory.nodes)
    if fitting:
        return f"only {fitting} of them fit on one node each"
    return f"a replica needs {replica_size} GPUs, more than any node has"


def _suggest_replicas(inventory: Inventory, dp: int, shape: ModelShape) -> str:
    """Suggest up to three layouts that work with both backends: first those with `dp` replicas,
    then those that use the most GPUs.
    """
    sizes = range(1, inventory.head.gpus + 1)
    fitting = {tp: sum(node.gpus // tp for node in inventory.nodes) for tp in sizes}
    options = [
        (count, tp)
        for tp in sizes
        for count in {min(dp, fitting[tp]), fitting[tp]}
        if count > 1 and not explain_impossible(inventory, tp, 1, shape, count)
    ]
    # One layout per number of replicas: the largest TP that divides the head's GPUs, else the
    # largest.
    best = dict(sorted(options, key=lambda pair: (inventory.head.gpus % pair[1] == 0, pair[1])))
    options = sorted(
        best.items(),
        key=lambda pair: (pair[0] != dp, -pair[0] * pair[1], abs(pair[0] - dp), -pair[1]),
    )
    if not options:
        return "no two replicas of this model fit on one node each"
    return "these work: " + ", ".join(
        f"`--data-parallel-size {count} --tp {tp}`" for count, tp in options[:3]
    )


def _sizes(inventory: Inventory, tp: int | None, pp: int | None) -> tuple[int, int, str]:
    total, count = inventory.gpus, len(inventory.nodes)
    if tp is not None and pp is not None:
        return tp, pp, "as requested"
    if tp is not None:
        if count == 1:
            return tp, 1, f"TP {tp} as requested; one node needs no pipeline"
        return (
            tp,
            _other_size(inventory, "tp", tp),
            f"TP {tp} as requested, the PP that uses all {total} GPUs",
        )
    if pp is not None:
        return (
            _other_size(inventory, "pp", pp),
            pp,
            f"PP {pp} as requested, the TP that uses all {total} GPUs",
        )
    if total == 1:
        return 1, 1, "there is one GPU"
    if count == 1:
        return total, 1, "one node: TP across its GPUs, no pipeline"
    tp, pp = split_evenly([node.gpus for node in inventory.nodes])
    even = pp == count
    reason = "TP = GPUs per node, PP = nodes" if even else "stages of equal size use all GPUs"
    return tp, pp, reason


def _is_single_gpu_rdma_cluster(inventory: Inventory) -> bool:
    """Return True for several nodes with one GPU each and RDMA between them."""
    single = all(node.gpus == 1 for node in inventory.nodes)
    return single and len(inventory.nodes) > 1 and inventory.fabric != "ethernet"


def split_evenly(gpus: Sequence[int]) -> tuple[int, int]:
    """Return the TP and the PP that use all GPUs of nodes, with the ranks of a stage on one node:
    TP = GPUs per node and PP = nodes, if all nodes have the same number.
    """
    tp = gcd(*gpus)
    return tp, sum(gpus) // tp


def _other_size(inventory: Inventory, option: str, size: int) -> int:
    total = inventory.gpus
    if size >= 1 and size <= total and total % size == 0:
        return total // size
    # `explain_impossible` reports sizes out of range.
    if size < 1 or size > total:
        return 1
    other = "pp" if option == "tp" else "tp"
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    above = next(index for index, divisor in enumerate(divisors) if divisor > size)
    raise PlacementError(
        f"{option.upper()} {size} does not divide the cluster's {total} GPUs",
        evidence=describe_gpus(inventory),
        hint=f"use `--{option} {divisors[above - 1]}` or `--{option} {divisors[above]}`; to leave"
        f" GPUs idle, set both sizes, such as `--{option} {size} --{other} {total // size}`",
    )


def _warnings(
    inventory: Inventory, placed: Placement, shape: ModelShape, *, alone: bool
) -> list[str]:
    warnings, tp = [], placed.tp
    if placed.crosses and not _is_single_gpu_rdma_cluster(inventory):
        warnings.append(
            f"TP {tp} crosses nodes: every layer waits for the network between them, which is"
            " slow without InfiniBand or RoCE"
        )
    if alone and placed.world < inventory.gpus:
        warnings.append(f"{inventory.gpus - placed.world} of {inventory.gpus} GPUs stay unused")
    if shape.kv_heads is not None and tp > shape.kv_heads:
        warnings.append(
            f"TP {tp} exceeds the model's {shape.kv_heads} key/value heads, so each is stored"
            f" {tp // shape.kv_heads} times"
        )
    return warnings


def _suggest_splits(inventory: Inventory, shape: ModelShape, pcp: int = 1) -> str:
    """Suggest up to three layouts; prefers those that use most GPUs and keep TP inside nodes."""
    total = inventory.gpus
    smallest = min(node.gpus for node in inventory.nodes)
    options = [
        (tp, pp)
        for tp in range(1, total + 1)
        for pp in range(1, total // tp + 1)
        if not explain_impossible(inventory, tp, pp, shape, pcp)
    ]
    options.sort(key=lambda pair: (-pair[0] * pair[1], smallest % pair[0] != 0, -pair[0]))
    if not options:
        return "no layout of this model fits the cluster"
    return "these work: " + ", ".join(f"`--tp {tp} --pp {pp}`" for tp, pp in options[:3])
