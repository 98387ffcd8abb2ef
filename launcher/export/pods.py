"""Pods of a group: the container that a node would get (`tools/containers.py`), with the volumes,
rights and resources of Kubernetes.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import PurePosixPath

from launcher.core.domain import Argv, Mount, Node, Secret
from launcher.core.expectations import Expectations, required_level
from launcher.export.group import LWS_INDEX, LWS_LEADER, RAY_HEAD, Object, PodGroup
from launcher.export.target import GPUS
from launcher.network import archive, network_plan
from launcher.network.network_shape import CheckOptions
from launcher.tools import containers
from launcher.tools.docker import ContainerSpec
from launcher.tools.site import Site

INSTANCE = "app.kubernetes.io/instance"  # the label that all objects of a group carry
HOST_IP = "VLLM_HOST_IP"
# Expanded by the pod's shell.
_VARIABLES = (LWS_LEADER, LWS_INDEX, RAY_HEAD, f"${HOST_IP}")
_SHM = 16 << 30  # bytes of /dev/shm where the inventory names no size: a share of the node's memory
_WIDTH = 84
# Docker's way to secrets, and KubeRay's own settings.
_OMITTED = ("HF_TOKEN_PATH", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", HOST_IP)

# Secrets are files, so that no description of a container shows a value; vLLM reads variables. The
# kubelet would replace `$(…)`.
_EXPORT = f'for file in {containers.SECRETS}/*; do export "${{file##*/}}=`cat $file`"; done\n'


def labels(group: PodGroup) -> dict[str, str]:
    """Return the labels of all objects of a group, which select its pods."""
    return {"app.kubernetes.io/name": "vllm", INSTANCE: group.target.name}


def metadata(group: PodGroup, suffix: str = "") -> Object:
    """Return the name, namespace and labels of an object."""
    target = group.target
    space = {"namespace": target.namespace} if target.namespace else {}
    managed = {**labels(group), "app.kubernetes.io/managed-by": "vlaunch"}
    return {"name": f"{target.name}{suffix}", **space, "labels": managed}


def gpu_resource(group: PodGroup) -> str:
    """Return the device plugin's name for the GPUs; empty if the model runs on CPUs."""
    return GPUS.get(group.inventory.accelerator, "")


def shell_script(argv: Argv) -> str:
    """Return a command in shell syntax, broken before options and behind `--`."""
    lines, line, before = list[str](), "", ""
    for argument in argv:
        variable = argument in _VARIABLES or argument.startswith("$((LWS_WORKER_INDEX")
        quoted = f'"{argument}"' if variable else shlex.quote(argument)
        full = argument.startswith("-") and len(line) + len(quoted) > _WIDTH
        if before == "--" or full:
            lines.append(f"{line} \\")
            line = " "
        line, before = f"{line} {quoted}" if line else quoted, argument
    return "\n".join([*lines, line])


def gate_deadline(group: PodGroup) -> float:
    """Return the time limit of the network check in seconds, including the wait for all pods, whose
    image pulls may take as long as a start.
    """
    inventory = replace(group.inventory, nodes=group.nodes)
    return (
        network_plan.probe_deadline(inventory, CheckOptions(nonce=""))
        + group.desired.policy.start_timeout
    )


def gate_argv(group: PodGroup, rank: str, master: str) -> Argv:
    """Return the network check that runs before a command, up to the `--` before that command;
    empty without a check.
    """
    if not group.gated:
        return ()
    inventory = replace(group.inventory, nodes=group.nodes)
    rdma = [node.name for node in group.nodes] if group.target.rdma_resource is not None else []
    level, _ = required_level(inventory, gpus=(), rdma=rdma, expectations=Expectations())
    wait = group.desired.policy.start_timeout
    options = {
        "--rank": rank,
        "--size": str(group.size),
        "--master": master,
        "--port": str(inventory.ports.probe),
        "--nonce": group.target.name,
        "--ranks-per-node": str(min(group.shares.values())),
        "--backend": "gloo" if inventory.accelerator == "cpu" else "nccl",
        "--require": level,
        "--wait": f"{wait:g}",
        "--deadline": f"{gate_deadline(group) - wait:g}",
    }
    program = f"{containers.PAYLOAD}/{archive.NAME}"
    return ("python3", program, *chain.from_iterable(options.items()), "--")


