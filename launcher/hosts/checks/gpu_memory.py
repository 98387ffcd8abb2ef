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
    others = [given for given in host.facts.given if given.cluster != host.inventory.cluster]
    for given in others:
        used = host.facts.used(host.node)
        if both := [str(gpu.index) for gpu in used if given.has(gpu.index, gpu.uuid)]:
            are = f"GPUs {', '.join(both)} are" if len(both) > 1 else f"GPU {both[0]} is"
            return failed(
                host,
                f"{are} given to cluster {given.cluster}, too",
                evidence=f"container {given.container}",
                fix=_other_gpus(host, others),
            )
    return None


def _other_gpus(host: Host, others: Sequence[Given]) -> str:
    free = [
        gpu.index
        for gpu in host.facts.gpus or ()
        if not any(given.has(gpu.index, gpu.uuid) for given in others)
    ]
    if len(free) < host.node.gpus:
        return f"end the other one, or use fewer: {len(free)} of {host.name} are free"
    return f"name others for {host.name}: `gpus: {free[: host.node.gpus]}`"


def noticed(evidence: Evidence) -> Sequence[Finding]:
    """Judge as `gpu-memory` does, but let nobody's memory be in the way: containers may start
    beside it, and what a server needs is judged when one is asked for.
    """
    found = GPU_MEMORY.judge(evidence)
    return [
        replace(finding, status="warn") if finding.status == "fail" else finding
        for finding in found
    ]


def left_for_server(
    evidence: Evidence, places: Mapping[str, int], share: float
) -> Sequence[Finding]:
    """Judge that others leave a server's GPUs the memory that it claims.

    `places` is how many GPUs of each node it takes, `share` the part of a GPU's whole memory that
    vLLM claims (`--gpu-memory-utilization`). Where nobody can say who holds memory, the keeper
    waits before the start.
    """
    hosts = {host.name: host for host in evidence.reached}
    return [_room(hosts[name], count, share) for name, count in places.items() if name in hosts]


def without_room(evidence: Evidence, node: str, share: float) -> set[int]:
    """Return which GPUs of a node, as its container numbers them, lack memory for a server."""
    hosts = [host for host in evidence.reached if host.name == node]
    full = [gpu for host in hosts for gpu, _ in _full(host, share)]
    return {
        at for host in hosts for at, gpu in enumerate(host.facts.used(host.node)) if gpu in full
    }


def _full(host: Host, share: float) -> list[tuple[Gpu, list[GpuProcess]]]:
    strangers = _strangers(host)
    return [
        (gpu, here)
        for gpu in host.facts.used(host.node)
        if (here := [process for process in strangers if process.gpu == gpu.uuid])
        and gpu.memory_total - _held(here) < share * gpu.memory_total
    ]


def _room(host: Host, count: int, share: float) -> Finding:
    gpus, full = host.facts.used(host.node), _full(host, share)
    if len(gpus) - len(full) >= min(count, len(gpus)):
        return passed(host)
    gpu, here = full[0]
    return failed(
        host,
        f"GPU {gpu.index} ({gpu.memory_total / 1024:.0f} GiB) has memory held by {_owners(here)},"
        f" and the server claims {share:.0%} of it",
        evidence="\n".join(_who(process) for _, those in full for process in those[:4]),
        fix=f"{_end(host, here)}, or claim less: `-- --gpu-memory-utilization 0.5`",
    )


def _memory(host: Host) -> Finding:
    if host.facts.gpu_processes is None:
        return _unknown(host)
    strangers = _strangers(host)
    if strangers:
        held = _held(strangers)
        judge = failed if held >= _STRANGER_MIB else warned
        return judge(
            host,
            f"{held} MiB of GPU memory held by {_owners(strangers)}",
            evidence="\n".join(_who(process) for process in strangers[:8]),
            fix=_end(host, strangers),
        )
    if displays := _displays(host):
        return displays
    held = _held(
        [process for process in host.facts.gpu_processes if process.gpu not in _others(host)]
    )
    text = f"{held} MiB held, by this cluster's own containers" if held else ""
    return passed(host, text or "nobody holds GPU memory")


def _displays(host: Host) -> Finding | None:
    """Warn of the memory of GPUs that drive a display: its programs draw, and the driver lists only
    those that compute.
    """
    drawn = {state.index for state in host.survey.gpus if state.display} if host.survey else set()
    told = []
    for gpu in host.facts.used(host.node):
        known = [process for process in host.facts.gpu_processes or () if process.gpu == gpu.uuid]
        if gpu.index in drawn and gpu.memory_used - _held(known) >= _STRANGER_MIB:
            told.append(f"GPU {gpu.index}: {gpu.memory_used - _held(known)} MiB")
    if not told:
        return None
    return warned(
        host,
        f"a display holds GPU memory ({', '.join(told)})",
        fix=f"name others under `gpus:` of {host.name}, end the desktop (`sudo systemctl isolate"
        " multi-user.target`), or claim less: `-- --gpu-memory-utilization 0.5`",
    )


def _strangers(host: Host) -> list[GpuProcess]:
    """Return the processes on the node's GPUs that are not in this cluster's containers."""
    ours, others = {container.id for container in host.facts.containers}, _others(host)
    return [
        process
        for process in host.facts.gpu_processes or ()
        if process.gpu not in others and not process.runs_in(ours)
    ]


def _others(host: Host) -> set[str]:
    """Return the UUIDs of the GPUs that the node does not use."""
    used = host.facts.used(host.node)
    return {gpu.uuid for gpu in host.facts.gpus or () if gpu not in used}


def _held(processes: Sequence[GpuProcess]) -> int:
    return sum(process.memory for process in processes)


def _end(host: Host, strangers: Sequence[GpuProcess]) -> str:
    first = strangers[0]
    end = f"docker stop {first.container[:12]}" if first.container else f"sudo kill {first.pid}"
    return f"end it: `{end}` on {host.name}"


def _owners(strangers: Sequence[GpuProcess]) -> str:
    users = sorted({process.user or "somebody unknown" for process in strangers})
    return ", ".join(users) + f" ({len(strangers)} process{'es' if len(strangers) > 1 else ''})"


def _who(process: GpuProcess) -> str:
    where = f", container {process.container[:12]}" if process.container else ""
    return f"{process.user or '?'}: pid {process.pid} {process.name}, {process.memory} MiB{where}"


def _unknown(host: Host) -> Finding:
    facts = host.facts
    used = {
        gpu.index: gpu.memory_used
        for gpu in facts.used(host.node)
        if gpu.memory_used >= _STRANGER_MIB
    }
    if used and not any(container.running for container in facts.containers):
        text = ", ".join(f"GPU {index}: {amount} MiB" for index, amount in used.items())
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
