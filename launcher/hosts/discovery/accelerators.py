"""Choice of accelerators: their kind, their number, and NVIDIA GPUs to leave to others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.core import untrusted
from launcher.core.domain import Accelerator, fold
from launcher.core.errors import RequestError
from launcher.hosts.discovery.host_descriptions import annotate_hosts
from launcher.hosts.discovery.shape import InitOptions, ScannedHost
from launcher.tools.host import Gpu
from launcher.tools.host.survey import GpuState

# Foreign memory in MiB that excludes a GPU; a context takes a few hundred.
_BUSY_MIB = 1024
# Names of the GPU kinds, and remedies on hosts without any.
_GPUS: dict[Accelerator, tuple[str, str]] = {
    "nvidia": (
        "NVIDIA GPU",
        "repair its driver (test: `nvidia-smi`), omit the host, or use CPUs with `--accelerator"
        " cpu`",
    ),
    "amd": (
        "AMD GPU",
        "repair its driver (test: `ls /sys/class/kfd`), omit the host, or use `--accelerator cpu`",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """Kind and number of accelerators; `ids` has indexes unless the first ones are used."""

    kind: Accelerator
    counts: tuple[int, ...]
    ids: tuple[tuple[str, ...], ...]
    why: tuple[str, ...] = ()


def choose_accelerators(hosts: Sequence[ScannedHost], options: InitOptions) -> Accelerators:
    """Choose the accelerators; raises RequestError if only some hosts have them."""
    kind, counts = _choose_kind(hosts, options.accelerator)
    if kind != "nvidia":
        return Accelerators(kind=kind, counts=tuple(counts), ids=tuple(() for _ in hosts))
    excluded_by_host = [_excluded_gpus(host, options) for host in hosts]
    indexes_by_host = [
        [gpu.index for gpu in host.facts.gpus or () if gpu.index not in excluded]
        for host, excluded in zip(hosts, excluded_by_host, strict=True)
    ]
    reasons = (
        (text, host.name)
        for host, excluded in zip(hosts, excluded_by_host, strict=True)
        for text in _describe_excluded(excluded)
    )
    return Accelerators(
        kind=kind,
        counts=tuple(map(len, indexes_by_host)),
        ids=tuple(
            () if indexes == list(range(len(indexes))) else tuple(map(str, indexes))
            for indexes in indexes_by_host
        ),
        why=annotate_hosts(reasons, hosts),
    )


def _choose_kind(
    hosts: Sequence[ScannedHost], requested: Accelerator | None
) -> tuple[Accelerator, list[int]]:
    for kind, (label, hint) in _GPUS.items():
        counts = [
            len(host.facts.gpus or ()) if kind == "nvidia" else host.amd_gpus for host in hosts
        ]
        if requested != kind and (requested is not None or not any(counts)):
            continue
        without = [host for host, count in zip(hosts, counts, strict=True) if not count]
        if not without:
            return kind, counts
        with_gpus = [host.name for host in hosts if host not in without]
        others = f", while {fold(with_gpus)} has some" if with_gpus else ""
        raise RequestError(
            f"{fold([host.name for host in without])}: no {label} found{others}",
            evidence=[f"{host.name}: " + (_gpu_error(host) or "none found") for host in without],
            hint=hint,
        )
    return "cpu", [max(1, host.survey.numa_nodes or 1) for host in hosts]


def _gpu_error(host: ScannedHost) -> str:
    text = host.facts.part_errors.get("gpus", "")
    return untrusted.excerpt(text.strip().partition("\n")[0])


def _describe_excluded(excluded: Mapping[int, str]) -> Iterator[str]:
    for shared_reason in dict.fromkeys(excluded.values()):
        indexes = [str(index) for index, reason in excluded.items() if reason == shared_reason]
        yield f"not GPU {', '.join(indexes)}: {shared_reason}"


def _excluded_gpus(host: ScannedHost, options: InitOptions) -> dict[int, str]:
    """Return the GPUs to exclude, with reasons: in use, driving a display, or in MIG mode.

    A host without any other GPU keeps all of them; `vlaunch check` reports the problem.
    """
    gpus = host.facts.gpus or ()
    excluded = {gpu.index: why for gpu in gpus if (why := _exclusion_reason(host, gpu, options))}
    return excluded if len(excluded) < len(gpus) else {}


def _exclusion_reason(host: ScannedHost, gpu: Gpu, options: InitOptions) -> str:
    for grant in host.facts.gpu_allocations:
        if grant.cluster != options.cluster and grant.includes(gpu.index, gpu.uuid):
            return f"used by cluster {grant.cluster}"
    state = next(
        (state for state in host.survey.gpus if state.index == gpu.index), GpuState(index=0)
    )
    if state.mig:
        return "split into instances (MIG)"
    if state.display:
        return "drives a display"
    own_containers = {container.id for container in host.facts.containers}
    others = [
        process
        for process in host.facts.gpu_processes or ()
        if process.gpu == gpu.uuid and not process.runs_in(own_containers)
    ]
    if sum(process.memory for process in others) < _BUSY_MIB:
        return ""
    return (
        f"in use by {', '.join(sorted({process.user or 'an unknown user' for process in others}))}"
    )
