"""Other users of a node's GPUs and their memory, and the memory that they leave free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.hosts.check import Check, Evidence, Host, each, not_nvidia
from launcher.tools.docker import Given
from launcher.tools.host import Gpu
from launcher.tools.survey import GpuProcess

_STRANGER_MIB = 1024


def _shared(host: Host) -> Finding | None:
    """Judge that no other cluster's container has a GPU of this node's: Docker gives one to as many
    containers as ask for it.
    """
    others = [
        assignment
        for assignment in host.facts.given
        if assignment.cluster != host.inventory.cluster
    ]
    for assignment in others:
        used = host.facts.used(host.node)
        if shared := [str(gpu.index) for gpu in used if assignment.has(gpu.index, gpu.uuid)]:
            are = f"GPUs {', '.join(shared)} are" if len(shared) > 1 else f"GPU {shared[0]} is"
            return failed(
                host,
                f"{are} given to cluster {assignment.cluster}, too",
                evidence=f"container {assignment.container}",
                fix=_other_gpus(host, others),
            )
    return None


def _other_gpus(host: Host, others: Sequence[Given]) -> str:
    free = [
        gpu.index
        for gpu in host.facts.gpus or ()
        if not any(assignment.has(gpu.index, gpu.uuid) for assignment in others)
    ]
    if len(free) < host.node.gpus:
        return f"end the other one, or use fewer: {len(free)} of {host.name} are free"
    return f"name others for {host.name}: `gpus: {free[: host.node.gpus]}`"


def noticed(evidence: Evidence) -> Sequence[Finding]:
    """Judge as `gpu-memory` does, but let nobody's memory be in the way: containers may start
    beside it, and what a server needs is judged when one is asked for.
    """
    findings = GPU_MEMORY.judge(evidence)
    return [
        replace(finding, status="warn") if finding.status == "fail" else finding
        for finding in findings
    ]


def left_for_server(
    evidence: Evidence, gpu_counts: Mapping[str, int], share: float
) -> Sequence[Finding]:
    """Judge that others leave a server's GPUs the memory that it claims.

    `places` is how many GPUs of each node it takes, `share` the part of a GPU's whole memory that
    vLLM claims (`--gpu-memory-utilization`). Where nobody can say who holds memory, the keeper
    waits before the start.
    """
    hosts = {host.name: host for host in evidence.reached}
    return [_room(hosts[name], count, share) for name, count in gpu_counts.items() if name in hosts]


def without_room(evidence: Evidence, node: str, share: float) -> set[int]:
    """Return which GPUs of a node, as its container numbers them, lack memory for a server."""
    hosts = [host for host in evidence.reached if host.name == node]
    shortages = [gpu for host in hosts for gpu, _ in _full(host, share)]
    return {
        at
        for host in hosts
        for at, gpu in enumerate(host.facts.used(host.node))
        if gpu in shortages
    }


def _full(host: Host, share: float) -> list[tuple[Gpu, list[GpuProcess]]]:
    foreign = _strangers(host)
    return [
        (gpu, holders)
        for gpu in host.facts.used(host.node)
        if (holders := [process for process in foreign if process.gpu == gpu.uuid])
        and gpu.memory_total - _held(holders) < share * gpu.memory_total
    ]


def _room(host: Host, count: int, share: float) -> Finding:
    gpus, shortages = host.facts.used(host.node), _full(host, share)
    if len(gpus) - len(shortages) >= min(count, len(gpus)):
        return passed(host)
    gpu, holders = shortages[0]
    return failed(
        host,
        f"GPU {gpu.index} ({gpu.memory_total / 1024:.0f} GiB) has memory held by"
        f" {_owners(holders)}, and the server claims {share:.0%} of it",
        evidence="\n".join(
            _who(process) for _, processes in shortages for process in processes[:4]
        ),
        fix=f"{_end(host, holders)}, or claim less: `-- --gpu-memory-utilization 0.5`",
    )


def _memory(host: Host) -> Finding:
    if host.facts.gpu_processes is None:
        return _unknown(host)
    foreign = _strangers(host)
    if foreign:
        megabytes = _held(foreign)
        judge = failed if megabytes >= _STRANGER_MIB else warned
        return judge(
            host,
            f"{megabytes} MiB of GPU memory held by {_owners(foreign)}",
            evidence="\n".join(_who(process) for process in foreign[:8]),
            fix=_end(host, foreign),
        )
    if displays := _displays(host):
        return displays
    megabytes = _held(
        [process for process in host.facts.gpu_processes if process.gpu not in _others(host)]
    )
    text = f"{megabytes} MiB held, by this cluster's own containers" if megabytes else ""
    return passed(host, text or "nobody holds GPU memory")


def _displays(host: Host) -> Finding | None:
    """Warn of the memory of GPUs that drive a display: its programs draw, and the driver lists only
    those that compute.
    """
    display_indexes = (
        {state.index for state in host.survey.gpus if state.display} if host.survey else set()
    )
    usages = []
    for gpu in host.facts.used(host.node):
        processes = [
            process for process in host.facts.gpu_processes or () if process.gpu == gpu.uuid
        ]
        if gpu.index in display_indexes and gpu.memory_used - _held(processes) >= _STRANGER_MIB:
            usages.append(f"GPU {gpu.index}: {gpu.memory_used - _held(processes)} MiB")
    if not usages:
        return None
    return warned(
        host,
        f"a display holds GPU memory ({', '.join(usages)})",
        fix=f"name others under `gpus:` of {host.name}, end the desktop (`sudo systemctl isolate"
        " multi-user.target`), or claim less: `-- --gpu-memory-utilization 0.5`",
    )


def _strangers(host: Host) -> list[GpuProcess]:
    """Return the processes on the node's GPUs that are not in this cluster's containers."""
    own_containers, unused = {container.id for container in host.facts.containers}, _others(host)
    return [
        process
        for process in host.facts.gpu_processes or ()
        if process.gpu not in unused and not process.runs_in(own_containers)
    ]


def _others(host: Host) -> set[str]:
    """Return the UUIDs of the GPUs that the node does not use."""
    used = host.facts.used(host.node)
    return {gpu.uuid for gpu in host.facts.gpus or () if gpu not in used}


def _held(processes: Sequence[GpuProcess]) -> int:
    return sum(process.memory for process in processes)


def _end(host: Host, processes: Sequence[GpuProcess]) -> str:
    first = processes[0]
    command = f"docker stop {first.container[:12]}" if first.container else f"sudo kill {first.pid}"
    return f"end it: `{command}` on {host.name}"


def _owners(processes: Sequence[GpuProcess]) -> str:
    users = sorted({process.user or "somebody unknown" for process in processes})
    return ", ".join(users) + f" ({len(processes)} process{'es' if len(processes) > 1 else ''})"


def _who(process: GpuProcess) -> str:
    container = f", container {process.container[:12]}" if process.container else ""
    return (
        f"{process.user or '?'}: pid {process.pid} {process.name}, {process.memory} MiB{container}"
    )


def _unknown(host: Host) -> Finding:
    facts = host.facts
    usage = {
        gpu.index: gpu.memory_used
        for gpu in facts.used(host.node)
        if gpu.memory_used >= _STRANGER_MIB
    }
    if usage and not any(container.running for container in facts.containers):
        text = ", ".join(f"GPU {index}: {amount} MiB" for index, amount in usage.items())
        return warned(
            host,
            f"GPU memory is in use, by whom is not known ({text})",
            fix=f"look: `nvidia-smi` on {host.name}",
        )
    return skipped(host, "`nvidia-smi` did not tell which processes hold GPU memory")


GPU_MEMORY = Check(
    id="gpu-memory",
    what="nobody else holds GPU memory",
    why="vLLM claims nine tenths of each GPU's memory at start and ends when it is not free",
    judge=each(_memory),
    group="accelerator",
    skip_reason=not_nvidia,
    needs=("accelerator",),
)


CHECKS = (
    Check(
        id="gpu-shared",
        what="no other cluster has these GPUs",
        why="two servers on one GPU take each other's memory, and the second one does not start",
        judge=each(_shared),
        skip_reason=not_nvidia,
        group="accelerator",
        needs=("docker", "accelerator"),
    ),
    GPU_MEMORY,
)
