"""The spec of a server for the head's supervisor: its processes, their nodes and rendezvous, and
the step that writes it.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise

from launcher.agent import state
from launcher.agent.desired import Desired, Policy, ProcessSpec, Ray
from launcher.core.domain import Node
from launcher.core.plan import Step
from launcher.core.transport import Command
from launcher.hosts.check import Evidence
from launcher.hosts.checks import gpu_memory
from launcher.network import engine_log
from launcher.serving.serve_request import ServeRequest
from launcher.tools import vllm
from launcher.tools.engine_flags.gates import VISIBLE_DEVICES
from launcher.tools.site import Site, servers
from launcher.tools.site.snapshot import ClusterSnapshot

_READY_TIMEOUT = (
    "VLLM_ENGINE_READY_TIMEOUT_S"  # seconds that vLLM's API server waits for its engine
)
_RENDEZVOUS_FLAGS = ("--master-port", "--data-parallel-rpc-port")
# Atomic and synced: the supervisor never reads a partial file, and it survives a reboot. Arguments:
# the server's folder, the file. A set-group-ID bit on the parent folder means that the image's user
# is not root (`hand_over.sh`).
_WRITE_SPEC = (
    'umask 022; [ ! -g "${1%/*}" ] || umask 002; saved() { sync "$1" 2>/dev/null || sync; }; '
    'new=$1/.$2.$$; mkdir -p "$1" && cat >"$new" && saved "$new" && mv "$new" "$1/$2" && saved "$1"'
)


def build_spec(
    snapshot: ClusterSnapshot, request: ServeRequest, *, requested_at: float, policy: Policy
) -> Desired:
    """Return the spec of a request."""
    inventory, placement, id = snapshot.site.inventory, request.placement, request.digest
    logs = engine_log.variables(inventory, log_name(request.name, id))
    image = snapshot.site.image(inventory.head, inventory.image)
    outside = request.backend == "mp"
    ray = Ray(
        dashboard=inventory.ports.dashboard,
        node_manager=inventory.ports.node_manager,
        gpus=placement.world,
        reserve=outside,
        partial=outside
        and any(count < inventory.node(name).gpus for name, count in placement.nodes),
    )
    return Desired(
        name=request.name,
        id=id,
        model=request.model,
        backend=request.backend,
        processes=tuple(_build_processes(snapshot, request, policy, logs)),
        host=request.host,
        port=request.port,
        places=dict(placement.nodes),
        addresses={node.name: node.ip for node in inventory.nodes},
        asked=requested_at,
        replicas=placement.dp,
        tp=placement.stage_size,
        visible=VISIBLE_DEVICES[inventory.accelerator],
        memory_share=None if inventory.accelerator == "cpu" else vllm.memory_share(request.args),
        ray=None if inventory.ray.off else ray,
        policy=policy,
        asked_for=request.original_spec,
        image=image.identity if image else "",
    )


def _build_processes(
    snapshot: ClusterSnapshot, request: ServeRequest, policy: Policy, logs: Mapping[str, str]
) -> Iterator[ProcessSpec]:
    """Yield the engine's processes, one with an API first; `logs` are variables of their logs."""
    inventory, placement = snapshot.site.inventory, request.placement
    ready = {_READY_TIMEOUT: f"{max(3600, policy.start_timeout):.0f}"}

    def env(node: Node, extra: Mapping[str, str]) -> dict[str, str]:
        # The container already has the inventory's variables, which come first.
        variables = {**request.env, **ready, **extra, **logs}
        return {name: value for name, value in sorted(variables.items()) if name not in node.env}

    nodes = request.rank_nodes(inventory)
    timeout_args = vllm.gloo_timeout_option(request.args, len(nodes), policy.start_timeout)
    if request.backend == "ray":
        placement_env: Mapping[str, str] = {}
        if placement.dp > 1:
            placement_env = vllm.ray_replica_env(
                [node.ip for node in nodes],
                spans=placement.spans,
                uniform=len({node.gpus for node in nodes}) == 1,
                copied_variables=sorted(request.env),
            )
        head_env = env(inventory.head, placement_env)
        argv = request.build_command(timeout_args)
        replicas = (0, placement.dp)
        yield ProcessSpec(node=inventory.head.name, argv=argv, env=head_env, replicas=replicas)
        return
    replica_counts = [count for _, count in placement.replicas]
    port = _rendezvous_port(snapshot, request, nodes[0])
    for rank, node in enumerate(nodes):
        first = sum(replica_counts[:rank])
        own_argv = (
            vllm.replica_options(replica_counts[rank], first, nodes[0].ip, port, request.balancing)
            if placement.dp > 1
            else vllm.rank_options(len(nodes), rank, nodes[0].ip, port)
        )
        yield ProcessSpec(
            node=node.name,
            argv=request.build_command((*own_argv, *timeout_args), node.ip),
            env=env(node, {}),
            gpus=_assign_gpus(snapshot, request, node),
            replicas=(first, replica_counts[rank]) if placement.dp > 1 else (0, 1),
        )


