"""Checks of GPUs and GPU memory used by other clusters and processes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.sizes import format_size
from launcher.hosts.check import Check, Evidence, Host, per_host, skip_unless_nvidia
from launcher.tools.docker import GpuAllocation
from launcher.tools.host import Gpu
from launcher.tools.host.survey import GpuProcess

_FOREIGN_MIB = 1024
_EXCESS_BYTES = 10 * 1024**3  # drivers of a healthy host need less


def _judge_shared(host: Host) -> Finding | None:
    """Judge that no other cluster has the node's GPUs, which Docker does not prevent."""
    others = [
        grant for grant in host.facts.gpu_allocations if grant.cluster != host.inventory.cluster
    ]
    for grant in others:
        used = host.facts.used_gpus(host.node)
        if shared := [str(gpu.index) for gpu in used if grant.includes(gpu.index, gpu.uuid)]:
            are = f"GPUs {', '.join(shared)} are" if len(shared) > 1 else f"GPU {shared[0]} is"
            return failed(
                host,
                f"{are} also assigned to cluster {grant.cluster}",
                evidence=f"container {grant.container}",
                fix=_other_gpus_fix(host, others),
            )
    return None


def _other_gpus_fix(host: Host, others: Sequence[GpuAllocation]) -> str:
    free = [
        gpu.index
        for gpu in host.facts.gpus or ()
        if not any(grant.includes(gpu.index, gpu.uuid) for grant in others)
    ]
    if len(free) < host.node.gpus:
        return f"stop the other cluster, or use fewer GPUs: {len(free)} of {host.name} are free"
    return f"choose other GPUs for {host.name}: `gpus: {free[: host.node.gpus]}`"


def warn_gpu_memory(evidence: Evidence) -> Sequence[Finding]:
    """Judge as `gpu-memory`, but only warn: containers may start, servers check again."""
    findings = GPU_MEMORY.judge(evidence)
    return [
        replace(finding, status="warn") if finding.status == "fail" else finding
        for finding in findings
    ]


def judge_server_memory(
    evidence: Evidence, counts: Mapping[str, int], share: float
) -> Sequence[Finding]:
    """Judge that other processes leave the memory that a server claims.

    `counts` is the number of GPUs per node, `share` the fraction of a GPU's memory that vLLM
    claims (`--gpu-memory-utilization`). If the owners are unknown, the supervisor waits before the
    start.
    """
    hosts = {host.name: host for host in evidence.reached}
    return [
        _judge_room(hosts[name], count, share) for name, count in counts.items() if name in hosts
    ]


def full_gpus(evidence: Evidence, node: str, share: float) -> set[int]:
    """Return the GPUs of a node, as its container numbers them, that lack memory for a server."""
    hosts = [host for host in evidence.reached if host.name == node]
    full = [gpu for host in hosts for gpu, _ in _full_gpus(host, share)]
    return {
        index
        for host in hosts
        for index, gpu in enumerate(host.facts.used_gpus(host.node))
        if gpu in full
    }


def _full_gpus(host: Host, share: float) -> list[tuple[Gpu, list[GpuProcess]]]:
    foreign = _foreign_processes(host)
    return [
        (gpu, holders)
        for gpu in host.facts.used_gpus(host.node)
        if (holders := [process for process in foreign if process.gpu == gpu.uuid])
        and gpu.memory_total - _total_memory(holders) < share * gpu.memory_total
    ]


def _judge_room(host: Host, count: int, share: float) -> Finding:
    gpus, full = host.facts.used_gpus(host.node), _full_gpus(host, share)
    if len(gpus) - len(full) >= min(count, len(gpus)):
        return passed(host)
    gpu, holders = full[0]
    return failed(
        host,
        f"GPU {gpu.index} ({gpu.memory_total / 1024:.0f} GiB) has memory used by"
        f" {_owners(holders)}, and the server needs {share:.0%} of it",
        evidence="\n".join(
            _describe(process) for _, processes in full for process in processes[:4]
        ),
        fix=f"{_stop_fix(host, holders)}, or reserve less: `-- --gpu-memory-utilization 0.5`",
    )


def _judge_memory(host: Host) -> Finding:
    if host.facts.gpu_processes is None:
        return _judge_unlisted(host)
    foreign = _foreign_processes(host)
    if foreign:
        megabytes = _total_memory(foreign)
        judge = failed if megabytes >= _FOREIGN_MIB else warned
        return judge(
            host,
            f"{megabytes} MiB of GPU memory used by {_owners(foreign)}",
            evidence="\n".join(_describe(process) for process in foreign[:8]),
            fix=_stop_fix(host, foreign),
        )
    if finding := _judge_displays(host) or _judge_unified(host):
        return finding
    megabytes = _total_memory(
        [process for process in host.facts.gpu_processes if process.gpu not in _unused_gpus(host)]
    )
    text = f"{megabytes} MiB in use by this cluster's own containers" if megabytes else ""
    return passed(host, text or "no GPU memory is in use")


