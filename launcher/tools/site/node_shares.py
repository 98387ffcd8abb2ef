"""Assignment of ranks to nodes, the head first, as by the backends of vLLM (0.32)."""

from launcher.core.domain import Inventory, Node
from launcher.core.errors import PlacementError

Shares = tuple[tuple[str, int], ...]


def assign_ray_ranks(inventory: Inventory, world: int) -> Shares:
    """Assign ranks node by node, the head first, as v1/executor/ray_executor_v2.py does."""
    remaining, nodes = world, []
    for node in (inventory.head, *inventory.workers):
        count = min(remaining, node.gpus)
        if count:
            nodes.append((node.name, count))
        remaining -= count
    return tuple(nodes)


def assign_mp_ranks(inventory: Inventory, tp: int, pp: int) -> Shares:
    """Assign equal numbers of ranks to as few nodes as possible, the head first.

    vLLM's multi-node mode needs the same number on all nodes (`local_world_size`,
    vllm/config/parallel.py).

    Raises:
        PlacementError: no number of nodes can share the ranks equally.
    """
    ordered = _largest_first(inventory)
    for count in range(1, len(ordered) + 1):
        share, remainder = divmod(tp * pp, count)
        if not remainder and all(node.gpus >= share for node in ordered[:count]):
            return tuple((node.name, share) for node in ordered[:count])
    raise PlacementError(
        f"TP {tp} × PP {pp} cannot be divided equally between nodes, as the mp backend requires",
        evidence=describe_gpus(inventory),
        hint="use `--backend ray`, or a TP × PP that gives every node the same number of ranks",
    )


def assign_replicas(inventory: Inventory, dp: int, replica_size: int, *, spanning: bool) -> Shares:
    """Assign replicas of `replica_size` ranks to as few nodes as possible, the head first.

    With `spanning`, a replica larger than a node takes several whole nodes, as with vLLM's Ray
    backend (strategy `span` of `create_dp_placement_groups`, vllm/v1/engine/utils.py). Empty when
    the replicas do not fit, or the head would have none.
    """
    if spanning and replica_size > inventory.head.gpus:
        return _assign_whole_nodes(inventory, dp * replica_size, replica_size)
    remaining, nodes = dp, []
    for node in _largest_first(inventory):
        count = min(remaining, node.gpus // replica_size)
        if count:
            nodes.append((node.name, count * replica_size))
        remaining -= count
    return () if remaining or nodes[0][0] != inventory.head.name else tuple(nodes)


def _assign_whole_nodes(inventory: Inventory, world: int, replica_size: int) -> Shares:
    """Assign `world` ranks to nodes of equal size, without sharing nodes between replicas."""
    ordered, size = _largest_first(inventory), inventory.head.gpus
    uniform = all(node.gpus == size for node in ordered)
    count = world // size
    if not uniform or replica_size % size or count > len(ordered):
        return ()
    return tuple((node.name, size) for node in ordered[:count])


def _largest_first(inventory: Inventory) -> tuple[Node, ...]:
    """Return the head, then the workers by descending number of GPUs."""
    return (inventory.head, *sorted(inventory.workers, key=lambda node: -node.gpus))


def describe_gpus(inventory: Inventory) -> str:
    """List the GPUs of all nodes, as evidence."""
    return "GPUs: " + ", ".join(f"{node.name} {node.gpus}" for node in inventory.nodes)
