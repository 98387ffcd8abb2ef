"""Which nodes hold how many ranks: as each backend of vLLM (0.32) hands them out.

Pure. What comes back names nodes with their ranks, the head first.
"""

from __future__ import annotations

from launcher.core.domain import Inventory, Node
from launcher.core.errors import PlacementError

Shares = tuple[tuple[str, int], ...]


def fill(inventory: Inventory, world: int) -> Shares:
    """Hand out ranks as vLLM sorts them: the head first, each node's together
    (v1/executor/ray_executor_v2.py).
    """
    left, nodes = world, []
    for node in (inventory.head, *inventory.workers):
        here = min(left, node.gpus)
        if here:
            nodes.append((node.name, here))
        left -= here
    return tuple(nodes)


def share(inventory: Inventory, tp: int, pp: int) -> Shares:
    """Hand out ranks as vLLM's own multi-node mode needs it: the head first, then as few nodes as
    hold all in equal shares.

    vLLM gives each of its nodes the same number of ranks (`local_world_size`,
    vllm/config/parallel.py).

    Raises:
        PlacementError: no number of nodes can share the ranks equally.
    """
    ordered = _largest_first(inventory)
    for count in range(1, len(ordered) + 1):
        each, rest = divmod(tp * pp, count)
        if not rest and all(node.gpus >= each for node in ordered[:count]):
            return tuple((node.name, each) for node in ordered[:count])
    raise PlacementError(
        f"TP {tp} × PP {pp} cannot be shared equally between nodes, which the mp backend needs",
        evidence=brings(inventory),
        hint="use `--backend ray`, or a TP × PP that every node takes the same part of",
    )


def fit(inventory: Inventory, dp: int, each: int, *, spanning: bool) -> Shares:
    """Hand out replicas of `each` ranks: whole ones inside nodes, the head's first, on as few nodes
    as hold them.

    With `spanning`, one that is larger than a node takes several whole ones, as vLLM's Ray backend
    can (strategy `span` of `create_dp_placement_groups`, vllm/v1/engine/utils.py). Empty when they
    do not fit, or the head would hold none.
    """
    if spanning and each > inventory.head.gpus:
        return _fit_whole_nodes(inventory, dp * each, each)
    left, nodes = dp, []
    for node in _largest_first(inventory):
        here = min(left, node.gpus // each)
        if here:
            nodes.append((node.name, here * each))
        left -= here
    return () if left or nodes[0][0] != inventory.head.name else tuple(nodes)


def _fit_whole_nodes(inventory: Inventory, world: int, each: int) -> Shares:
    """Hand out `world` ranks to nodes that are all alike, so that each replica has nodes to
    itself.
    """
    ordered, size = _largest_first(inventory), inventory.head.gpus
    alike = all(node.gpus == size for node in ordered)
    count = world // size
    if not alike or each % size or count > len(ordered):
        return ()
    return tuple((node.name, size) for node in ordered[:count])


def _largest_first(inventory: Inventory) -> tuple[Node, ...]:
    """Return the head, then the workers, those with most GPUs first."""
    return (inventory.head, *sorted(inventory.workers, key=lambda node: -node.gpus))


def brings(inventory: Inventory) -> str:
    """Name the nodes with their GPUs, as evidence."""
    return "GPUs: " + ", ".join(f"{node.name} {node.gpus}" for node in inventory.nodes)
