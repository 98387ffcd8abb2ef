"""Gates before a server starts: its nodes, its model, and free GPUs, memory and ports. Findings
name what occupies them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from launcher.core.check import Finding, failed, passed
from launcher.core.domain import Inventory, Node, fold
from launcher.core.plan import Gate, precomputed_gate
from launcher.hosts.check import Evidence
from launcher.hosts.checks.gpu import ACCELERATOR
from launcher.hosts.checks.gpu_memory import GPU_MEMORY, judge_server_memory, warn_gpu_memory
from launcher.serving.serve_request import ServeRequest
from launcher.tools import vllm
from launcher.tools.site import serving_judges
from launcher.tools.site.servers import Server, gpus_by_node
from launcher.tools.site.serving_judges import GpuUser
from launcher.tools.site.snapshot import ClusterSnapshot


def start_gates(
    snapshot: ClusterSnapshot, request: ServeRequest, replaced: Server | None
) -> tuple[Gate, ...]:
    """Return the gates of a start. `replaced` is the running server of that name."""
    inventory, head_state = snapshot.site.inventory, snapshot.servers_state
    rank_nodes = request.rank_nodes(inventory)
    if request.backend == "ray":
        rank_nodes = list(inventory.nodes)
    agent_nodes = [node for node in inventory.nodes if node.head or node in rank_nodes]
    agent_ages = {**head_state.members, inventory.head.name: head_state.agent}
    others = [server for server in head_state.running if server.name != request.name]
    capacity = _CapacityCheck(snapshot=snapshot, request=request, replaced=replaced, others=others)
    return (
        *([serving_judges.cluster_gate(snapshot)] if request.backend == "ray" else []),
        precomputed_gate(
            "agents",
            "all agents are connected to the head",
            partial(serving_judges.judge_agents, snapshot.site, agent_nodes, agent_ages),
        ),
        *([_gpu_presence_gate(snapshot, agent_nodes)] if GPU_MEMORY.applies(inventory) else []),
        serving_judges.model_gate(snapshot, rank_nodes, request.model),
        precomputed_gate(
            "room",
            f"enough GPUs are free, and port {request.port} on"
            f" {fold([node.name for node in capacity.api_nodes])}",
            # Both at once: a used port must not surface only when the GPUs are free.
            lambda: [*capacity.judge_gpus(), *map(capacity.judge_port, capacity.api_nodes)],
        ),
        *([_gpu_memory_gate(snapshot, request)] if GPU_MEMORY.applies(inventory) else []),
    )


def _gpu_presence_gate(snapshot: ClusterSnapshot, nodes: Sequence[Node]) -> Gate:
    """Check that drivers see all declared GPUs: with a lost one, every start fails."""
    site = snapshot.site
    with_gpu_facts = [
        node
        for node in nodes
        if (facts := site.facts_of(node)) is not None and (facts.gpus or facts.lost_gpus)
    ]
    inventory = replace(site.inventory, nodes=tuple(with_gpu_facts))
    evidence = Evidence(inventory=inventory, facts=site.facts)
    return precomputed_gate(ACCELERATOR.id, ACCELERATOR.what, partial(ACCELERATOR.judge, evidence))


def _gpu_memory_gate(snapshot: ClusterSnapshot, request: ServeRequest) -> Gate:
    """Check for free GPU memory; only warn if Ray may choose the GPUs."""
    inventory, placement = snapshot.site.inventory, request.placement
    evidence = Evidence(inventory=inventory, facts=snapshot.site.facts)
    judge = partial(warn_gpu_memory, evidence)
    if request.backend == "mp" or placement.world == inventory.gpus:
        share = vllm.memory_share(request.args)
        judge = partial(judge_server_memory, evidence, dict(placement.nodes), share)
    title = "its GPUs have enough free memory"
    return precomputed_gate("gpu-memory", title, judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapacityCheck:
    """Free GPUs and ports for a server, once `replaced`, the running one of its name, is gone."""

    snapshot: ClusterSnapshot
    request: ServeRequest
    replaced: Server | None
    others: Sequence[Server]

    @property
    def inventory(self) -> Inventory:
        return self.snapshot.site.inventory

    @property
    def api_nodes(self) -> Sequence[Node]:
        return self.request.api_nodes(self.inventory)

    def judge_gpus(self) -> Sequence[Finding]:
        """Check that enough GPUs are free: in all of Ray, or on each node of `mp`."""
        inventory, placement = self.inventory, self.request.placement
        payload = self.snapshot.payload
        batches = serving_judges.job_gpu_users(payload)
        if self.request.backend == "ray":
            users = [serving_judges.server_gpu_user(other, other.gpus) for other in self.others]
            freed = sum(_gpus_in_ray(self.replaced).values())
            return serving_judges.judge_free_gpus(
                inventory, placement.world, placement.label, payload, [*users, *batches], freed
            )
        if not inventory.ray.off and "jobs" not in payload:
            text = f"cannot query Ray: {payload.get('error', 'no answer')}"
            return [failed(inventory.head, text, fix="see `vlaunch status`")]
        needed = placement.world + sum(server.gpus for server in self.others)
        return [*self._judge_node_gpus(), *_judge_batch_claims(inventory, batches, needed)]

    def _judge_node_gpus(self) -> Iterator[Finding]:
        """Check each node; GPUs of the replaced server return to Ray."""
        busy = serving_judges.busy_gpus_by_node(self.snapshot.payload)
        freed = _gpus_in_ray(self.replaced)
        for name, count in self.request.placement.nodes:
            node = self.inventory.node(name)
            users = [
                serving_judges.server_gpu_user(other, gpus)
                for other in self.others
                if (gpus := gpus_by_node(other).get(name))
            ]
            in_ray = busy.get(node.ip, 0.0) - freed.get(name, 0)
            yield serving_judges.judge_node_gpus(node, count, users, in_ray)

    def judge_port(self, node: Node) -> Finding:
        """Check that the API's port on a node is free, or in use by the replaced server."""
        port, facts = self.request.port, self.snapshot.site.facts
        ports_in_use = {
            used_port: server.label
            for server in self.others
            for name, used_port in _api_ports(server)
            if name == node.name
        }
        if port in ports_in_use:
            listening = {used_port for _, used_port in facts[node.name].listening or ()}
            free = next(n for n in range(port + 1, 1 << 17) if n not in {*ports_in_use, *listening})
            text = f"port {port} on {node.name} is in use by {ports_in_use[port]}"
            return failed(node, text, fix=f"choose another port: `--port {free}`")
        if self.replaced is not None and (node.name, port) in _api_ports(self.replaced):
            return passed(node, "in use by the server to be replaced")
        return serving_judges.judge_port(node, port, "vLLM API", facts[node.name])


def _judge_batch_claims(
    inventory: Inventory, batches: Sequence[GpuUser], needed: int
) -> list[Finding]:
    """Check that batch jobs leave enough GPUs for servers: Ray decides later where the jobs run."""
    claimed = sum(batch.gpus for batch in batches)
    if not claimed or claimed + needed <= inventory.gpus:
        return []
    labels = ", ".join(batch.label for batch in batches)
    text = f"{labels} needs {claimed:g} of {inventory.gpus} GPUs"
    fixes = "\n".join(f"wait for it, or stop it: `{batch.stop_command}`" for batch in batches)
    return [failed("", text, fix=fixes)]


def _gpus_in_ray(server: Server | None) -> Mapping[str, int]:
    return gpus_by_node(server) if server and server.desired and server.desired.ray else {}


def _api_ports(server: Server) -> list[tuple[str, int]]:
    spec = server.desired
    return [(api.node, spec.port) for api in spec.apis] if spec else []