def log_name(server: str, id: str) -> str:
    """Return the name of the ranks' log files, unique to this server."""
    return f"{server}-{id}"


def _rendezvous_port(snapshot: ClusterSnapshot, request: ServeRequest, node: Node) -> int:
    """Return the first free port from the inventory's on, for the rendezvous."""
    facts, ports = snapshot.site.facts_of(node), snapshot.site.inventory.ports
    first = ports.dp_rpc if request.placement.dp > 1 else ports.mp_master
    used = {number for _, number in (facts.listening if facts else None) or ()}
    reserved = {ports.mp_master, ports.dp_rpc, ports.group, ports.probe, ports.api, request.port}
    used |= reserved - {first}
    for spec in _other_specs(snapshot, request):
        if spec.api_node == node.name:
            options = pairwise(spec.processes[0].argv)
            values = (value for name, value in options if name in _RENDEZVOUS_FLAGS)
            used |= {int(value) for value in values if value.isdigit()}
    return next((port for port in range(first, 65536) if port not in used), first)


def _other_specs(snapshot: ClusterSnapshot, request: ServeRequest) -> list[Desired]:
    return [
        server.desired
        for server in snapshot.servers_state.running
        if server.desired is not None and server.name != request.name
    ]


def _assign_gpus(
    snapshot: ClusterSnapshot, request: ServeRequest, node: Node
) -> tuple[int, ...] | None:
    """Return the GPU indexes on a node; None for all, with Ray, and on CPUs."""
    inventory, count = snapshot.site.inventory, dict(request.placement.nodes)[node.name]
    if count == node.gpus or not inventory.ray.off or inventory.accelerator == "cpu":
        return None
    used_gpus = {
        index
        for spec in _other_specs(snapshot, request)
        for process in spec.processes
        if process.node == node.name
        for index in (range(node.gpus) if process.gpus is None else process.gpus)
    }
    evidence = Evidence(inventory=inventory, facts=snapshot.site.facts)
    gpus_without_room = gpu_memory.full_gpus(evidence, node.name, vllm.memory_share(request.args))
    free = [index for index in range(node.gpus) if index not in used_gpus]
    return tuple(sorted(sorted(free, key=lambda index: index in gpus_without_room)[:count]))


def write_spec(site: Site, spec: Desired) -> Step:
    """Write the spec to the head's disk; a script sets the request time when it runs."""
    fields = spec.as_json()
    before, after = json.dumps({**fields, "asked": "@asked@"}).split('"@asked@"', 1)
    folder = servers.server_dir(site, spec.name)
    return Step(
        title=f"saving the spec of server `{spec.name}` ({spec.model})",
        command=Command(
            node=site.head.name,
            argv=("sh", "-c", _WRITE_SPEC, "want", folder, state.DESIRED),
            timeout=30,
            stdin=json.dumps(fields).encode,
            shown_stdin=f'printf %s {shlex.quote(before)}"$(date +%s)"{shlex.quote(after)}',
        ),
    )
