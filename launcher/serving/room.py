"""What must hold before a server is asked for: its nodes, its model, and room for it; who is in the
way is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from launcher.core.check import Finding, failed, passed
from launcher.core.domain import Inventory, Node, fold
from launcher.core.plan import Gate, observed
from launcher.hosts.check import Evidence
from launcher.hosts.checks.gpu import ACCELERATOR
from launcher.hosts.checks.gpu_memory import GPU_MEMORY, left_for_server, noticed
from launcher.serving.serve_request import Request
from launcher.tools import serving_judges, vllm
from launcher.tools.servers import Server
from launcher.tools.serving_judges import Holder
from launcher.tools.snapshot import ClusterSnapshot


def gates(seen: ClusterSnapshot, request: Request, there: Server | None) -> tuple[Gate, ...]:
    """Return what must hold; `there` is the server of that name, which makes room."""
    inventory, kept = seen.site.inventory, seen.kept
    loading = request.nodes_with_ranks(inventory)
    if request.backend == "ray":
        loading = list(inventory.nodes)
    needed = [node for node in inventory.nodes if node.head or node in loading]
    heard = {**kept.members, inventory.head.name: kept.agent}
    others = [each for each in kept.running if each.name != request.name]
    room = _Room(seen=seen, request=request, there=there, others=others)
    return (
        *([serving_judges.cluster_gate(seen)] if request.backend == "ray" else []),
        observed(
            "agents",
            "the agents of its nodes are connected",
            partial(serving_judges.agents, seen.site, needed, heard),
        ),
        *([_gpus_there(seen, needed)] if GPU_MEMORY.applies(inventory) else []),
        serving_judges.model_gate(seen, loading, request.model),
        observed(
            "room",
            f"enough GPUs are free, and port {request.port} on"
            f" {fold([node.name for node in room.apis])}",
            # Both at once: nobody should learn of the port only when the GPUs are free.
            lambda: [*room.gpus(), *(room.port(node) for node in room.apis)],
        ),
        *([_gpu_memory(seen, request)] if GPU_MEMORY.applies(inventory) else []),
    )


def _gpus_there(seen: ClusterSnapshot, nodes: Sequence[Node]) -> Gate:
    """The GPUs that nodes declare are there, as far as their drivers say: a lost one ends every
    start.
    """
    site = seen.site
    known = [
        node
        for node in nodes
        if (facts := site.facts_of(node)) is not None and (facts.gpus or facts.lost_gpus)
    ]
    inventory = replace(site.inventory, nodes=tuple(known))
    evidence = Evidence(inventory=inventory, facts=site.facts)
    return observed(ACCELERATOR.id, ACCELERATOR.what, partial(ACCELERATOR.judge, evidence))


def _gpu_memory(seen: ClusterSnapshot, request: Request) -> Gate:
    """Others leave the memory that vLLM claims; where Ray may choose among GPUs, it may choose one
    that others hold, which is only warned of.
    """
    inventory, split = seen.site.inventory, request.placement
    known = request.backend == "mp" or split.world == inventory.gpus
    evidence = Evidence(inventory=inventory, facts=seen.site.facts)
    share = vllm.memory_share(request.args)
    left = partial(left_for_server, evidence, dict(split.nodes), share)
    return observed(
        "gpu-memory",
        "others leave the memory of its GPUs that it claims",
        left if known else partial(noticed, evidence),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """Whether a server that is asked for has room beside the others, once the one of its name,
    `there`, is gone.
    """

    seen: ClusterSnapshot
    request: Request
    there: Server | None
    others: Sequence[Server]

    @property
    def inventory(self) -> Inventory:
        return self.seen.site.inventory

    @property
    def apis(self) -> Sequence[Node]:
        return self.request.api_nodes(self.inventory)

    def gpus(self) -> Sequence[Finding]:
        """Judge whether GPUs are free: in all of Ray, or on each node of `mp` and, for what batch
        jobs claim, in all.
        """
        inventory, said, split = self.inventory, self.seen.said, self.request.placement
        batches = serving_judges.job_holders(said)
        if self.request.backend == "ray":
            holders = [
                *(serving_judges.holder(other, other.gpus) for other in self.others),
                *batches,
            ]
            own = sum(_in_ray(self.there).values())
            return serving_judges.free_gpus(inventory, split.world, split.words, said, holders, own)
        if not inventory.ray.off and "jobs" not in said:
            text = f"Ray does not say what it holds: {said.get('error', 'no answer')}"
            return [failed(inventory.head, text, fix="look at `vlaunch status`")]
        needed = split.world + sum(each.gpus for each in self.others)
        return [*self._gpus_on_nodes(), *_claimed(inventory, batches, needed)]

    def _gpus_on_nodes(self) -> Iterator[Finding]:
        """Judge each node by itself; what the server that makes room has there, Ray gets back."""
        busy, own = serving_judges.busy_by_node(self.seen.said), _in_ray(self.there)
        for name, count in self.request.placement.nodes:
            node = self.inventory.node(name)
            holders = [
                serving_judges.holder(other, gpus)
                for other in self.others
                if (gpus := _taken(other).get(name))
            ]
            in_ray = busy.get(node.ip, 0.0) - own.get(name, 0)
            yield serving_judges.node_gpus(node, count, holders, in_ray)

    def port(self, node: Node) -> Finding:
        """Judge whether the port of its API on a node is free, or held by the server that makes
        room.
        """
        port, facts = self.request.port, self.seen.site.facts
        held = {
            number: each.what
            for each in self.others
            for name, number in _answers_at(each)
            if name == node.name
        }
        if port in held:
            listening = {number for _, number in facts[node.name].listening or ()}
            free = next(n for n in range(port + 1, 1 << 17) if n not in {*held, *listening})
            text = f"port {port} on {node.name} is held by {held[port]}"
            return failed(node, text, fix=f"choose another: `--port {free}`")
        if self.there is not None and (node.name, port) in _answers_at(self.there):
            return passed(node, "it is held by the server that makes room")
        return serving_judges.port(node, port, "vLLM API", facts[node.name])


def _claimed(inventory: Inventory, batches: Sequence[Holder], needed: int) -> list[Finding]:
    """Judge whether batch jobs leave as many GPUs as servers need: where they will run, Ray decides
    later.
    """
    claimed = sum(each.gpus for each in batches)
    if not claimed or claimed + needed <= inventory.gpus:
        return []
    text = f"{', '.join(each.what for each in batches)} needs {claimed:g} of {inventory.gpus} GPUs"
    ends = "\n".join(f"wait for it, or end it: `{each.end}`" for each in batches)
    return [failed("", text, fix=ends)]


def _taken(server: Server) -> Mapping[str, int]:
    """Return how many GPUs a server has on each node: Ray may have put ranks elsewhere than was
    expected.
    """
    places = server.desired.places if server.desired else {}
    ranks = server.observed.ranks if server.observed else {}
    counts = {node: len(names) for node, names in ranks.items()}
    return counts if sum(counts.values()) == sum(places.values()) else places


def _in_ray(server: Server | None) -> Mapping[str, int]:
    """Return the GPUs on each node that Ray gets back when a server makes room."""
    return _taken(server) if server and server.desired and server.desired.ray else {}


def _answers_at(server: Server) -> list[tuple[str, int]]:
    wanted = server.desired
    return [(each.node, wanted.port) for each in wanted.apis] if wanted else []
