"""From an inventory, a line of `scripts/run_cluster.sh` for each node, and the command that serves:
what is done by hand on machines that the launcher cannot log in to.

Pure. A container is what `vlaunch up` would start: options of `docker run` that the script does not
know by itself are the difference between the node's container and one without the inventory's own
settings.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields, replace

from launcher import containers
from launcher.errors import RequestError
from launcher.model import Argv, Inventory, Logging, Node, Ports
from launcher.site import Site
from launcher.tools import docker, ray

SCRIPT = "scripts/run_cluster.sh"
_TOKEN = "~/ray-token"  # noqa: S105 - where it is, on a worker
# Of ranks of vLLM and of copies, which the script does not start.
NOT_TOLD = {"api", "mp_master", "dp_rpc", "probe", "copy"}
_BARE = {"--detach", "--privileged"}  # options of `docker run` without a value


def text(inventory: Inventory, serve: Argv) -> str:
    """Return a shell script to read and to run piece by piece; `serve` is vLLM's command.

    Raises RequestError for what the script cannot do.
    """
    _refuse(inventory)
    head = inventory.head
    return "\n".join(
        [
            f"# Cluster `{inventory.cluster}` by hand: a line for each node, the head's first.",
            f"# Each node needs Docker, bash 4, and {SCRIPT} with launcher/payload beside it;",
            f"# the image needs Ray {inventory.ray.version}, which `vlaunch up` would add to it.",
            *(f"# Not carried over: {each}." for each in _left_out(inventory)),
            *(f"# Before: export {name}=…" for name in inventory.secrets),
            *_nodes(inventory),
            "",
            f"# All of them have joined when this says so, on {head.name}:",
            f"docker exec {_container(inventory, head)} ray status",
            "",
            f"# The server, on {head.name}; `vlaunch serve` from elsewhere keeps one alive.",
            shlex.join(
                ("docker", "exec", _container(inventory, head), f"{containers.PAYLOAD}/entry.sh")
            )
            + f" {shlex.join(serve)}",
            "",
            "# The end, on every node:",
            f"{SCRIPT} --cluster {inventory.cluster} --stop",
            "",
        ]
    )


def line(inventory: Inventory, node: Node) -> str:
    """Return the line for one node."""
    return " ".join(
        each if each == _TOKEN else shlex.quote(each) for each in words(inventory, node)
    )


def words(inventory: Inventory, node: Node) -> Argv:
    """Return the words of the line for one node."""
    role = "--head" if node.head else "--worker"
    return (
        SCRIPT,
        *_before(inventory, node),
        inventory.image,
        inventory.head.ip,
        role,
        node.hf_home,
        *_after(inventory, node),
    )


def _nodes(inventory: Inventory) -> Iterator[str]:
    for node in (inventory.head, *inventory.workers):
        yield ""
        if not node.head:
            state = inventory.head.state_dir or "~/.vlaunch"
            token = f"{state}/{inventory.cluster}/secrets/{ray.TOKEN}"
            if node is inventory.workers[0]:
                yield f"# The head's token, to each worker: scp -p {token} WORKER:ray-token"
        yield f"# {node.name} ({node.ip})"
        yield line(inventory, node)


def _before(inventory: Inventory, node: Node) -> Argv:
    """Return the script's own options."""
    ports = inventory.ports
    others = [
        f"{each.name}={getattr(ports, each.name)}"
        for each in fields(Ports)
        if each.name not in NOT_TOLD and getattr(ports, each.name) != each.default
    ]
    settings = inventory.ray
    return (
        *("--cluster", inventory.cluster, "--name", node.name, "--node-ip", node.ip),
        *(("--interface", node.interface) if node.interface else ()),
        *(("--accelerator", inventory.accelerator) if inventory.accelerator != "nvidia" else ()),
        *("--gpus", str(node.gpus)),
        *(("--rdma",) if inventory.fabric != "ethernet" else ()),
        *(() if settings.token_auth else ("--no-token",)),
        *(() if node.head else ("--token-file", _TOKEN)),
        *(word for name in inventory.secrets if name != "HF_TOKEN" for word in ("--secret", name)),
        *(word for other in others for word in ("--port", other)),
        *(("--object-store", str(settings.object_store)) if settings.object_store else ()),
        *(("--state-dir", node.state_dir) if node.state_dir else ()),
    )


def _after(inventory: Inventory, node: Node) -> Argv:
    """Return the options of `docker run` that the inventory adds."""
    plain = replace(
        inventory,
        shm="private",
        devices=(),
        cap_add=(),
        ulimits={},
        privileged=False,
        logging=Logging(),
        secrets_in="disk",
        mounts=(),
    )
    bare = replace(node, env={}, hca=(), cache_dir=None)
    told = replace(inventory, logging=Logging(), secrets_in="disk")
    known = list(_options(plain, bare))
    return tuple(
        word
        for option in _options(told, replace(node, cache_dir=None))
        if option not in known
        for word in option
    )


def _options(inventory: Inventory, node: Node) -> Iterator[Argv]:
    """Yield the options of a node's container, each with its value."""
    argv = docker.run((), containers.node_spec(Site(inventory), node, "IMAGE", {}))
    at = 1
    while argv[at].startswith("-"):
        size = 1 if argv[at] in _BARE else 2
        if argv[at] not in ("--label", "--entrypoint"):
            yield argv[at : at + size]
        at += size


def _container(inventory: Inventory, node: Node) -> str:
    return Site(inventory).container_name(node)


def _refuse(inventory: Inventory) -> None:
    """Raise RequestError for what the script cannot do, all of it at once."""
    wrong = []
    if inventory.ray.off:
        wrong.append("`ray: none`: the script starts Ray")
    chosen = [node.name for node in inventory.nodes if node.gpu_ids]
    if chosen:
        wrong.append(f"{', '.join(chosen)}: the script cannot choose GPUs, only count them")
    if wrong:
        raise RequestError(
            f"{SCRIPT} cannot start this cluster",
            evidence=wrong,
            hint="start it with `vlaunch up`",
        )


def _left_out(inventory: Inventory) -> Iterator[str]:
    """Name what the lines do not say."""
    nodes = inventory.nodes
    if any(node.docker != ("docker",) for node in nodes):
        yield "`docker:` (run the script as somebody who may use Docker)"
    if any(node.cache_dir for node in nodes):
        yield "`cache_dir:` (what engines compile lies below the state folder)"
    if inventory.logging != Logging():
        yield "`logging:` (the daemon's driver, with a limit where it knows one)"
    if inventory.secrets_in == "memory":
        yield "`secrets_in: memory` (secrets lie on the disk)"
