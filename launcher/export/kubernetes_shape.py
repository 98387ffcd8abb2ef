"""What an export for Kubernetes is asked for, and the server that it writes down: the same request,
placement and processes as `serve` would have, with the target's words in the place of addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from launcher.errors import RequestError
from launcher.model import Inventory, Node, RaySettings
from launcher.payload.agent.desired import Desired, Policy
from launcher.plan import wanted
from launcher.plan.request import Request
from launcher.site import Site
from launcher.state.snapshot import ClusterSnapshot

Object = dict[str, Any]
Kind = Literal["lws", "kuberay"]
# A name with what controllers put behind it must stay a DNS label of 63 characters: LWS adds
# `-0-INDEX`, RayJob allows 47 (validation.go of KubeRay 1.7), and we add `-payload`.
LONGEST = 40
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_RESOURCE = re.compile(
    r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
GPUS = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}  # as device plugins call them
# Every pod network calls a pod's interface so, whatever the host's NIC is called.
POD_INTERFACE = "eth0"
# The controller of LeaderWorkerSets puts these first into the environment of every container, so
# that the kubelet replaces them in arguments (pkg/utils/pod/pod_utils.go).
LWS_LEADER, LWS_INDEX = "$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)"
RANKS = "-ranks"  # behind a RayJob's name: the Service by which its pods find the head


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVolume:
    """Where a model's files come from: a claim, or a folder of the nodes."""

    claim: str = ""
    path: str = ""  # below the claim, or on the nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is asked of the manifests beside the server. Sizes are bytes, times seconds."""

    name: str
    namespace: str = ""
    kind: Kind = "lws"
    rdma: tuple[str, int] | None = None
    volume: ModelVolume | None = None
    host_network: bool = False
    memory: int | None = None
    cpus: int | None = None
    gate: bool = True
    disruption_budget: bool = False
    pod_monitor: bool = False

    @property
    def kubectl(self) -> str:
        """The first words of a line that reaches its objects."""
        return f"kubectl -n {self.namespace}" if self.namespace else "kubectl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A server as pods have it: `inventory` as they see it, `original` as it is written, and what
    is not carried over.
    """

    original: Inventory
    inventory: Inventory
    request: Request
    desired: Desired
    target: Target
    left_out: tuple[str, ...] = ()
    shares: Mapping[str, int] = field(default_factory=dict)
    leader: str = ""  # how pods call the first one
    programs: Mapping[str, str] | None = None  # that pods mount, where they are no server's

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes with ranks, the one that ranks meet at first."""
        return tuple(self.request.nodes_with_ranks(self.inventory))

    @property
    def size(self) -> int:
        """How many pods it has."""
        return len(self.nodes)

    @property
    def gated(self) -> bool:
        """True when the pods prove the network first."""
        return self.target.gate and self.request.placement.networked

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets that pods read, sorted."""
        return tuple(sorted(self.original.secrets))


def object_name(text: str) -> str:
    """Return a cluster's name as Kubernetes takes it; raises RequestError where there is no such
    name.
    """
    name = re.sub(r"[._]+", "-", text)
    if _LABEL.fullmatch(name) is None or len(name) > LONGEST:
        raise RequestError(
            f"`{text}` is no name for objects of Kubernetes",
            evidence=(
                f"it should be at most {LONGEST} lower-case letters, digits and `-`, beginning with"
                " a letter (DNS-1035)"
            ),
            hint="choose one: `--name NAME`",
        )
    return name


def namespace(text: str) -> str:
    """Return the name of a namespace; raises RequestError for one that Kubernetes refuses."""
    if re.fullmatch("[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", text) is None:
        raise RequestError(
            f"--namespace should be the name of a namespace, not `{text}`",
            hint="see those that are there: `kubectl get namespaces`",
        )
    return text


def rdma_resource(text: str) -> tuple[str, int]:
    """Read `NAME[=N]`; raises RequestError."""
    name, _, count = text.partition("=")
    if _RESOURCE.fullmatch(name) is None or not re.fullmatch("[1-9][0-9]{0,3}|", count):
        raise RequestError(
            f"--rdma-resource should be a resource such as rdma/ib or rdma/ib=2, not `{text}`",
            hint="see what a node offers: `kubectl describe node NODE`, `Allocatable`",
        )
    if name in GPUS.values():
        raise RequestError(
            f"--rdma-resource should name RDMA devices; `{name}` are GPUs",
            hint="leave it out with `fabric: ethernet` in the inventory",
        )
    return name, int(count or 1)


def model_volume(text: str) -> ModelVolume:
    """Read `pvc:NAME[:/SUB/PATH]` or `hostPath:/PATH`; raises RequestError."""
    kind, _, rest = text.partition(":")
    claim, _, below = rest.partition(":")
    if kind == "pvc" and re.fullmatch(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", claim):
        path = below.strip("/")
        if ".." not in path.split("/"):
            return ModelVolume(claim=claim, path=path)
    if kind == "hostPath" and rest.startswith("/") and ".." not in rest.split("/"):
        return ModelVolume(path=rest)
    raise RequestError(
        f"--model-volume should be pvc:NAME, pvc:NAME:/SUB/PATH or hostPath:/PATH, not `{text}`",
        hint="see the claims of a namespace: `kubectl get persistentvolumeclaims`",
    )


def told(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return what of a process's variables pods have: ranks write NCCL's log to their output, where
    `kubectl logs` finds it.
    """
    return {name: each for name, each in env.items() if name != "NCCL_DEBUG_FILE"}