def pod_template(
    group: PodGroup,
    nodes: Sequence[Node],
    commands: str,
    env: Mapping[str, str],
    fields: Mapping[str, object],
) -> Object:
    """Return the template of pods for `nodes`, with a container that runs shell commands and has
    the additional fields.
    """
    target, spec = group.target, _container_spec(group, nodes[0])
    volumes = _volumes(group, spec)
    host = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    taint = {"key": gpu_resource(group), "operator": "Exists", "effect": "NoSchedule"}
    container = {
        "name": "vllm",
        "image": spec.image,
        "command": ["/bin/sh", "-c"],
        "args": [f"{_escaped(_EXPORT + commands if group.secrets else commands)}\n"],
        "env": _env({**spec.env, **env}),
        "securityContext": _rights(spec),
        "resources": _resources(group, group.shares.get(nodes[0].name, 0)),
        "volumeMounts": [mount for _, mount in volumes],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **fields,
    }
    pod_spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **(host if target.host_network else {}),
        **({"hostIPC": True} if group.inventory.shm == "host" else {}),
        **({"tolerations": [taint]} if gpu_resource(group) else {}),
        "affinity": _affinity(group, nodes),
        "containers": [{name: field for name, field in container.items() if field}],
        "volumes": [volume for volume, _ in volumes],
    }
    return {"metadata": {"labels": labels(group)}, "spec": pod_spec}


def model_mount_path(group: PodGroup) -> str:
    """Return the mount of the model's files: for a path, the mount around it, else its parent
    folder; else the Hugging Face cache.
    """
    model, node = group.request.model, group.nodes[0]
    if not model.startswith("/"):
        return node.hf_home
    path = PurePosixPath(model)
    for place in (node.hf_home, *(mount.target for mount in group.inventory.mounts)):
        if path.is_relative_to(place):
            return place
    return str(path.parent)


def reads_only(group: PodGroup) -> bool:
    """True if pods only read the model's volume; an online Hugging Face cache is written."""
    cache = model_mount_path(group) == group.nodes[0].hf_home
    return not cache or group.nodes[0].env.get("HF_HUB_OFFLINE") == "1"


def _container_spec(group: PodGroup, node: Node) -> ContainerSpec:
    """Return the container of a node."""
    inventory = group.inventory
    secrets = {name: Secret("") for name in group.secrets}
    return containers.node_spec(
        Site(inventory), node, inventory.image, secrets, fingerprinted="by reference"
    )


def _affinity(group: PodGroup, nodes: Sequence[Node]) -> Object:
    """Return the rule for one pod per node, and, in the host network, the inventory's nodes."""
    key = "kubernetes.io/hostname"
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    apart = {"labelSelector": {"matchLabels": labels(group)}, "topologyKey": key}
    affinity = {"podAntiAffinity": {required: [apart]}}
    if not group.target.host_network:
        return affinity
    term = {"key": key, "operator": "In", "values": [node.name for node in nodes]}
    pinned = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    return {"nodeAffinity": {required: pinned}, **affinity}


def _escaped(text: str) -> str:
    """Escape `$`: the kubelet expands `$(NAME)`, and reads `$$` as `$`."""
    return re.sub(r"\${2,}|\$(?=\()", lambda match: 2 * match[0], text)


