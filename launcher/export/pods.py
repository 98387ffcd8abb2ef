"""The container that a node would get (`launcher/containers.py`), as a container of a pod with its
volumes and rights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from launcher import containers
from launcher.checks.network import transport
from launcher.export import programs
from launcher.export.kubernetes_shape import Group
from launcher.model import Argv, Mount, Node, Secret
from launcher.plan import network
from launcher.site import Site
from launcher.state.verdict import Ask
from launcher.tools import network as probe
from launcher.tools import payload
from launcher.tools.docker import ContainerSpec
from launcher.tools.expectations import Expectations

Object = dict[str, Any]
PAYLOAD, SECRETS, SHM = "payload", "secrets", "shm"
_DEVICES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
# What a pod is told about itself; `$(NAME)` in an argument is the kubelet's to replace.
HOST_IP = "VLLM_HOST_IP"
_FIELDS = {HOST_IP: "status.podIP", "NODE_NAME": "spec.nodeName"}
# vLLM's ranks write NCCL's log to their output, where `kubectl logs` finds it.
_NOT_TOLD = ("NCCL_DEBUG_FILE",)
GRACE = 60  # seconds for a pod to end
_LOOK = 10  # seconds between two looks at a server that has not answered
_CANARY, _TRY = 40.0, 60  # seconds for an answer, and for the probe around it
_EVERY = 30  # seconds between two looks at one that has
_SHM = 16 << 30  # bytes of /dev/shm where the inventory names no size: a share of the node's memory
_READ_ONLY, _EXECUTABLE = 0o400, 0o555


def labels(group: Group) -> dict[str, str]:
    """Return what all objects of a group carry, and what selects its pods."""
    return {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": group.target.name}


def gpu_resource(group: Group) -> str:
    """Return what a node's device plugin calls its GPUs; empty where the model runs on CPUs."""
    return _DEVICES.get(group.inventory.accelerator, "")


def serving_spec(group: Group, node: Node, argv: Argv) -> ContainerSpec:
    """Return the container of a node, with another command than on its host."""
    inventory = group.inventory
    secrets = {name: Secret("") for name in secret_names(group)}
    spec = containers.node_spec(
        Site(inventory), node, inventory.image, secrets, fingerprinted="by reference"
    )
    return replace(spec, command=(f"{containers.PAYLOAD}/entry.sh", *argv))


def secret_names(group: Group) -> tuple[str, ...]:
    """Return the secrets that a group's pods read, sorted."""
    return tuple(sorted(group.original.secrets))


def serving(
    group: Group, node: Node, argv: Argv, env: Mapping[str, str], *, ours: Sequence[str]
) -> Object:
    """Return the container that serves; `ours` are the words of `argv` in which the kubelet is to
    put a variable.
    """
    spec = serving_spec(group, node, argv)
    told = {**spec.env, **{name: each for name, each in env.items() if name not in _NOT_TOLD}}
    return _container(group, node, "vllm", replace(spec, env=told), ours)


def gate(group: Group, node: Node, *, rank: str, leader: str, wait: float) -> Object:
    """Return the init container that proves the network, or fails.

    The others of the group may come `wait` seconds later: images are pulled meanwhile.
    """
    inventory = replace(group.inventory, nodes=group.nodes)
    ask = Ask(nonce=leader, ranks_per_node=min(group.shares.values()))
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
        wait=wait,
    )
    spec = containers.probe_spec(Site(group.inventory), node, argv)
    spec = replace(spec, command=(f"{containers.PAYLOAD}/entry.sh", *argv))
    return _container(group, node, "network", spec, (rank, leader))


def probes(group: Group, *, timeout: float, stuck: float) -> Object:
    """Return the probes of the container with an API: started is answered, ready is what vLLM says,
    and alive is whoever answers or moves (the keeper's rules).
    """
    ports = replace(group.inventory.ports, api=group.request.port)
    host = payload.api_host(group.request.host)
    answered = payload.answered(ports, host, _CANARY, group.request.placement.dp)
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
            "exec": {"command": list(payload.alive(ports, host, _CANARY))},
            "periodSeconds": _EVERY,
            "timeoutSeconds": _TRY,
            "failureThreshold": max(1, math.ceil(stuck / _TRY)),
        },
    }


def port(group: Group) -> Object:
    """Return the API's port of a container."""
    number = group.request.port
    host = {"hostPort": number} if group.target.host_network else {}
    return {"name": "http", "containerPort": number, **host}


def pod_spec(
    group: Group, nodes: Sequence[Node], made: Sequence[Object], init: Sequence[Object]
) -> Object:
    """Return the spec of pods that may run on `nodes`, which say where in the host's network."""
    target = group.target
    host = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    ipc = {"hostIPC": True} if group.inventory.shm == "host" else {}
    volumes = _volumes(group, serving_spec(group, nodes[0], ()))
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


def payload_files(group: Group) -> Mapping[str, str]:
    """Return the programs that the pods mount, by path."""
    gate = programs.GATE if gated(group) else ()
    return programs.needed((*programs.SERVING, *gate))


def gated(group: Group) -> bool:
    """True when the pods prove the network first."""
    return group.target.gate and group.request.placement.networked


