"""A server as files for docker compose (v2), one for each node, beside the programs and the server
that they mount.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from launcher import containers
from launcher.export import hosts, proof, yaml_text
from launcher.export.hosts import Cluster
from launcher.export.kubernetes_shape import Object, object_name
from launcher.model import ExistingMount, Mount, Node
from launcher.tools import docker, ray
from launcher.tools.docker import ContainerSpec

ENDING = ".compose.yaml"
_GRACE = 45  # seconds for the agent to end its engine
_LOOK, _TRY = 15, 60  # seconds between two looks at a server, and for one
WHY: Mapping[str, str] = {
    "network_mode: host": "ranks take ports that the kernel chooses",
    "healthcheck:": "healthy is who has answered, and then who answers or moves",
    "stop_grace_period: 45s": "a rank without an API ignores the polite signal",
}


def texts(made: Cluster) -> Mapping[str, str]:
    """Return the file of each node, and those that all have beside theirs, by name."""
    own = {f"{node.name}{ENDING}": _text(made, node) for node in made.nodes}
    return {**own, **hosts.files(made)}


def _text(made: Cluster, node: Node) -> str:
    header = yaml_text.comment(_header(made, node))
    return header + yaml_text.dump([_document(made, node)], WHY)


def _document(made: Cluster, node: Node) -> Object:
    served = _service(hosts.spec(made, node), node, made)
    if node.head:
        server = Mount(source=f"./{hosts.SERVER_FILE}", target=hosts.SERVER, read_only=True)
        served["volumes"].append(_bind(server))
    services = {"vllm": served}
    if made.gated and node in made.request.nodes_with_ranks(made.inventory):
        gate = _service(hosts.gate_spec(made, node), node, made)
        gate = {**gate, "restart": "no"}
        # Both may not have the GPUs at once, and a server behind a bad network would only hang.
        passed = {"network": {"condition": "service_completed_successfully"}}
        services = {"network": gate, "vllm": {**served, "depends_on": passed}}
    if hosts.answers(made, node):
        services["vllm"] = {**services["vllm"], "healthcheck": _health(made)}
    return {
        "name": f"vlaunch-{object_name(made.original.cluster)}",
        "services": services,
        "volumes": {"server": {}, "compiled": {}},
        "secrets": {name: {"file": f"./secrets/{name}"} for name in made.secrets},
    }


def _service(spec: ContainerSpec, node: Node, made: Cluster) -> Object:
    """Return a container as a service; only what it has is said."""
    targets = [each.target for each in spec.mounts]
    secrets = made.secrets if containers.SECRETS in targets else ()
    said: Object = {
        "container_name": spec.name,
        "image": spec.image,
        "entrypoint": [spec.entrypoint],
        "command": [_escaped(word) for word in spec.command],
        "network_mode": "host",
        "restart": spec.restart,
        "stop_grace_period": f"{_GRACE}s",
        "privileged": spec.privileged,
        **_shared_memory(spec),
        "deploy": _gpus(spec, node),
        "devices": [_device(each) for each in spec.devices],
        "cap_add": list(spec.cap_add),
        "group_add": list(spec.groups),
        "security_opt": list(spec.security),
        "ulimits": {name: _limit(each) for name, each in sorted(spec.ulimits.items())},
        "logging": _logging(spec),
        "environment": {name: _escaped(each) for name, each in sorted(spec.env.items())},
        "labels": _labels(spec),
        "volumes": [volume for each in spec.mounts if (volume := _volume(each))],
        "secrets": [{"source": each, "target": f"{containers.SECRETS}/{each}"} for each in secrets],
    }
    return {name: each for name, each in said.items() if each}


def _shared_memory(spec: ContainerSpec) -> Object:
    if spec.shm == "host":
        return {"ipc": "host"}
    if spec.shm == "private":
        return {"ipc": "private", "tmpfs": ["/dev/shm"]}
    return {"shm_size": spec.shm}


def _gpus(spec: ContainerSpec, node: Node) -> Object:
    if not spec.gpus:
        return {}
    which = {"device_ids": list(node.gpu_ids)} if node.gpu_ids else {"count": node.gpus}
    device = {"driver": "nvidia", **which, "capabilities": ["gpu"]}
    return {"resources": {"reservations": {"devices": [device]}}}


def _device(text: str) -> str:
    """Return a device as compose reads it: with its place in the container."""
    return f"{text}:{text}" if text.startswith("/") and ":" not in text else text


def _limit(text: str) -> int | Object:
    soft, colon, hard = text.partition(":")
    return {"soft": int(soft), "hard": int(hard)} if colon else int(text)


def _logging(spec: ContainerSpec) -> Object:
    driver = {"driver": spec.log_driver} if spec.log_driver else {}
    options = {"options": dict(sorted(spec.log_options.items()))} if spec.log_options else {}
    return {**driver, **options}


def _labels(spec: ContainerSpec) -> Object:
    return {docker.CLUSTER: spec.cluster, docker.ROLE: spec.role, docker.NODE: spec.node}


def _volume(mount: Mount) -> Object | None:
    """Return a mount; secrets come another way, and what containers write down for
    themselves lies in volumes of theirs.
    """
    named = {containers.SERVERS: "server", containers.COMPILED: "compiled"}
    if mount.target == containers.SECRETS:
        return None
    if mount.target == containers.PAYLOAD:
        return _bind(replace(mount, source=f"./{hosts.PROGRAMS}"))
    if mount.target in named:
        return {"type": "volume", "source": named[mount.target], "target": mount.target}
    return _bind(mount)


def _bind(mount: Mount) -> Object:
    found: Object = {"type": "bind", "source": mount.source, "target": mount.target}
    if mount.read_only:
        found["read_only"] = True
    # What is brought along must be there: Docker would make an empty folder.
    must = isinstance(mount, ExistingMount) or mount.source.startswith(".")
    return {**found, "bind": {"create_host_path": not must}}


def _health(made: Cluster) -> Object:
    policy = made.desired.policy
    return {
        "test": ["CMD", *(_escaped(word) for word in hosts.alive(made))],
        "interval": f"{_LOOK}s",
        "timeout": f"{_TRY}s",
        "retries": max(1, math.ceil(policy.stuck / _TRY)),
        "start_period": f"{policy.start_timeout:.0f}s",
    }


def _escaped(text: str) -> str:
    """Keep compose from putting variables in."""
    return text.replace("$", "$$")


def _header(made: Cluster, node: Node) -> list[str]:
    request = made.request
    file = f"{node.name}{ENDING}"
    others = [each.name for each in made.nodes if each is not node]
    return [
        f"{request.model} on the cluster `{made.original.cluster}`: {request.placement.words}; this"
        f" is {node.name} ({node.ip}){', the head' if node.head else ''}.",
        "Made by `vlaunch export compose`; the same inventory gives the same text.",
        "",
        f"{node.name} must have:",
        f"- {hosts.PROGRAMS}/ and {hosts.SERVER_FILE} beside this file (`-o DIR` writes all)",
        "- docker compose 2.24 or newer" + _runtime(made),
        f"- the image {made.inventory.image}",
        f"- the model in {node.hf_home}, or a way to Hugging Face",
        *_secrets(made),
        "",
        f"Start it{' at about the same time as ' + ', '.join(others) if others else ''}:",
        f"  docker compose -f {file} up --detach --wait",
        *(_prove(made) if hosts.answers(made, node) else ()),
        f"Why not: docker compose -f {file} logs --no-color | vlaunch doctor --from -",
        f"Its end: docker compose -f {file} down --volumes",
        "",
        "Not carried over:",
        *(f"- {each}" for each in hosts.left_out(made)),
        "- `state_dir:`, `cache_dir:`: volumes of compose's own",
        "",
    ]


def _prove(made: Cluster) -> list[str]:
    return [
        "which ends when the server has answered. Prove it:",
        f"  {proof.chat(hosts.url(made), made.request, made.original)}",
    ]


def _runtime(made: Cluster) -> str:
    kinds = {"nvidia": ", and NVIDIA's container toolkit", "amd": ", and AMD's driver", "cpu": ""}
    return kinds[made.inventory.accelerator]


def _secrets(made: Cluster) -> list[str]:
    return [
        "- the secrets, a file each of mode 0600 beside this one, the same on all nodes:",
        f"    secrets/{ray.TOKEN}: `openssl rand -hex 32`, by which the nodes know each other",
        *(f"    secrets/{name}" for name in made.secrets if name != ray.TOKEN),
    ]
