"""Which TP × PP, and how many replicas of it: from the cluster's GPUs and, where it could be read,
the model's `config.json`.

Pure arithmetic. Sources: vLLM's parallelism guide (TP inside a node, PP between nodes), the checks
of `vllm/config/model.py` and, for replicas, of `vllm/v1/engine/utils.py` (0.32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any

from launcher.core.domain import Backend, Inventory, Node, fold
from launcher.core.errors import PlacementError
from launcher.tools.model import ModelShape, shape_of
from launcher.tools.node_shares import brings, fill, fit, share


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A split of a model, the reason for it, and how many ranks each node is expected to hold.

    `warnings` say what works but costs something: TP across the network, GPUs left over. `dp` is
    how many replicas of the split there are, `pcp` the prefill context parallel size, by which each
    stage has more ranks (world_size in vllm/config/parallel.py); `experts` is how many the model
    has: 0 of a dense one, `None` where nobody could tell.
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
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.pcp

    @property
    def each(self) -> int:
        """Ranks, and so GPUs, of one replica."""
        return self.stage * self.pp

    @property
    def world(self) -> int:
        """Ranks, and so GPUs, in all."""
        return self.each * self.dp

    @property
    def words(self) -> str:
        """Name the split for people."""
        sizes = (("DP", self.dp), ("TP", self.tp), ("PCP", self.pcp), ("PP", self.pp))
        shown = [f"{name} {size}" for name, size in sizes if size > 1 or name in ("TP", "PP")]
        return " × ".join(shown)

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
        return any(end % self.each for end in accumulate(count for _, count in self.nodes))

    @property
    def replicas(self) -> tuple[tuple[str, int], ...]:
        """Each node with the number of replicas that begin on it."""
        ends = list(accumulate(count for _, count in self.nodes))
        begun = [-(-end // self.each) for end in (0, *ends)]
        return tuple((name, begun[i + 1] - begun[i]) for i, (name, _) in enumerate(self.nodes))

    @property
    def coupled(self) -> bool:
        """True when replicas exchange tokens in every layer: those of a mixture of experts, or of a
        model nobody could read.
        """
        return self.dp > 1 and self.experts != 0

    @property
    def networked(self) -> bool:
        """True when ranks exchange tensors over the network; replicas of a dense model inside nodes
        do not.
        """
        return len(self.nodes) > 1 and (self.dp == 1 or self.spans or self.coupled)


def narrow(inventory: Inventory, names: Sequence[str] = (), gpus: int | None = None) -> Inventory:
    """Return the inventory as a server sees it that takes only some nodes (none named: all), and so
    many GPUs of each.

    The first node stands in for a head that is not among them.

    Raises:
        PlacementError: there is no such node, or it has fewer GPUs.
    """
    nodes = _named(inventory, names)
    small = [node for node in nodes if gpus is not None and gpus > node.gpus]
    if small:
        raise PlacementError(
            f"{small[0].name} has {small[0].gpus} GPUs, not {gpus}",
            evidence=brings(inventory),
            hint=f"ask for at most {min(node.gpus for node in nodes)} of each node: `--gpus`",
        )
    head = inventory.head if inventory.head in nodes else nodes[0]
    taken = (
        replace(node, head=node is head, gpus=node.gpus if gpus is None else gpus) for node in nodes
    )
    return replace(inventory, nodes=tuple(taken))


def _named(inventory: Inventory, names: Sequence[str]) -> list[Node]:
    """Return the nodes of these names, each once; all of them when none is named."""
    known = [node.name for node in inventory.nodes]
    strangers = [name for name in names if name not in known]
    if strangers:
        raise PlacementError(
            f"no node `{strangers[0]}` in this cluster",
            hint=f"its nodes are {fold(known)}: `--nodes {fold(known)}`",
        )
    return [inventory.node(name) for name in dict.fromkeys(names)] or list(inventory.nodes)


def choose(
    inventory: Inventory,
    tp: int | None,
    pp: int | None,
    model_config: Mapping[str, Any] | None = None,
    *,
    dp: int | None = None,
    pcp: int = 1,
    backend: Backend = "ray",
) -> Placement:
    """Choose a split: TP = GPUs per node and PP = nodes, unless something else is asked for.

    Args:
        inventory: its nodes bring the GPUs.
        tp: tensor parallel size, or None to derive it.
        pp: pipeline parallel size, or None to derive it.
        model_config: the model's `config.json`, or None when nobody could read it.
        dp: replicas of the split behind one endpoint; with more than one, each takes an equal part
            of the GPUs.
        pcp: prefill context parallel size, of a single replica.
        backend: who hands out the ranks; each does it in its own way.

    Raises:
        PlacementError: the split cannot run; the message says why, the hint what would.
    """
    shape = shape_of(model_config)
    if dp is not None and dp > 1:
        if pcp > 1:
            raise PlacementError(
                f"{dp} replicas with prefill context parallelism cannot be placed",
                hint="use one of the two: `--data-parallel-size`, or -- --prefill-context-parallel",
            )
        return _replicate(inventory, dp, tp, pp, shape, backend)
    stage, chosen_pp, why = _single(inventory, tp, pp, pcp, shape)
    chosen_tp = stage // pcp
    wrong = impossible(inventory, chosen_tp, chosen_pp, shape, pcp) if chosen_tp else _UNEVEN
    placed = Placement(
        tp=chosen_tp, pp=chosen_pp, pcp=pcp, why=why, nodes=(), experts=shape.experts
    )
    if wrong or stage % pcp:
        raise PlacementError(
            f"{placed.words} cannot run: {wrong or _UNEVEN}",
            evidence=f"{why}; {brings(inventory)}",
            hint=_instead(inventory, shape, pcp),
        )
    mp = backend == "mp"
    nodes = share(inventory, stage, chosen_pp) if mp else fill(inventory, stage * chosen_pp)
    placed = replace(placed, nodes=nodes)
    return replace(placed, warnings=tuple(_warnings(inventory, placed, shape)))


_UNEVEN = "the GPUs of a stage cannot be divided by PCP"


def _single(
    inventory: Inventory, tp: int | None, pp: int | None, pcp: int, shape: ModelShape
) -> tuple[int, int, str]:
    """Return the ranks of a stage and the stages of a single replica, and why.

    Where each node has one GPU, and RDMA between them, all are one stage: with the ranks of a
    layer's reductions a network apart, latency decides, which RDMA has and pipelines waste (the
    recipes for DGX Spark: eugr/spark-vllm-docker).
    """
    count = len(inventory.nodes)
    free = tp is None and pp is None and count % pcp == 0
    if free and _close(inventory) and not impossible(inventory, count // pcp, 1, shape, pcp):
        return count, 1, "one GPU per node, and RDMA between them: TP = nodes"
    return _sizes(inventory, None if tp is None else tp * pcp, pp)


def impossible(inventory: Inventory, tp: int, pp: int, shape: ModelShape, dp: int = 1) -> str:
    """Return why a split cannot run, in words; empty when nothing known speaks against it."""
    if tp < 1 or pp < 1:
        return "both must be at least 1"
    if tp * pp * dp > inventory.gpus:
        return f"it needs {tp * pp * dp} GPUs, the cluster has {inventory.gpus}"
    return _indivisible(shape, tp, pp)


def _indivisible(shape: ModelShape, tp: int, pp: int) -> str:
    if shape.heads is not None and shape.heads % tp:
        return f"the model's {shape.heads} attention heads cannot be divided by TP {tp}"
    if shape.kv_heads is not None and shape.kv_heads % tp and tp % shape.kv_heads:
        return (
            f"the model's {shape.kv_heads} key/value heads can be neither divided by TP {tp} nor"
            " repeated to fill it"
        )
    if shape.layers is not None and shape.layers < pp:
        return f"the model's {shape.layers} layers are fewer than the {pp} stages of PP {pp}"
    return ""


def _replicate(
    inventory: Inventory,
    dp: int,
    tp: int | None,
    pp: int | None,
    shape: ModelShape,
    backend: Backend,
) -> Placement:
    chosen_tp, chosen_pp, why = _replica_sizes(inventory, dp, tp, pp)
    each = chosen_tp * chosen_pp
    wrong = impossible(inventory, chosen_tp, chosen_pp, shape, dp)
    nodes = () if wrong else fit(inventory, dp, each, spanning=backend == "ray")
    if not nodes:
        wide = not wrong and backend == "mp" and bool(fit(inventory, dp, each, spanning=True))
        ray = ", or `--backend ray` for replicas of several nodes" if wide else ""
        raise PlacementError(
            f"{dp} replicas of TP {chosen_tp} × PP {chosen_pp} cannot run:"
            f" {wrong or _unfit(inventory, each, wide)}",
            evidence=f"{why}; {brings(inventory)}",
            hint=_other_replicas(inventory, dp, shape) + ray,
        )
    placed = Placement(
        tp=chosen_tp, pp=chosen_pp, why=why, nodes=nodes, dp=dp, experts=shape.experts
    )
    warnings = _warnings(inventory, placed, shape)
    if backend == "ray" and shape.experts and len(nodes) > 1:
        warnings.append(
            "replicas of a mixture of experts on several nodes have open reports of hangs under Ray"
            " (vLLM issues 44878, 43420 and 32400): `--backend mp` is the way to prefer"
        )
    return replace(placed, warnings=tuple(warnings))


def _replica_sizes(
    inventory: Inventory, dp: int, tp: int | None, pp: int | None
) -> tuple[int, int, str]:
    """Give each replica an equal part of the GPUs, as TP where it stays inside a node."""
    if tp is not None and pp is not None:
        return tp, pp, "as asked"
    if tp is not None:
        return tp, 1, f"TP {tp} as asked; a replica inside a node needs no pipeline"
    total, part = inventory.gpus, _equal_part(inventory, dp, pp)
    if pp is not None:
        why = f"PP {pp} as asked, the TP that gives each replica {part} of {total} GPUs"
        return max(1, part // pp), pp, why
    if part == 0:
        return 1, 1, "a replica has one GPU at least"
    why = f"each replica gets {part} of {total} GPUs"
    size = max(node.gpus for node in inventory.nodes)
    if part > size and part % size == 0:
        return size, part // size, f"{why}: TP = GPUs per node, PP = its nodes"
    return part, 1, f"{why} as TP"


def _equal_part(inventory: Inventory, dp: int, pp: int | None) -> int:
    """Return the GPUs of each replica, 0 when they are fewer than the replicas."""
    total = inventory.gpus
    part = total // dp
    if part and (total % dp or part % (pp or 1)):
        asked = f"{dp} replicas" + (f" of PP {pp}" if pp is not None else "")
        raise PlacementError(
            f"the cluster's {total} GPUs cannot be divided equally between {asked}",
            evidence=brings(inventory),
            hint=_other_replicas(inventory, dp, ModelShape()),
        )
    return part


def _unfit(inventory: Inventory, each: int, wide: bool) -> str:
    if wide:
        return (
            f"a replica needs {each} GPUs and so several nodes, and the mp backend keeps replicas"
            " inside nodes"
        )
    if inventory.head.gpus < each and any(node.gpus >= each for node in inventory.workers):
        return (
            f"a replica needs {each} GPUs, and the head, which must hold one, has"
            f" {inventory.head.gpus}"
        )
    held = sum(node.gpus // each for node in inventory.nodes)
    if held:
        return f"only {held} of them can stay inside nodes"
    return f"a replica needs {each} GPUs, more than any node has"


def _other_replicas(inventory: Inventory, dp: int, shape: ModelShape) -> str:
    """Name up to three ways that work on either backend: as many replicas as asked first, then
    those that use most GPUs.
    """
    sizes = range(1, inventory.head.gpus + 1)
    most = {tp: sum(node.gpus // tp for node in inventory.nodes) for tp in sizes}
    options = [
        (count, tp)
        for tp in sizes
        for count in {min(dp, most[tp]), most[tp]}
        if count > 1 and not impossible(inventory, tp, 1, shape, count)
    ]
    # One way for each number of replicas: the largest TP that leaves no GPU of the head over, else
    # the largest.
    best = dict(sorted(options, key=lambda each: (inventory.head.gpus % each[1] == 0, each[1])))
    options = sorted(
        best.items(),
        key=lambda each: (each[0] != dp, -each[0] * each[1], abs(each[0] - dp), -each[1]),
    )
    if not options:
        return "no two replicas of this model fit inside nodes"
    return "these work: " + ", ".join(
        f"`--data-parallel-size {count} --tp {tp}`" for count, tp in options[:3]
    )


def _sizes(inventory: Inventory, tp: int | None, pp: int | None) -> tuple[int, int, str]:
    total, count = inventory.gpus, len(inventory.nodes)
    if tp is not None and pp is not None:
        return tp, pp, "as asked"
    if tp is not None:
        if count == 1:
            return tp, 1, f"TP {tp} as asked; one node needs no pipeline"
        return (
            tp,
            _rest(inventory, "tp", tp),
            f"TP {tp} as asked, the PP that uses all {total} GPUs",
        )
    if pp is not None:
        return (
            _rest(inventory, "pp", pp),
            pp,
            f"PP {pp} as asked, the TP that uses all {total} GPUs",
        )
    if total == 1:
        return 1, 1, "there is one GPU"
    if count == 1:
        return total, 1, "one node: TP across its GPUs, no pipeline"
    return _gpus_per_node(inventory), count, "TP = GPUs per node, PP = nodes"


def _close(inventory: Inventory) -> bool:
    """True of several nodes with one GPU each and RDMA between them."""
    single = all(node.gpus == 1 for node in inventory.nodes)
    return single and len(inventory.nodes) > 1 and inventory.fabric != "ethernet"


def _gpus_per_node(inventory: Inventory) -> int:
    sizes = {node.gpus for node in inventory.nodes}
    if len(sizes) == 1:
        return sizes.pop()
    common, total = gcd(*sizes), inventory.gpus
    options = [f"`--tp {common} --pp {total // common}`"]
    if common > 1:
        options.append(f"`--tp 1 --pp {total}`")
    raise PlacementError(
        "the nodes have different numbers of GPUs, so TP = GPUs per node has no answer",
        evidence=brings(inventory),
        hint=f"ask for a split that keeps TP groups inside nodes: {' or '.join(options)}",
    )


def _rest(inventory: Inventory, asked: str, size: int) -> int:
    total = inventory.gpus
    if size >= 1 and size <= total and total % size == 0:
        return total // size
    # More than there is is said by `impossible`; what does not divide needs the other size spelled
    # out.
    if size < 1 or size > total:
        return 1
    other = "pp" if asked == "tp" else "tp"
    raise PlacementError(
        f"{asked.upper()} {size} does not divide the cluster's {total} GPUs",
        evidence=brings(inventory),
        hint=f"give both to use fewer GPUs: `--{asked} {size} --{other} {total // size}`",
    )


def _warnings(inventory: Inventory, placed: Placement, shape: ModelShape) -> list[str]:
    said, tp = [], placed.tp
    if placed.crosses and not _close(inventory):
        said.append(
            f"TP {tp} crosses nodes: every layer waits for the network between them, which only"
            " pays with InfiniBand or RoCE"
        )
    if placed.world < inventory.gpus:
        said.append(f"{inventory.gpus - placed.world} of {inventory.gpus} GPUs stay unused")
    if shape.kv_heads is not None and tp > shape.kv_heads:
        said.append(
            f"TP {tp} exceeds the model's {shape.kv_heads} key/value heads, so each is kept"
            f" {tp // shape.kv_heads} times"
        )
    return said


def _instead(inventory: Inventory, shape: ModelShape, pcp: int = 1) -> str:
    """Name up to three splits that work, those that use most GPUs and keep TP inside nodes
    first.
    """
    total = inventory.gpus
    smallest = min(node.gpus for node in inventory.nodes)
    options = [
        (tp, pp)
        for tp in range(1, total + 1)
        for pp in range(1, total // tp + 1)
        if not impossible(inventory, tp, pp, shape, pcp)
    ]
    options.sort(key=lambda each: (-each[0] * each[1], smallest % each[0] != 0, -each[0]))
    if not options:
        return "no split of this model fits the cluster"
    return "these work: " + ", ".join(f"`--tp {tp} --pp {pp}`" for tp, pp in options[:3])
