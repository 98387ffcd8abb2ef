"""The container that a node would get (`launcher/containers.py`), as a container of a pod with its
rights and probes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher import containers
from launcher.checks.network import transport
from launcher.export import kubernetes_shape as shape
from launcher.export import pod_volumes
from launcher.export.kubernetes_shape import Group, Object
from launcher.model import Argv, Node, Secret
from launcher.plan import network
from launcher.site import Site
from launcher.state.verdict import Ask
from launcher.tools import network as probe
from launcher.tools import payload, vllm
from launcher.tools.docker import ContainerSpec
from launcher.tools.expectations import Expectations

INSTANCE = "app.kubernetes.io/instance"  # the label that all objects of a group carry
# What a pod is told about itself; `$(NAME)` in an argument is the kubelet's to replace.
HOST_IP = "VLLM_HOST_IP"
_FIELDS = {HOST_IP: "status.podIP", "NODE_NAME": "spec.nodeName"}
GRACE = 60  # seconds for a pod to end
_LOOK = 10  # seconds between two looks at a server that has not answered
CANARY, _TRY = 40.0, 60  # seconds for an answer, and for the probe around it
_EVERY = 30  # seconds between two looks at one that has


def labels(group: Group) -> dict[str, str]:
    """Return what all objects of a group carry, and what selects its pods."""
    return {"app.kubernetes.io/name": "vllm", INSTANCE: group.target.name}


def managed(group: Group) -> dict[str, str]:
    """Return the labels of objects."""
    return {**labels(group), "app.kubernetes.io/managed-by": "vlaunch"}


def gpu_resource(group: Group) -> str:
    """Return what a node's device plugin calls its GPUs; empty where the model runs on CPUs."""
    return shape.GPUS.get(group.inventory.accelerator, "")


def serving_spec(group: Group, node: Node, argv: Argv) -> ContainerSpec:
    """Return the container of a node, with another command than on its host."""
    inventory = group.inventory
    secrets = {name: Secret("") for name in group.secrets}
    spec = containers.node_spec(
        Site(inventory), node, inventory.image, secrets, fingerprinted="by reference"
    )
    return replace(spec, command=(f"{containers.PAYLOAD}/entry.sh", *argv))


def serving(
    group: Group,
    node: Node,
    argv: Argv,
    env: Mapping[str, str],
    *,
    ours: Sequence[str],
) -> Object:
    """Return the container that serves; `ours` are words of `argv` in which the kubelet is to put a
    variable.
    """
    spec = serving_spec(group, node, argv)
    spec = replace(spec, env={**spec.env, **shape.told(env)})
    return _container(group, node, "vllm", spec, ours)


def gate_deadline(group: Group) -> float:
    """Return how many seconds the proof of the network may take, with the wait for the others, who
    may come as late as a start may take: images are pulled meanwhile.
    """
    inventory = replace(group.inventory, nodes=group.nodes)
    return network.deadline(inventory, _ask(group)) + group.desired.policy.start_timeout


def _ask(group: Group) -> Ask:
    return Ask(nonce=group.leader, ranks_per_node=min(group.shares.values()))


def gate(group: Group, node: Node, *, rank: str) -> list[Object]:
    """Return the init container that proves the network, or fails; none where there is none.

    Where the others of the group are past theirs, it passes: a pod that comes alone would wait for
    ever.
    """
    if not group.gated:
        return []
    leader = group.leader
    inventory = replace(group.inventory, nodes=group.nodes)
    ask = _ask(group)
    rdma = [each.name for each in group.nodes] if group.target.rdma is not None else []
    level, _ = transport.required(inventory, gpus=(), rdma=rdma, known=Expectations())
    argv = probe.gate(
        rank=rank,
        size=group.size,
        ranks_per_node=network.ranks(inventory, ask),
        master=leader,
        port=inventory.ports.probe,
        backend="gloo" if inventory.accelerator == "cpu" else "nccl",
        require=level,
        nonce=leader,
        deadline=network.deadline(inventory, ask),
        wait=group.desired.policy.start_timeout,
        met=_met(group),
        ending=1.5 * GRACE,
    )
    spec = containers.probe_spec(Site(group.inventory), node, argv)
    spec = replace(spec, command=(f"{containers.PAYLOAD}/entry.sh", *argv))
    return [_container(group, node, "network", spec, (rank, leader))]


def _met(group: Group) -> list[int]:
    """Return the ports of the first pod where what starts behind the gates meets."""
    if group.target.kind == "kuberay":
        return [group.inventory.ports.gcs]
    argv = group.desired.processes[0].argv
    ranks = vllm.values(argv, "--master-port")
    replicas = vllm.values(argv, "--data-parallel-rpc-port")
    # Replicas meet at theirs only while they start.
    return [*map(int, (*ranks, *replicas)), *([group.request.port] if replicas else [])]


def probes(group: Group, *, timeout: float, stuck: float) -> Object:
    """Return the probes of the container with an API: started is answered, ready is what vLLM says,
    and alive is whoever answers or moves (the keeper's rules).
    """
    ports = replace(group.inventory.ports, api=group.request.port)
    host = payload.api_host(group.request.host)
    answered = payload.answered(ports, host, CANARY, group.request.placement.dp)
    return {
        "startupProbe": {
            "exec": {"command": list(answered)},
            "periodSeconds": _LOOK,
            "timeoutSeconds": _TRY,
            "failureThreshold": max(1, math.ceil(timeout / _LOOK)),
        },
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "exec": {"command": list(payload.alive(ports, host, CANARY))},
            "periodSeconds": _EVERY,
            "timeoutSeconds": _TRY,
            "failureThreshold": max(1, math.ceil(stuck / _TRY)),
        },
    }