def group(inventory: Inventory, request: Request, policy: Policy, target: Target) -> Group:
    """Return a server as pods have it.

    Raises RequestError for what cannot be said in Kubernetes, all of it at once.
    """
    _refuse(inventory, request, target)
    # a Service forwards to the pod's address
    request = replace(request, host="0.0.0.0")  # noqa: S104
    taken = {name for name, _ in request.placement.nodes}
    leader = LWS_LEADER if target.kind == "lws" else f"{target.name}{RANKS}"
    seen = _as_pods(inventory, taken, target, leader)
    if request.backend == "mp":
        seen = replace(seen, ray=RaySettings(version="none"))
    else:
        seen = replace(seen, nodes=_only(seen, request))
    if target.rdma is None and not inventory.privileged:
        # Ranks that meet inside of a node need neither the devices nor a right to them.
        seen = replace(seen, fabric="ethernet")
    snapshot = ClusterSnapshot(site=Site(seen))
    return Group(
        original=inventory,
        inventory=seen,
        request=request,
        desired=wanted.desired(snapshot, request, asked=0.0, policy=policy),
        target=target,
        shares=dict(request.placement.nodes),
        left_out=tuple(_left_out(inventory, request, target)),
        leader=leader,
    )


def _as_pods(inventory: Inventory, taken: set[str], target: Target, leader: str) -> Inventory:
    """Return the inventory as pods see it: the first one by its name, in the pod network with its
    interface, and with what is equal on all nodes; a volume lies where the first one has `hf_home`.
    """
    nodes = [node for node in inventory.nodes if node.name in taken]
    common, home = _common_env(nodes), nodes[0].hf_home

    def seen(node: Node) -> Node:
        own = replace(node, ip=leader, state_dir=None, cache_dir=None)
        if target.volume is not None:
            own = replace(own, hf_home=home)
        if target.host_network:
            return own
        return replace(own, interface=POD_INTERFACE, hca=(), env=common)

    return replace(inventory, nodes=tuple(seen(node) for node in inventory.nodes))


def _only(inventory: Inventory, request: Request) -> tuple[Node, ...]:
    """Return the nodes with ranks alone, the first of them the head: there is a pod of no other."""
    nodes = request.nodes_with_ranks(inventory)
    return tuple(replace(node, head=node is nodes[0]) for node in nodes)


def _common_env(nodes: list[Node]) -> Mapping[str, str]:
    first = nodes[0].env
    return {
        name: value
        for name, value in first.items()
        if all(node.env.get(name) == value for node in nodes)
    }


def _refuse(inventory: Inventory, request: Request, target: Target) -> None:
    found = [*_of_server(inventory, request, target), *_of_nodes(inventory, request, target)]
    if found:
        raise RequestError(
            "this server cannot be written for Kubernetes",
            evidence=[wrong for wrong, _ in found],
            hint="\n".join(dict.fromkeys(hint for _, hint in found)),
        )


