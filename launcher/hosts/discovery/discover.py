"""Derivation of an inventory from scanned hosts: every choice with its reason. Runs no commands."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from launcher.core.domain import Accelerator, fold
from launcher.hosts.discovery import accelerators, host_descriptions, rdma, software, subnets
from launcher.hosts.discovery.shape import (
    GID,
    Choice,
    DiscoveredNode,
    Discovery,
    InitOptions,
    ScannedHost,
)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_MIB, _GIB = 2**20, 2**30
_MIN_OBJECT_STORE = 75 * _MIB
_IMEX_CHANNEL = "channel0"  # created in NVIDIA's IMEX guide


def discover(hosts: Sequence[ScannedHost], options: InitOptions) -> Discovery:
    """Choose the inventory of these hosts; the first is the head.

    Raises RequestError if they cannot form a cluster: no common network, or accelerators on only
    some.
    """
    hosts = [
        replace(host, name=name) for host, name in zip(hosts, choose_names(hosts), strict=True)
    ]
    accelerator = accelerators.choose_accelerators(hosts, options)
    kind = accelerator.kind
    fabric = rdma.choose_fabric(hosts) if kind != "cpu" else _cpu_fabric(hosts)
    network = subnets.choose_network(hosts, [devices.netdevs for devices in fabric.hosts])
    nodes = tuple(
        DiscoveredNode(
            host=host.host,
            name=host.name,
            ip=address.ip,
            gpus=count,
            gpu_ids=gpu_ids,
            interface=address.interface,
            hca=devices.hca,
            gid=devices.gid,
            docker=host.docker,
            ssh=host.ssh,
        )
        for host, address, count, gpu_ids, devices in zip(
            hosts, network.addresses, accelerator.counts, accelerator.ids, fabric.hosts, strict=True
        )
    )
    state_dir, no_state_dir = software.choose_state_dir(hosts)
    args, args_reason = _choose_engine_args(hosts, kind)
    env, gid_why = _choose_roce_gid(nodes) if fabric.fabric == "roce" else ({}, ())
    if kind == "cpu":
        env = _cpu_environment(hosts, accelerator.counts)
    sudo_hosts = [host.name for host in hosts if host.docker[0] != "docker"]
    return Discovery(
        cluster=options.cluster,
        image=software.choose_image(hosts, kind, options.image),
        accelerator=kind,
        fabric=fabric.fabric,
        hf_home=software.choose_hf_home(hosts, options.hf_home),
        state_dir=state_dir,
        nodes=nodes,
        ssh=options.ssh,
        summary=host_descriptions.describe_hosts(hosts, kind),
        network=(*network.why, *fabric.why),
        docker=(f"{fold(sudo_hosts)}: the SSH user may not use Docker directly",)
        if sudo_hosts
        else (),
        gpus=accelerator.why,
        object_store=_choose_object_store(hosts, kind),
        rights=_choose_rights(hosts, kind),
        env=env,
        engine_args=args,
        engine_why=args_reason,
        gid_why=gid_why,
        warnings=(
            *host_descriptions.health_warnings(hosts),
            *no_state_dir,
            *network.warnings,
            *fabric.warnings,
            *_inequality_warnings(hosts, nodes, kind),
        ),
    )


def _inequality_warnings(
    hosts: Sequence[ScannedHost], nodes: Sequence[DiscoveredNode], kind: Accelerator
) -> Iterator[str]:
    if len({node.gpus for node in nodes}) > 1:
        counts = ", ".join(f"{node.name} {node.gpus}" for node in nodes)
        yield (
            f"the hosts have different numbers of GPUs ({counts}): tensor parallel groups must fit"
            " the smallest host"
        )
    models = sorted({gpu.name for host in hosts for gpu in host.facts.gpus or ()})
    if kind == "nvidia" and len(models) > 1:
        yield f"the hosts have different GPUs ({', '.join(models)}): the slowest limits all others"


def choose_names(hosts: Sequence[ScannedHost]) -> list[str]:
    """Choose node names: as on the command line, or the host's own name instead of an address."""
    preferred = [
        host.facts.hostname.split(".")[0] if _is_address(host.host) else host.host for host in hosts
    ]
    counts = Counter(preferred)
    used = {name for name in preferred if counts[name] == 1 and _is_name(name)}
    node_names = []
    for position, name in enumerate(preferred, start=1):
        is_usable = counts[name] == 1 and _is_name(name)
        fallbacks = (
            f"node{number}" for number in range(position, 10_000) if f"node{number}" not in used
        )
        node_names.append(name if is_usable else next(fallbacks))
        used.add(node_names[-1])
    return node_names


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and text.lower() != "localhost"


