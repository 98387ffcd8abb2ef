"""A server as a group of pods: the request, placement and processes of `serve`, with the
controller's variables in place of addresses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.agent.desired import Desired, Policy
from launcher.core.domain import Inventory, Logging, Node, RaySettings
from launcher.core.errors import RequestError
from launcher.export.target import ExportTarget
from launcher.serving import server_spec
from launcher.serving.serve_request import ServeRequest
from launcher.tools.site import Site
from launcher.tools.site.snapshot import ClusterSnapshot

Object = dict[str, Any]
# Every pod network calls a pod's interface so, whatever the host's NIC is called.
POD_INTERFACE = "eth0"
_ANY = ("0.0.0.0", "::")  # noqa: S104 - a pod's own addresses
# Variables that controllers set in pods: LeaderWorkerSet 0.10 (pkg/utils/pod/pod_utils.go), and in
# all but the head KubeRay 1.7 (controllers/ray/common/pod.go).
LWS_LEADER, LWS_INDEX, RAY_HEAD = "$LWS_LEADER_ADDRESS", "$LWS_WORKER_INDEX", "$FQ_RAY_IP"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """A server in pods: `inventory` from the pods' point of view, `original` as written."""

    original: Inventory
    inventory: Inventory
    request: ServeRequest
    desired: Desired
    target: ExportTarget
    batch: bool = False  # the pods run a batch job

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes with ranks, the rendezvous node first."""
        return tuple(self.request.rank_nodes(self.inventory))

    @property
    def size(self) -> int:
        """Number of pods."""
        return len(self.nodes)

    @property
    def shares(self) -> Mapping[str, int]:
        """Number of GPUs of each node's pod."""
        return dict(self.request.placement.nodes)

    @property
    def gated(self) -> bool:
        """True if the pods check the network first."""
        return self.target.gate and self.request.placement.networked

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the secrets that pods read."""
        return tuple(sorted(self.original.secrets))


def build_group(
    inventory: Inventory, request: ServeRequest, policy: Policy, target: ExportTarget
) -> PodGroup:
    """Return a server as a group of pods.

    Raises RequestError with everything that cannot be expressed for Kubernetes.
    """
    _refuse(inventory, request, target)
    request = replace(request, host=_ANY[0])  # a Service forwards to the pod's address
    pod_inventory = _pod_inventory(inventory, request, target)
    if request.backend == "mp":
        pod_inventory = replace(pod_inventory, ray=RaySettings(version="none"))
    else:
        ranks = request.rank_nodes(pod_inventory)
        heads = tuple(replace(node, head=node is ranks[0]) for node in ranks)
        pod_inventory = replace(pod_inventory, nodes=heads)
    if target.rdma_resource is None and not inventory.privileged:
        # Ranks that meet inside a node need neither the devices nor a right to them.
        pod_inventory = replace(pod_inventory, fabric="ethernet")
    snapshot = ClusterSnapshot(site=Site(pod_inventory))
    return PodGroup(
        original=inventory,
        inventory=pod_inventory,
        request=request,
        desired=server_spec.build_spec(snapshot, request, requested_at=0.0, policy=policy),
        target=target,
    )


def _pod_inventory(inventory: Inventory, request: ServeRequest, target: ExportTarget) -> Inventory:
    """Return the inventory from the pods' point of view: the first one by its name, in the pod
    network, with its interface and the settings that all nodes share; a volume is mounted at the
    first one's `hf_home`.
    """
    leader = LWS_LEADER if target.kind == "lws" else RAY_HEAD
    nodes = request.rank_nodes(inventory)
    home, common = nodes[0].hf_home, _common_env(nodes)

    def seen(node: Node) -> Node:
        changed = replace(node, ip=leader, state_dir=None, cache_dir=None)
        if target.model_volume is not None:
            changed = replace(changed, hf_home=home)
        if target.host_network:
            return changed
        return replace(changed, interface=POD_INTERFACE, hca=(), env=common)

    return replace(inventory, nodes=tuple(seen(node) for node in inventory.nodes))


def _common_env(nodes: Sequence[Node]) -> Mapping[str, str]:
    """Return the variables that are equal on all nodes."""
    variables = [set(node.env.items()) for node in nodes]
    return dict(sorted(set.intersection(*variables)))


def _refuse(inventory: Inventory, request: ServeRequest, target: ExportTarget) -> None:
    mistakes = [
        *_server_problems(inventory, request, target),
        *_node_problems(inventory, request, target),
    ]
    if mistakes:
        raise RequestError(
            "cannot export this server for Kubernetes",
            evidence=[problem for problem, _ in mistakes],
            hint="\n".join(dict.fromkeys(hint for _, hint in mistakes)),
        )


def _server_problems(
    inventory: Inventory, request: ServeRequest, target: ExportTarget
) -> Iterator[tuple[str, str]]:
    """Yield the problems of the request, each with a fix."""
    named = target.rdma_resource is not None or inventory.privileged
    if inventory.fabric != "ethernet" and request.placement.networked and not named:
        yield (
            f"`fabric: {inventory.fabric}`: a pod needs RDMA devices as a resource of its node; if"
            " only mounted, the device cgroup blocks them, and NCCL silently uses TCP",
            "pass it: `--rdma-resource NAME` (such as rdma/ib, rdma/rdma_shared_device_a, rdma/hca;"
            " `kubectl describe node NODE` shows it), or `privileged: true` in the inventory",
        )
    if request.balancing != "internal":
        yield (
            f"{request.balancing} load balancing: each replica would need its own Service",
            "omit the --data-parallel-…-lb option, or export a server per node",
        )
    if request.backend == "ray" and request.placement.dp > 1:
        yield (
            "Ray places replicas by address, and pods have none before they start",
            "use vLLM's own ranks: `--kind lws`",
        )


def _node_problems(
    inventory: Inventory, request: ServeRequest, target: ExportTarget
) -> Iterator[tuple[str, str]]:
    """Yield differences of nodes that one template cannot express, each with a fix."""
    nodes, shares = request.rank_nodes(inventory), dict(request.placement.nodes)
    homes = sorted({node.hf_home for node in nodes})
    if len(homes) > 1 and target.model_volume is None:
        yield (
            f"`hf_home` differs between nodes: {', '.join(homes)}",
            "give the pods one volume: `--model-volume pvc:NAME` or `hostPath:/PATH`",
        )
    # KubeRay has a template for each node.
    workers = nodes[1:] if target.kind == "lws" else []
    if len({shares[node.name] for node in workers}) > 1:
        yield (
            "the nodes after the first use different numbers of GPUs",
            "use a layout that is equal on them: `--tp N --pp N`",
        )
    keys = ("env", "interface", "hca") if target.host_network else ()
    different = [key for key in keys if len({str(getattr(node, key)) for node in workers}) > 1]
    if different:
        yield (
            f"the nodes after the first differ in {', '.join(different)}, and their pods come"
            " from one template",
            "omit --host-network: in the pod network, interfaces have equal names",
        )


def list_omissions(group: PodGroup) -> list[str]:
    """Return the settings of the inventory that the manifests leave out."""
    inventory = group.original
    nodes = [node for node in inventory.nodes if node.name in group.shares]
    lines = ["addresses and SSH users of nodes, `docker:`, `state_dir:`, `cache_dir:`"]
    if not group.target.host_network and any(node.interface or node.hca for node in nodes):
        lines.append(
            f"`interface` and `hca`: pods use {POD_INTERFACE} and the devices of their resource"
            " (--host-network keeps them)"
        )
    env = {name for node in nodes for name in node.env} - set(_common_env(nodes))
    if env and not group.target.host_network:
        lines.append(f"`env:` that differs between nodes: {', '.join(sorted(env))}")
    settings = (
        (any(node.gpu_ids for node in nodes), "`gpus:`: a device plugin chooses the GPUs"),
        (inventory.ulimits, "`ulimits:`: pods have none"),
        (inventory.devices and not inventory.privileged, "`devices:`: they need a device plugin"),
        (inventory.logging != Logging(), "`logging:`: the kubelet rotates logs"),
        (
            inventory.serve.bind not in (None, *_ANY),
            "`bind:`: the server listens on its pod's address",
        ),
    )
    return [*lines, *(text for applies, text in settings if applies)]
