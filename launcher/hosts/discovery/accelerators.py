"""Accelerators of the hosts: which kind, how many, and which NVIDIA GPUs are left to others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.core import untrusted
from launcher.core.domain import Accelerator, fold
from launcher.core.errors import RequestError
from launcher.hosts.discovery.described import lines
from launcher.hosts.discovery.shape import Probed, Wishes
from launcher.tools.host import Gpu
from launcher.tools.survey import GpuState

# MiB in use by others from which on a GPU counts as theirs; a context alone takes some hundreds.
_HELD = 1024
# What each kind of GPU is called, and what to do where there is none.
_GPUS: dict[Accelerator, tuple[str, str]] = {
    "nvidia": (
        "NVIDIA GPU",
        "mend the driver there (`nvidia-smi`), leave the host out, or use the processors with"
        " `--accelerator cpu`",
    ),
    "amd": (
        "AMD GPU",
        "mend the driver there (`ls /sys/class/kfd`), leave the host out, or use `--accelerator"
        " cpu`",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """The kind of accelerator, and each host's number; `ids` has the GPUs of a host by index, and
    nothing where the first ones are meant.
    """

    kind: Accelerator
    counts: tuple[int, ...]
    ids: tuple[tuple[str, ...], ...]
    why: tuple[str, ...] = ()


def choose(hosts: Sequence[Probed], options: Wishes) -> Accelerators:
    """Choose what the model runs on; raises RequestError when only some hosts have any."""
    kind, counts = _kind(hosts, options.accelerator)
    if kind != "nvidia":
        return Accelerators(kind=kind, counts=tuple(counts), ids=tuple(() for _ in hosts))
    excluded_by_host = [_left_out(host, options) for host in hosts]
    indexes_by_host = [
        [gpu.index for gpu in host.facts.gpus or () if gpu.index not in excluded]
        for host, excluded in zip(hosts, excluded_by_host, strict=True)
    ]
    reasons = (
        (text, host.name)
        for host, excluded in zip(hosts, excluded_by_host, strict=True)
        for text in _told(excluded)
    )
    return Accelerators(
        kind=kind,
        counts=tuple(map(len, indexes_by_host)),
        ids=tuple(
            () if indexes == list(range(len(indexes))) else tuple(map(str, indexes))
            for indexes in indexes_by_host
        ),
        why=lines(reasons, hosts),
    )


def _kind(hosts: Sequence[Probed], requested: Accelerator | None) -> tuple[Accelerator, list[int]]:
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
            evidence=[
                f"{host.name}: {_first_line(host.facts.said.get('gpus', '')) or 'none found'}"
                for host in without
            ],
            hint=hint,
        )
    return "cpu", [max(1, host.survey.numa_nodes or 1) for host in hosts]


def _first_line(text: str) -> str:
    return untrusted.shown(text.strip().partition("\n")[0])


def _told(excluded: Mapping[int, str]) -> Iterator[str]:
    """Say once of all GPUs with the same reason that they are not used."""
    for shared_reason in dict.fromkeys(excluded.values()):
        indexes = [str(index) for index, reason in excluded.items() if reason == shared_reason]
        yield f"not GPU {', '.join(indexes)}: {shared_reason}"


def _left_out(host: Probed, options: Wishes) -> dict[int, str]:
    """Return the GPUs that others have, that drive a display, or that are split into instances.

    A host on which that would leave none keeps all of them: `vlaunch check` says what is wrong.
    """
    gpus = host.facts.gpus or ()
    excluded = {gpu.index: why for gpu in gpus if (why := _why_not(host, gpu, options))}
    return excluded if len(excluded) < len(gpus) else {}


def _why_not(host: Probed, gpu: Gpu, options: Wishes) -> str:
    """Say why a GPU should be left to others; empty when it need not."""
    for assignment in host.facts.given:
        if assignment.cluster != options.cluster and assignment.has(gpu.index, gpu.uuid):
            return f"cluster {assignment.cluster} has it"
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
    if sum(process.memory for process in others) < _HELD:
        return ""
    return f"in use by {', '.join(sorted({process.user or 'somebody' for process in others}))}"
