"""A server as the head is told to keep it: its processes, where they run and meet, and the step
that writes it down.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise

from launcher.agent import state
from launcher.agent.desired import Desired, Policy, Process, Ray
from launcher.core.domain import Node
from launcher.core.plan import Step
from launcher.core.transport import Command
from launcher.hosts.check import Evidence
from launcher.hosts.checks import gpu_memory
from launcher.network import engine_log
from launcher.serving.serve_request import Request
from launcher.tools import servers, vllm
from launcher.tools.site import Site
from launcher.tools.snapshot import ClusterSnapshot

_VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES", "cpu": ""}
_READY = "VLLM_ENGINE_READY_TIMEOUT_S"  # seconds that vLLM's front waits for its engine
_MEETING = ("--master-port", "--data-parallel-rpc-port")
# Whole, and on the disk: the keeper never reads half of it, and a reboot finds it. Arguments: the
# server's folder, the file. The set-group-ID bit of the folder around it says that the image's user
# is not root (`hand_over.sh`).
_WANT = (
    'umask 022; [ ! -g "${1%/*}" ] || umask 002; saved() { sync "$1" 2>/dev/null || sync; }; '
    'new=$1/.$2.$$; mkdir -p "$1" && cat >"$new" && saved "$new" && mv "$new" "$1/$2" && saved "$1"'
)


def desired(seen: ClusterSnapshot, request: Request, *, asked: float, policy: Policy) -> Desired:
    """Return a request as the head's keeper needs it."""
    inventory, split = seen.site.inventory, request.placement
    image = seen.site.image(inventory.head, inventory.image)
    outside = request.backend == "mp"
    ray = Ray(
        dashboard=inventory.ports.dashboard,
        node_manager=inventory.ports.node_manager,
        gpus=split.world,
        reserve=outside,
        partial=outside and any(count < inventory.node(name).gpus for name, count in split.nodes),
    )
    return Desired(
        name=request.name,
        id=request.digest,
        model=request.model,
        backend=request.backend,
        processes=tuple(_processes(seen, request, policy)),
        host=request.host,
        port=request.port,
        places=dict(split.nodes),
        addresses={node.name: node.ip for node in inventory.nodes},
        asked=asked,
        replicas=split.dp,
        tp=split.stage,
        visible=_VISIBLE[inventory.accelerator],
        memory_share=None if inventory.accelerator == "cpu" else vllm.memory_share(request.args),
        ray=None if inventory.ray.off else ray,
        policy=policy,
        asked_for=request.asked_for,
        image=image.identity if image else "",
    )


def _processes(seen: ClusterSnapshot, request: Request, policy: Policy) -> Iterator[Process]:
    """Yield the engine's processes, one with an API first."""
    inventory, split = seen.site.inventory, request.placement
    ready = {_READY: f"{max(3600, policy.start_timeout):.0f}"}

    def env(node: Node, more: Mapping[str, str]) -> dict[str, str]:
        # What the user sets in the inventory is in the container already, and stays as it is.
        wanted = {
            **request.env,
            **ready,
            **more,
            **engine_log.variables(inventory, log_name(request.name, request.digest)),
        }
        return {name: value for name, value in sorted(wanted.items()) if name not in node.env}

    nodes = request.nodes_with_ranks(inventory)
    patience = vllm.gloo_timeout(request.args, len(nodes), policy.start_timeout)
    if request.backend == "ray":
        places: Mapping[str, str] = {}
        if split.dp > 1:
            places = vllm.ray_replica_env(
                [node.ip for node in nodes],
                spans=split.spans,
                alike=len({node.gpus for node in nodes}) == 1,
                handed_on=sorted(request.env),
            )
        own = env(inventory.head, places)
        argv = request.command(patience)
        yield Process(node=inventory.head.name, argv=argv, env=own, replicas=(0, split.dp))
        return
    held = [count for _, count in split.replicas]
    meeting = _meeting_port(seen, request, nodes[0])
    for rank, node in enumerate(nodes):
        first = sum(held[:rank])
        own_argv = (
            vllm.replicas_of(held[rank], first, nodes[0].ip, meeting, request.balancing)
            if split.dp > 1
            else vllm.rank_of(len(nodes), rank, nodes[0].ip, meeting)
        )
        yield Process(
            node=node.name,
            argv=request.command((*own_argv, *patience)),
            env=env(node, {}),
            gpus=_gpus(seen, request, node),
            replicas=(first, held[rank]) if split.dp > 1 else (0, 1),
        )


def log_name(server: str, id: str) -> str:
    """Name the files that the ranks of a server write about their links: another server of the same
    name has others.
    """
    return f"{server}-{id}"


def _meeting_port(seen: ClusterSnapshot, request: Request, node: Node) -> int:
    """Return the first port from the inventory's on where the nodes' processes can meet: no other
    server's, nobody listens.
    """
    facts, ports = seen.site.facts_of(node), seen.site.inventory.ports
    first = ports.dp_rpc if request.placement.dp > 1 else ports.mp_master
    taken = {number for _, number in (facts.listening if facts else None) or ()}
    taken |= {ports.mp_master, ports.dp_rpc, ports.group, ports.probe, ports.api, request.port} - {
        first
    }
    for each in _others(seen, request):
        if each.api_node == node.name:
            options = pairwise(each.processes[0].argv)
            taken |= {int(v) for name, v in options if name in _MEETING and v.isdigit()}
    return next((port for port in range(first, 65536) if port not in taken), first)


def _others(seen: ClusterSnapshot, request: Request) -> list[Desired]:
    """Return what is wanted beside the server that is asked for."""
    return [
        each.desired
        for each in seen.kept.running
        if each.desired is not None and each.name != request.name
    ]


def _gpus(seen: ClusterSnapshot, request: Request, node: Node) -> tuple[int, ...] | None:
    """Return which GPUs of a node it takes; None for all, and where Ray says which, and on CPUs,
    which nobody numbers.
    """
    inventory, count = seen.site.inventory, dict(request.placement.nodes)[node.name]
    if count == node.gpus or not inventory.ray.off or inventory.accelerator == "cpu":
        return None
    held = {
        index
        for each in _others(seen, request)
        for process in each.processes
        if process.node == node.name
        for index in (range(node.gpus) if process.gpus is None else process.gpus)
    }
    evidence = Evidence(inventory=inventory, facts=seen.site.facts)
    full = gpu_memory.without_room(evidence, node.name, vllm.memory_share(request.args))
    free = [index for index in range(node.gpus) if index not in held]
    return tuple(sorted(sorted(free, key=lambda index: index in full)[:count]))


def write(site: Site, wanted: Desired) -> Step:
    """Write it to the head's own disk; what a script writes is asked for at the time when that
    runs.
    """
    text = json.dumps(wanted.as_json())
    before, after = json.dumps({**wanted.as_json(), "asked": "@asked@"}).split('"@asked@"', 1)
    where = servers.folder(site, wanted.name)
    return Step(
        title=f"writing down that {wanted.model} is wanted as server `{wanted.name}`",
        command=Command(
            node=site.head.name,
            argv=("sh", "-c", _WANT, "want", where, state.DESIRED),
            timeout=30,
            stdin=text.encode,
            shown_stdin=f'printf %s {shlex.quote(before)}"$(date +%s)"{shlex.quote(after)}',
        ),
    )