def _env(env: Mapping[str, str]) -> list[Object]:
    address = {"name": HOST_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    plain = [
        {"name": name, "value": _escaped(value)}
        for name, value in sorted(env.items())
        # Caches of compiled code are lost with a pod; ranks write NCCL's log to their output.
        if name not in (*_OMITTED, "NCCL_DEBUG_FILE") and not value.startswith(containers.COMPILED)
    ]
    return [address, *plain]


def _rights(spec: ContainerSpec) -> Object:
    if spec.privileged:
        return {"privileged": True}
    capabilities = {"capabilities": {"add": list(spec.cap_add)}} if spec.cap_add else {}
    # Kubernetes refuses it beside SYS_ADMIN.
    escalation = {} if "SYS_ADMIN" in spec.cap_add else {"allowPrivilegeEscalation": False}
    profile = "Unconfined" if "seccomp=unconfined" in spec.security else "RuntimeDefault"
    return {**escalation, **capabilities, "seccompProfile": {"type": profile}}


def _resources(group: PodGroup, gpus: int) -> Object:
    target, name = group.target, gpu_resource(group)
    limits: Object = {name: gpus} if name else {}
    if target.rdma_resource is not None:
        limits[target.rdma_resource[0]] = target.rdma_resource[1]
    if target.memory is not None:
        limits["memory"] = _quantity(target.memory)
    requests = {**limits, **({"cpu": target.cpus} if target.cpus else {})}
    resources = {"limits": limits, "requests": requests}
    return {name: amounts for name, amounts in resources.items() if amounts}


def _quantity(size: int) -> str:
    """Format bytes for Kubernetes."""
    for unit, power in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def _volumes(group: PodGroup, spec: ContainerSpec) -> list[tuple[Object, Object]]:
    """Return the volumes of a container, each with its mount."""
    volumes = [_volume(group, mount) for mount in _mounts(group, spec)]
    if group.gated or group.batch:
        program = {"configMap": {"name": f"{group.target.name}-programs"}}
        mount = Mount(source="", target=containers.PAYLOAD, read_only=True)
        volumes.insert(0, _mounted_volume("programs", program, mount))
    if spec.shm != "host":
        volumes.append(_shared_memory(group, spec))
    if group.secrets:
        source = {"secret": {"secretName": f"{group.target.name}-secrets"}}
        mount = Mount(source="", target=containers.SECRETS, read_only=True)
        volumes.append(_mounted_volume("secrets", source, mount))
    return volumes


def _mounts(group: PodGroup, spec: ContainerSpec) -> list[Mount]:
    """Return the mounts, with one for the model's volume if the inventory has none there."""
    reserved = (containers.PAYLOAD, containers.SECRETS, containers.SERVERS, containers.COMPILED)
    mounts = [mount for mount in spec.mounts if mount.target not in reserved]
    mount_path = model_mount_path(group)
    if group.target.model_volume is not None and mount_path not in [
        mount.target for mount in mounts
    ]:
        mounts.append(Mount(source=mount_path, target=mount_path, read_only=True))
    return mounts


def _volume(group: PodGroup, mount: Mount) -> tuple[Object, Object]:
    volume, home = group.target.model_volume, group.nodes[0].hf_home
    if volume is not None and mount.target == model_mount_path(group):
        model = replace(mount, read_only=mount.read_only or reads_only(group))
        if not volume.claim:
            return _host_volume("model", replace(model, source=volume.path), "Directory")
        claim = {"claimName": volume.claim, **({"readOnly": True} if model.read_only else {})}
        source, mounted = _mounted_volume("model", {"persistentVolumeClaim": claim}, model)
        return source, {**mounted, **({"subPath": volume.path} if volume.path else {})}
    if mount.target == home and volume is not None:
        # The model is elsewhere; other downloads need a writable folder.
        return _mounted_volume("hf-home", {"emptyDir": {}}, mount)
    path = re.sub("[^a-z0-9]+", "-", mount.target.lower()).strip("-")
    name = "hf-home" if mount.target == home else f"mount-{path}"[:50].rstrip("-")
    return _host_volume(name, mount, "DirectoryOrCreate")


def _host_volume(name: str, mount: Mount, kind: str) -> tuple[Object, Object]:
    return _mounted_volume(name, {"hostPath": {"path": mount.source, "type": kind}}, mount)


def _shared_memory(group: PodGroup, spec: ContainerSpec) -> tuple[Object, Object]:
    size = spec.shm if isinstance(spec.shm, int) else _SHM
    if not isinstance(spec.shm, int) and group.target.memory is not None:
        size = min(size, group.target.memory // 2 >> 20 << 20 or size)
    memory = {"medium": "Memory", "sizeLimit": _quantity(size)}
    return _mounted_volume("shm", {"emptyDir": memory}, Mount(source="", target="/dev/shm"))


def _mounted_volume(name: str, source: Object, mount: Mount) -> tuple[Object, Object]:
    mounted = {"name": name, "mountPath": mount.target}
    return {"name": name, **source}, {**mounted, "readOnly": True} if mount.read_only else mounted