def _is_address(host: str) -> bool:
    return ":" in host or all(part.isdigit() for part in host.split("."))


def _cpu_fabric(hosts: Sequence[ScannedHost]) -> rdma.FabricChoice:
    has_rdma = any(host.survey.rdma for host in hosts)
    suffix = ", which uses no RDMA device" if has_rdma else ""
    return rdma.plain_ethernet(hosts, [f"ethernet: CPUs communicate over TCP (Gloo){suffix}"])


def _choose_object_store(hosts: Sequence[ScannedHost], kind: Accelerator) -> Choice | None:
    """Limit Ray's object store if it would take memory that the model needs."""
    memory = min((host.survey.memory for host in hosts if host.survey.memory), default=None)
    if memory is None or not (kind == "cpu" or _has_unified_memory(hosts)):
        return None
    size = max(_MIN_OBJECT_STORE, min(_GIB, memory // 8)) // _MIB
    # https://docs.ray.io/en/latest/ray-core/scheduling/memory-management.html
    why = "Ray would take 30 % of the memory, which the model needs"
    return Choice(value=f"{size // 1024}GiB" if size % 1024 == 0 else f"{size}MiB", why=(why,))


def _has_unified_memory(hosts: Sequence[ScannedHost]) -> bool:
    """Return whether GPUs share the host's memory: `nvidia-smi` then prints no size."""
    return any(gpu.memory_total == 0 for host in hosts for gpu in host.facts.gpus or ())


def _choose_rights(hosts: Sequence[ScannedHost], kind: Accelerator) -> dict[str, Choice]:
    """Return extra devices and capabilities that the containers need."""
    if kind == "amd":
        why = "as in vLLM's and AMD's own commands for ROCm"
        return {"cap_add": Choice(value="SYS_PTRACE", why=(why,))}
    joined = all(_IMEX_CHANNEL in (host.survey.imex or ()) for host in hosts)
    if kind == "nvidia" and joined and len(hosts) > 1:
        why = "NVLink between the hosts (IMEX); Docker 29.2 does not read NVIDIA_IMEX_CHANNELS"
        device = f"/dev/nvidia-caps-imex-channels/{_IMEX_CHANNEL}"
        return {"devices": Choice(value=device, why=(why,))}
    return {}


def _choose_roce_gid(nodes: Sequence[DiscoveredNode]) -> tuple[dict[str, Choice], tuple[str, ...]]:
    """Return the GID index if equal on all nodes, else the reason; nodes then set theirs."""
    without_gid = [node.name for node in nodes if node.gid is None]
    if without_gid:
        why = "no index is RoCE v2 over IPv4 on all devices"
        return {}, (f"{GID} is chosen by NCCL on {fold(without_gid)}: {why}",)
    if len({node.gid for node in nodes}) > 1:
        return {}, (f"{GID}: RoCE v2 over IPv4 has another index on some hosts",)
    why = "RoCE v2 over IPv4 in the GID table of every device (`show_gids`)"
    return {GID: Choice(value=str(nodes[0].gid), why=(why,))}, ()


def _cpu_environment(hosts: Sequence[ScannedHost], counts: Sequence[int]) -> dict[str, Choice]:
    """Set the cache size of each slot, and leave threads unbound without visible NUMA nodes."""
    slot_bytes = [
        host.survey.memory // count
        for host, count in zip(hosts, counts, strict=True)
        if host.survey.memory
    ]
    cache_gib = max(1, min(32, min(slot_bytes, default=4 * _GIB) // (4 * _GIB)))
    why = "GiB per slot: a quarter of its memory at most; vLLM would take nearly all of it"
    env = {"VLLM_CPU_KVCACHE_SPACE": Choice(value=str(cache_gib), why=(why,))}
    if max(counts) == 1:
        why = "one slot per host: its threads can use all CPUs"
        env["VLLM_CPU_OMP_THREADS_BIND"] = Choice(value="nobind", why=(why,))
    return env


def _choose_engine_args(
    hosts: Sequence[ScannedHost], kind: Accelerator
) -> tuple[dict[str, Any], tuple[str, ...]]:
    if kind == "cpu":
        args: dict[str, Any] = {"dtype": "float32"}
        why = "every CPU supports float32"
        if len(hosts) > 1:
            args["compilation_config"] = {"mode": 2, "backend": "eager"}
            why += "; pipeline stages on CPUs need this compilation mode"
        return args, (why,)
    if not _has_unified_memory(hosts):
        return {}, ()
    why = "the GPU shares the host's memory: vLLM's default, 0.92, would make the host freeze"
    return {"gpu_memory_utilization": 0.7}, (why,)
