"""What must hold before a server is asked for: its nodes, its model, and room for it; who is in the
way is named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from launcher.checks import serving
from launcher.checks.serving import Holder
from launcher.checks.shape import Finding
from launcher.model import Inventory
from launcher.plan import containers
from launcher.plan.request import ClusterSnapshot, Request
from launcher.plan.servers import Server
from launcher.plan.shape import Answers, Gate


def gates(
    inventory: Inventory, seen: ClusterSnapshot, request: Request, there: Server | None
) -> tuple[Gate, ...]:
    """Return what must hold; `there` is the server of that name, which makes room."""
    kept, facts = seen.kept, seen.facts
    others = [each for each in kept.running if each.name != request.name]
    names = {node.name: containers.name(inventory, node) for node in inventory.nodes}
    ours = request.nodes_with_ranks(inventory)
    loading = list(inventory.nodes) if request.backend == "ray" else ours
    needed = [node for node in inventory.nodes if node.head or node in loading]
    heard = {**kept.members, inventory.head.name: kept.agent}
    offline = {
        node.name: node.env.get("HF_HUB_OFFLINE", "0") not in ("0", "") for node in inventory.nodes
    }
    api = request.api_node(inventory)
    whole = _gate(
        "cluster",
        "the cluster is up: every node is in Ray",
        partial(serving.cluster, inventory, facts, seen.said, names),
    )
    return (
        *([whole] if request.backend == "ray" else []),
        _gate(
            "agents",
            "the agents of its nodes are connected",
            partial(serving.agents, needed, facts, names, heard),
        ),
        _gate(
            "model",
            "every node has the model, or may download it",
            partial(serving.model, loading, request.model, seen.models, offline),
        ),
        _gate(
            "room",
            f"enough GPUs are free, and port {request.port} on {api.name}",
            partial(_room, inventory, seen, request, there, others),
        ),
    )


def _room(
    inventory: Inventory,
    seen: ClusterSnapshot,
    request: Request,
    there: Server | None,
    others: Sequence[Server],
) -> Sequence[Finding]:
    """Judge both at once: nobody should learn of the port only when the GPUs are free."""
    return [
        *_free(inventory, seen, request, there, others),
        *_api_port(inventory, seen, request, there, others),
    ]


def _free(
    inventory: Inventory,
    seen: ClusterSnapshot,
    request: Request,
    there: Server | None,
    others: Sequence[Server],
) -> Sequence[Finding]:
    """Judge whether there is room: in all of Ray, or on each node of `mp` and, for what batch jobs
    claim, in all.
    """
    split, own = request.placement, _in_ray(there)
    batches = serving.batch_holders(seen.said)
    if request.backend == "ray":
        holders = [*(_holder(each, each.gpus) for each in others), *batches]
        return serving.free_gpus(
            inventory, split.world, split.words, seen.said, holders, sum(own.values())
        )
    if not inventory.ray.off and "jobs" not in seen.said:
        text = f"Ray does not say what it holds: {seen.said.get('error', 'no answer')}"
        return [
            Finding(
                node=inventory.head.name, status="fail", text=text, fix="look at `vlaunch status`"
            )
        ]
    return [
        *_free_on_nodes(inventory, seen, request, own, others),
        *_claimed(inventory, batches, split.world + sum(each.gpus for each in others)),
    ]


def _free_on_nodes(
    inventory: Inventory,
    seen: ClusterSnapshot,
    request: Request,
    own: Mapping[str, int],
    others: Sequence[Server],
) -> list[Finding]:
    """Judge each node of a server by itself; `own` is what Ray gets back there when another makes
    room.
    """
    busy = serving.busy_by_node(seen.said)
    found = []
    for name, count in request.placement.nodes:
        node = inventory.node(name)
        holders = [_holder(each, held) for each in others if (held := _taken(each).get(name))]
        in_ray = busy.get(node.ip, 0.0) - own.get(name, 0)
        found.append(serving.node_gpus(node, count, holders, in_ray))
    return found


def _claimed(inventory: Inventory, batches: Sequence[Holder], needed: int) -> list[Finding]:
    """Judge whether batch jobs leave as many GPUs as servers need: where they will run, Ray decides
    later.
    """
    claimed = sum(each.gpus for each in batches)
    if not claimed or claimed + needed <= inventory.gpus:
        return []
    text = f"{', '.join(each.what for each in batches)} needs {claimed:g} of {inventory.gpus} GPUs"
    ends = "\n".join(f"wait for it, or end it: `{each.end}`" for each in batches)
    return [Finding(node="", status="fail", text=text, fix=ends)]


def _holder(server: Server, gpus: int) -> Holder:
    return Holder(what=server.what, gpus=gpus, end=f"vlaunch stop {server.name}")


def _taken(server: Server) -> Mapping[str, int]:
    """Return how many GPUs a server has on each node: Ray may have put ranks elsewhere than was
    expected.
    """
    places = server.desired.places if server.desired else {}
    ranks = (
        {node: len(held) for node, held in server.observed.ranks.items()} if server.observed else {}
    )
    return ranks if sum(ranks.values()) == sum(places.values()) else places


def _in_ray(server: Server | None) -> Mapping[str, int]:
    """Return the GPUs on each node that Ray gets back when a server makes room."""
    return (
        _taken(server)
        if server is not None and server.desired is not None and server.desired.ray is not None
        else {}
    )


def _api_port(
    inventory: Inventory,
    seen: ClusterSnapshot,
    request: Request,
    there: Server | None,
    others: Sequence[Server],
) -> Sequence[Finding]:
    node, facts = request.api_node(inventory), seen.facts
    held = {at[1]: each.what for each in others if (at := _answers_at(each)) and at[0] == node.name}
    if request.port in held:
        listening = {number for _, number in facts[node.name].listening or ()}
        free = _first_free(request.port + 1, {*held, *listening})
        text = f"port {request.port} on {node.name} is held by {held[request.port]}"
        return [
            Finding(
                node=node.name, status="fail", text=text, fix=f"choose another: `--port {free}`"
            )
        ]
    if there is not None and _answers_at(there) == (node.name, request.port):
        return [
            Finding(node=node.name, status="pass", text="it is held by the server that makes room")
        ]
    return [serving.port(node, request.port, "vLLM API", facts[node.name])]


def _first_free(port: int, taken: Collection[int]) -> int:
    return next(number for number in range(port, 1 << 17) if number not in taken)


def _answers_at(server: Server) -> tuple[str, int] | None:
    return (server.desired.api_node, server.desired.port) if server.desired else None


def _gate(id: str, what: str, findings: Callable[[], Sequence[Finding]]) -> Gate:
    def judge(_: Answers) -> Sequence[Finding]:
        return findings()

    return Gate(id=id, what=what, judge=judge)