def port(group: Group, name: str, number: int) -> Object:
    """Return a port of a container."""
    host = {"hostPort": number} if group.target.host_network else {}
    return {"name": name, "containerPort": number, **host}


def ports(group: Group) -> list[Object]:
    """Return the ports of the container with the API."""
    return [port(group, "http", group.request.port)]


def opened(group: Group) -> list[Object]:
    """Return the rule for who else than a group's pods may reach them: pods of any namespace."""
    return [allowed({"namespaceSelector": {}}, group.request.port)]


def allowed(whom: Object, *ports: int) -> Object:
    """Return the rule of a NetworkPolicy that lets somebody reach ports."""
    return {"from": [whom], "ports": [{"port": each, "protocol": "TCP"} for each in ports]}


def found_by(group: Group, selector: Mapping[str, str], number: int) -> Object:
    """Return the Service by which pods are found by name, ready or not."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{group.target.name}{shape.RANKS}", "labels": managed(group)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": dict(selector),
            "ports": [{"name": "ranks", "port": number}],
        },
    }


def template(
    group: Group, nodes: Sequence[Node], made: Sequence[Object], init: Sequence[Object]
) -> Object:
    """Return the template of pods that may run on `nodes`."""
    texts = json.dumps(pod_volumes.payload_files(group), sort_keys=True).encode()
    return {
        "metadata": {
            "labels": labels(group),
            # A change of the programs brings new pods, as one of the rest does.
            "annotations": {"vlaunch.payload": hashlib.sha256(texts).hexdigest()[:12]},
        },
        "spec": pod_spec(group, nodes, made, init),
    }


def pod_spec(
    group: Group, nodes: Sequence[Node], made: Sequence[Object], init: Sequence[Object]
) -> Object:
    """Return the spec of pods that may run on `nodes`, which say where in the host's network."""
    target = group.target
    host = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    ipc = {"hostIPC": True} if group.inventory.shm == "host" else {}
    volumes = pod_volumes.volumes(group, serving_spec(group, nodes[0], ()))
    taints = [{"key": gpu_resource(group), "operator": "Exists", "effect": "NoSchedule"}]
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE,
        **(host if target.host_network else {}),
        **ipc,
        **({"tolerations": taints} if gpu_resource(group) else {}),
        "affinity": _affinity(group, nodes),
        **({"initContainers": list(init)} if init else {}),
        "containers": list(made),
        "volumes": [volume for volume, _ in volumes],
    }


def _affinity(group: Group, nodes: Sequence[Node]) -> Object:
    """Return one pod a node, and, in the host's network, the inventory's own nodes."""
    apart = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "labelSelector": {"matchLabels": labels(group)},
                    "topologyKey": "kubernetes.io/hostname",
                }
            ]
        }
    }
    if not group.target.host_network:
        return apart
    names = [node.name for node in nodes]
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": names}
    pinned = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    return {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": pinned},
        **apart,
    }


def _container(
    group: Group,
    node: Node,
    name: str,
    spec: ContainerSpec,
    ours: Sequence[str],
) -> Object:
    return {
        "name": name,
        "image": spec.image,
        "command": [spec.entrypoint, spec.command[0]],
        "args": [_escaped(word, ours) for word in spec.command[1:]],
        "env": _env(spec.env, ours),
        "securityContext": _rights(spec),
        "resources": _resources(group, group.shares.get(node.name, 0)),
        "volumeMounts": [mount for _, mount in pod_volumes.volumes(group, spec)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _escaped(text: str, ours: Sequence[str]) -> str:
    """Keep the kubelet from replacing anything but variables of ours; of `$$` it makes `$`."""
    if text in ours:
        return text
    return re.sub(r"\${2,}|\$(?=\()", lambda match: 2 * match[0], text)


def _env(env: Mapping[str, str], ours: Sequence[str]) -> list[Object]:
    told = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in _FIELDS.items()
    ]
    plain = [
        {"name": name, "value": _escaped(value, ours)}
        for name, value in sorted(env.items())
        if name not in _FIELDS
    ]
    return [*told, *plain]


def _rights(spec: ContainerSpec) -> Object:
    if spec.privileged:
        return {"privileged": True}
    capabilities = {"capabilities": {"add": list(spec.cap_add)}} if spec.cap_add else {}
    # Kubernetes refuses it beside SYS_ADMIN.
    escalation = {} if "SYS_ADMIN" in spec.cap_add else {"allowPrivilegeEscalation": False}
    unconfined = "seccomp=unconfined" in spec.security
    profile = {"type": "Unconfined" if unconfined else "RuntimeDefault"}
    return {**escalation, **capabilities, "seccompProfile": profile}


def _resources(group: Group, gpus: int) -> Object:
    target, name = group.target, gpu_resource(group)
    limits: Object = {name: gpus} if name else {}
    if target.rdma is not None:
        limits[target.rdma[0]] = target.rdma[1]
    if target.memory is not None:
        limits["memory"] = pod_volumes.quantity(target.memory)
    requests = {**limits, **({"cpu": target.cpus} if target.cpus else {})}
    found = {"limits": limits, "requests": requests}
    return {name: each for name, each in found.items() if each}