def _of_server(inventory: Inventory, request: Request, target: Target) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with what is asked for, with what to do."""
    if _needs_rdma(inventory, request, target):
        yield (
            f"`fabric: {inventory.fabric}`: a pod gets RDMA devices as a resource of its node; only"
            " mounted, the device cgroup closes them, and NCCL silently takes TCP",
            "name it: `--rdma-resource NAME` (such as rdma/ib, rdma/rdma_shared_device_a, rdma/hca;"
            " `kubectl describe node NODE` shows it), or `privileged: true` in the inventory",
        )
    if request.balancing != "internal":
        yield (
            f"{request.balancing} load balancing: each replica would need its own Service",
            "leave out the --data-parallel-…-lb option, or export a server per node",
        )
    if request.backend == "ray" and request.placement.dp > 1:
        yield (
            "Ray places replicas by addresses, and pods have none before they run",
            "leave them to vLLM itself: `--kind lws`",
        )


def _needs_rdma(inventory: Inventory, request: Request, target: Target) -> bool:
    """True where ranks would exchange tensors by RDMA, of which nothing is named."""
    named = target.rdma is not None or inventory.privileged
    return inventory.fabric != "ethernet" and request.placement.networked and not named


def _of_nodes(inventory: Inventory, request: Request, target: Target) -> Iterator[tuple[str, str]]:
    """Yield what one template cannot say of several nodes, with what to do."""
    nodes, shares = request.nodes_with_ranks(inventory), dict(request.placement.nodes)
    homes = sorted({node.hf_home for node in nodes})
    if len(homes) > 1 and target.volume is None:
        yield (
            f"`hf_home` differs between nodes: {', '.join(homes)}",
            "give the pods one volume: `--model-volume pvc:NAME` or `hostPath:/PATH`",
        )
    alike, which = nodes[1:], "the nodes behind the first one"
    if target.kind == "kuberay":  # one for each
        alike = []
    if len({shares[node.name] for node in alike}) > 1:
        yield (
            f"{which} take different numbers of GPUs",
            "name a split that is equal on them: `--tp N --pp N`",
        )
    if target.host_network and not _alike(alike):
        yield (
            f"with the host's network {which} must have the same `interface`, `hca` and `env`:"
            " their pods come from one template",
            "leave out --host-network: in the pod network interfaces are called alike",
        )


def _alike(nodes: list[Node]) -> bool:
    return len({(node.interface, node.hca, tuple(sorted(node.env.items()))) for node in nodes}) <= 1


def _left_out(inventory: Inventory, request: Request, target: Target) -> list[str]:
    """Name what the manifests do not say."""
    taken = {name for name, _ in request.placement.nodes}
    nodes = [node for node in inventory.nodes if node.name in taken]
    found = [
        "names, addresses and logins of the nodes, `docker:`, `state_dir:`, `cache_dir:`: pods are"
        " Kubernetes' own; what engines compile is lost with a pod"
    ]
    if not target.host_network:
        words = [f"`{key}`" for key in ("interface", "hca") if any(getattr(n, key) for n in nodes)]
        if words:
            found.append(
                f"{' and '.join(words)} of `network:`: pods see {POD_INTERFACE}, and the devices"
                " that their resource brings (--host-network keeps them)"
            )
        common = _common_env(nodes)
        own = sorted({name for node in nodes for name in node.env if name not in common})
        if own:
            found.append(f"`env:` that differs between nodes: {', '.join(own)}")
    if any(node.gpu_ids for node in nodes):
        found.append("which GPUs of a node: its device plugin chooses")
    if inventory.ulimits:
        found.append(f"`ulimits:` ({', '.join(sorted(inventory.ulimits))}): a pod has none")
    if inventory.devices and not inventory.privileged:
        found.append(f"`devices:` ({', '.join(inventory.devices)}): they need a device plugin")
    if inventory.logging.driver or inventory.logging.options:
        found.append("`logging:`: the kubelet rotates logs")
    if inventory.serve.bind not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        found.append(f"`bind: {inventory.serve.bind}`: the server listens on its pod's address")
    return found