def key(path: str) -> str:
    """Return the key of a file in a ConfigMap, which has no folders."""
    return path.replace("/", "__")


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
    group: Group, node: Node, name: str, spec: ContainerSpec, ours: Sequence[str]
) -> Object:
    return {
        "name": name,
        "image": spec.image,
        "command": [spec.entrypoint, spec.command[0]],
        "args": [word if word in ours else _escaped(word) for word in spec.command[1:]],
        "env": _env(spec.env),
        "securityContext": _rights(spec),
        "resources": _resources(group, group.shares.get(node.name, 0)),
        "volumeMounts": [mount for _, mount in _volumes(group, spec)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _escaped(text: str) -> str:
    """Keep the kubelet from replacing what is meant as it stands."""
    return text.replace("$(", "$$(")


def _env(env: Mapping[str, str]) -> list[Object]:
    told = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in _FIELDS.items()
    ]
    plain = [
        {"name": name, "value": _escaped(value)}
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
        limits["memory"] = quantity(target.memory)
    requests = {**limits, **({"cpu": target.cpus} if target.cpus else {})}
    found = {"limits": limits, "requests": requests}
    return {name: each for name, each in found.items() if each}


def quantity(size: int) -> str:
    """Return bytes as Kubernetes writes them."""
    for unit, power in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def _volumes(group: Group, spec: ContainerSpec) -> list[tuple[Object, Object]]:
    """Return the volumes of a container with where each is mounted."""
    found = [made for each in _mounts(group, spec) if (made := _volume(group, each)) is not None]
    if spec.shm != "host":
        found.append(_shared_memory(group, spec))
    if spec.privileged:
        found += [
            _on_node(f"device-{at}", Mount(source=device, target=device), kind)
            for at, (device, kind) in enumerate(_devices(spec))
        ]
    return found


def _devices(spec: ContainerSpec) -> list[tuple[str, str]]:
    """Return the devices that a privileged container mounts, with what each is."""
    plain = [each.partition(":")[0] for each in spec.devices if each.startswith("/")]
    folders = ("/dev/infiniband", "/dev/dri")
    return [(each, "Directory" if each in folders else "CharDevice") for each in plain]


def _mounts(group: Group, spec: ContainerSpec) -> list[Mount]:
    """Return the mounts, with one for the model's volume where the inventory has none there."""
    at = model_at(group)
    mounts = list(spec.mounts)
    if group.target.volume is not None and at not in [each.target for each in mounts]:
        mounts.append(Mount(source=at, target=at, read_only=True))
    return mounts


def model_at(group: Group) -> str:
    """Return where the model's files are mounted: a model with a path lies in the mount that holds
    it, or else in the folder around it; any other in the Hugging Face cache.
    """
    model, node = group.request.model, group.nodes[0]
    if not model.startswith("/"):
        return node.hf_home
    path = PurePosixPath(model)
    for target in (node.hf_home, *(each.target for each in group.inventory.mounts)):
        if path.is_relative_to(target):
            return target
    return str(path.parent)


def _volume(group: Group, mount: Mount) -> tuple[Object, Object] | None:
    name, volume = group.target.name, group.target.volume
    if mount.target == containers.PAYLOAD:
        items = [{"key": key(path), "path": path} for path in payload_files(group)]
        source = {"name": f"{name}-payload", "defaultMode": _EXECUTABLE, "items": items}
        return _mounted("payload", {"configMap": source}, mount)
    if mount.target == containers.SECRETS:
        if not secret_names(group):
            return None
        source = {"secretName": f"{name}-secrets", "defaultMode": _READ_ONLY}
        return _mounted("secrets", {"secret": source}, mount)
    if mount.target == containers.SERVERS:
        return None
    if mount.target == containers.COMPILED:
        return _mounted("compiled", {"emptyDir": {}}, mount)
    if volume is not None and mount.target == model_at(group):
        return _model(group, mount)
    if volume is not None and mount.target == group.nodes[0].hf_home:
        # The model lies elsewhere; what is fetched beside it needs a place to be written.
        return _mounted("hf-home", {"emptyDir": {}}, mount)
    if mount.target == group.nodes[0].hf_home:
        return _on_node("hf-home", mount, "DirectoryOrCreate")
    return _on_node(_slug(mount.target), mount, "DirectoryOrCreate")


def _model(group: Group, mount: Mount) -> tuple[Object, Object]:
    volume = group.target.volume
    cache = mount.target == group.nodes[0].hf_home
    offline = group.nodes[0].env.get("HF_HUB_OFFLINE") == "1"
    where = replace(mount, read_only=mount.read_only or not cache or offline)
    if volume is not None and volume.claim:
        claim = {"claimName": volume.claim, **({"readOnly": True} if where.read_only else {})}
        made, at = _mounted("model", {"persistentVolumeClaim": claim}, where)
        return made, {**at, **({"subPath": volume.path} if volume.path else {})}
    source = volume.path if volume is not None else mount.source
    return _on_node("model", replace(where, source=source), "Directory")


def _slug(path: str) -> str:
    """Return a path as the name of a volume."""
    return "mount-" + re.sub("[^a-z0-9]+", "-", path.lower()).strip("-")[:50].rstrip("-")


def _on_node(name: str, mount: Mount, kind: str) -> tuple[Object, Object]:
    return _mounted(name, {"hostPath": {"path": mount.source, "type": kind}}, mount)


def _shared_memory(group: Group, spec: ContainerSpec) -> tuple[Object, Object]:
    size = spec.shm if isinstance(spec.shm, int) else _SHM
    if not isinstance(spec.shm, int) and group.target.memory is not None:
        size = min(size, group.target.memory // 2 >> 20 << 20 or size)
    memory = {"medium": "Memory", "sizeLimit": quantity(size)}
    return _mounted("shm", {"emptyDir": memory}, Mount(source="", target="/dev/shm"))


def _mounted(name: str, source: Object, mount: Mount) -> tuple[Object, Object]:
    at = {"name": name, "mountPath": mount.target}
    return {"name": name, **source}, {**at, "readOnly": True} if mount.read_only else at