def _judge_displays(host: Host) -> Finding | None:
    """Warn about GPUs that drive a display: the driver lists only compute processes."""
    shown = {state.index for state in host.survey.gpus if state.display} if host.survey else set()
    usages = []
    for gpu in host.facts.used_gpus(host.node):
        processes = [
            process for process in host.facts.gpu_processes or () if process.gpu == gpu.uuid
        ]
        if gpu.index in shown and gpu.memory_used - _total_memory(processes) >= _FOREIGN_MIB:
            usages.append(f"GPU {gpu.index}: {gpu.memory_used - _total_memory(processes)} MiB")
    if not usages:
        return None
    return warned(
        host,
        f"a display uses GPU memory ({', '.join(usages)})",
        fix=(
            f"choose other GPUs under `gpus:` of {host.name}, stop the desktop (`sudo systemctl"
            " isolate multi-user.target`), or reserve less: `-- --gpu-memory-utilization 0.5`"
        ),
    )


def _judge_unified(host: Host) -> Finding | None:
    """Warn about memory that a GB10's driver holds for dead processes: it is the host's."""
    excess = host.survey.driver_memory if host.survey else None
    if excess is None or all(gpu.memory_total for gpu in host.facts.used_gpus(host.node)):
        return None
    processes = host.facts.gpu_processes or ()
    excess -= _total_memory(processes) * 1024**2
    if excess < _EXCESS_BYTES or not all(process.memory for process in processes):
        return None
    return warned(
        host,
        f"{format_size(excess)} of memory belong to no process: most likely to one that was killed",
        fix=(
            f"find processes that still hold the GPU: `sudo fuser -v /dev/nvidia*` on {host.name};"
            f" without any, reboot {host.name}"
        ),
    )


def _foreign_processes(host: Host) -> list[GpuProcess]:
    """Return the processes on the node's GPUs outside this cluster's containers."""
    own_containers, unused = (
        {container.id for container in host.facts.containers},
        _unused_gpus(host),
    )
    return [
        process
        for process in host.facts.gpu_processes or ()
        if process.gpu not in unused and not process.runs_in(own_containers)
    ]


def _unused_gpus(host: Host) -> set[str]:
    used = host.facts.used_gpus(host.node)
    return {gpu.uuid for gpu in host.facts.gpus or () if gpu not in used}


def _total_memory(processes: Sequence[GpuProcess]) -> int:
    return sum(process.memory for process in processes)


def _stop_fix(host: Host, processes: Sequence[GpuProcess]) -> str:
    first = processes[0]
    command = f"docker stop {first.container[:12]}" if first.container else f"sudo kill {first.pid}"
    return f"stop it: `{command}` on {host.name}"


def _owners(processes: Sequence[GpuProcess]) -> str:
    users = sorted({process.user or "an unknown user" for process in processes})
    return ", ".join(users) + f" ({len(processes)} process{'es' if len(processes) > 1 else ''})"


def _describe(process: GpuProcess) -> str:
    container = f", container {process.container[:12]}" if process.container else ""
    return (
        f"{process.user or '?'}: pid {process.pid} {process.name}, {process.memory} MiB{container}"
    )


def _judge_unlisted(host: Host) -> Finding:
    facts = host.facts
    usage = {
        gpu.index: gpu.memory_used
        for gpu in facts.used_gpus(host.node)
        if gpu.memory_used >= _FOREIGN_MIB
    }
    if usage and not any(container.running for container in facts.containers):
        text = ", ".join(f"GPU {index}: {amount} MiB" for index, amount in usage.items())
        return warned(
            host,
            f"GPU memory is in use by unknown processes ({text})",
            fix=f"find them with `nvidia-smi` on {host.name}",
        )
    return skipped(host, "`nvidia-smi` did not report which processes use GPU memory")


GPU_MEMORY = Check(
    id="gpu-memory",
    what="GPU memory is free",
    why="at start, vLLM reserves nine tenths of each GPU's memory and exits if it is not free",
    judge=per_host(_judge_memory),
    group="accelerator",
    skip_reason=skip_unless_nvidia,
    needs=("accelerator",),
)


CHECKS = (
    Check(
        id="gpu-shared",
        what="no other cluster uses these GPUs",
        why="two servers on one GPU compete for its memory, and the second one does not start",
        judge=per_host(_judge_shared),
        skip_reason=skip_unless_nvidia,
        group="accelerator",
        needs=("docker", "accelerator"),
    ),
    GPU_MEMORY,
)
