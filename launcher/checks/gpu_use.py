"""Who holds accelerators in Ray, and whether enough of them are free for a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.checks.shape import Finding, failed, passed
from launcher.model import Inventory, Node
from launcher.tools import ray

LIST_GROUPS = "vlaunch exec --head -- ray list placement-groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Something that runs and may hold accelerators; `end` is the command that ends it."""

    what: str
    gpus: float
    end: str


def free_gpus(
    inventory: Inventory,
    needs: int,
    split: str,
    said: Mapping[str, Any],
    holders: Sequence[Holder],
    freed: float = 0.0,
) -> list[Finding]:
    """Judge that Ray has as many free GPUs as a split, told in words, needs; vLLM would wait half
    an hour for them.

    `holders` are the others that hold some; `freed` are those of the server that makes room for it.
    """
    # What has just begun holds nothing yet, but soon will.
    free = max(
        0.0, inventory.gpus - max(busy_gpus(said) - freed, sum(each.gpus for each in holders))
    )
    if free >= needs:
        return [passed("", f"{free:g} of {inventory.gpus} GPUs are free in Ray")]
    text = (
        f"{free:g} of {inventory.gpus} GPUs are free in Ray, {split} needs {needs}{held(holders)}"
    )
    return [failed("", text, fix=_ends(holders))]


def node_gpus(node: Node, needs: int, holders: Sequence[Holder], in_ray: float) -> Finding:
    """Judge that a node has as many free GPUs as a server takes there; `holders` hold so many of
    this node's.

    `in_ray` are those that Ray has given away there, which may be the same.
    """
    known = sum(each.gpus for each in holders)
    free = max(0.0, node.gpus - max(known, in_ray))
    if free >= needs:
        return passed(node)
    other = (
        [Holder(what="work in Ray", gpus=in_ray - known, end=LIST_GROUPS)] if in_ray > known else []
    )
    text = (
        f"{free:g} of {node.gpus} GPUs are free, the server needs {needs}{held([*holders, *other])}"
    )
    return failed(
        node, text, fix=_ends([*holders, *other]) + "\nor let it take other nodes: `--nodes`"
    )


def busy_gpus(said: Mapping[str, Any]) -> float:
    """Count the GPUs that living placement groups reserve, and those of actors outside of any."""
    return sum(count for _, count in _reserved(said))


def busy_by_node(said: Mapping[str, Any]) -> dict[str, float]:
    """Count them by the node's address."""
    where = {each.id: each.ip for each in ray.parse_nodes(said["nodes"])} if "nodes" in said else {}
    busy: dict[str, float] = {}
    for node, count in _reserved(said):
        ip = where.get(node, "")
        busy[ip] = busy.get(ip, 0.0) + count
    return busy


def _reserved(said: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return what Ray has given away: a node's id (empty where it is not said) and GPUs."""
    alone = [
        row
        for row in rows(said.get("actors"))
        if row.get("state") == "ALIVE" and not row.get("placement_group_id")
    ]
    reserved = [(each, each.get("unit_resources")) for each in _bundles(said)]
    reserved += [(row, row.get("required_resources")) for row in alone]
    return [(str(row.get("node_id") or ""), _gpus(resources)) for row, resources in reserved]


def _bundles(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bundles of the placement groups that have what they asked for."""
    found: list[dict[str, Any]] = []
    for row in rows(said.get("groups")):
        bundles = row.get("bundles")
        if row.get("state") in ("REMOVED", "PENDING", "INFEASIBLE"):
            continue
        if isinstance(bundles, list):
            found += [each for each in bundles if isinstance(each, dict)]
    return found


def rows(answer: Any) -> list[dict[str, Any]]:
    """Return the rows of one of the lists that the head asked Ray for; none where it is not one."""
    try:
        found = answer["data"]["result"]["result"]
    except (KeyError, TypeError, IndexError):
        return []
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _gpus(resources: object) -> float:
    count = resources.get("GPU", 0) if isinstance(resources, dict) else 0
    return positive(count) if isinstance(count, (int, float)) else 0.0


def positive(count: float) -> float:
    """Return a number of accelerators; 0 for what cannot be one."""
    return float(count) if 0 <= count < 1e9 else 0.0


def held(holders: Sequence[Holder]) -> str:
    """Return in words what each of them holds, to be put behind what is missing."""
    named = [f"{each.what} holds {each.gpus:g}" if each.gpus else each.what for each in holders]
    return f": {', '.join(named)}" if named else ""


def _ends(holders: Sequence[Holder]) -> str:
    if ends := [each.end for each in holders if each.end != LIST_GROUPS]:
        return "\n".join(f"wait for it, or end it: `{end}`" for end in ends)
    return f"see who holds them: `{LIST_GROUPS}`"
