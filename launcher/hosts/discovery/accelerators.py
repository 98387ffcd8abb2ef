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


def choose(hosts: Sequence[Probed], wishes: Wishes) -> Accelerators:
    """Choose what the model runs on; raises RequestError when only some hosts have any."""
    kind, counts = _kind(hosts, wishes.accelerator)
    if kind != "nvidia":
        return Accelerators(kind=kind, counts=tuple(counts), ids=tuple(() for _ in hosts))
    out = [_left_out(host, wishes) for host in hosts]
    kept = [
        [gpu.index for gpu in host.facts.gpus or () if gpu.index not in others]
        for host, others in zip(hosts, out, strict=True)
    ]
    why = (
        (text, host.name)
        for host, not_used in zip(hosts, out, strict=True)
        for text in _told(not_used)
    )
    return Accelerators(
        kind=kind,
        counts=tuple(map(len, kept)),
        ids=tuple(
            () if indexes == list(range(len(indexes))) else tuple(map(str, indexes))
            for indexes in kept
        ),
        why=lines(why, hosts),
    )


def _kind(hosts: Sequence[Probed], wished: Accelerator | None) -> tuple[Accelerator, list[int]]:
    for kind, (word, hint) in _GPUS.items():
        counts = [
            len(host.facts.gpus or ()) if kind == "nvidia" else host.amd_gpus for host in hosts
        ]
        if wished != kind and (wished is not None or not any(counts)):
            continue
        lacking = [host for host, count in zip(hosts, counts, strict=True) if not count]
        if not lacking:
            return kind, counts
        have = [host.name for host in hosts if host not in lacking]
        others = f", while {fold(have)} has some" if have else ""
        raise RequestError(
            f"{fold([host.name for host in lacking])}: no {word} found{others}",
            evidence=[
                f"{host.name}: {_first_line(host.facts.said.get('gpus', '')) or 'none found'}"
                for host in lacking
            ],
            hint=hint,
        )
    return "cpu", [max(1, host.survey.numa_nodes or 1) for host in hosts]


def _first_line(said: str) -> str:
    return untrusted.shown(said.strip().partition("\n")[0])


def _told(out: Mapping[int, str]) -> Iterator[str]:
    """Say once of all GPUs with the same reason that they are not used."""
    for why in dict.fromkeys(out.values()):
        which = [str(index) for index, other in out.items() if other == why]
        yield f"not GPU {', '.join(which)}: {why}"


def _left_out(host: Probed, wishes: Wishes) -> dict[int, str]:
    """Return the GPUs that others have, that drive a display, or that are split into instances.

    A host on which that would leave none keeps all of them: `vlaunch check` says what is wrong.
    """
    there = host.facts.gpus or ()
    out = {gpu.index: why for gpu in there if (why := _why_not(host, gpu, wishes))}
    return out if len(out) < len(there) else {}


def _why_not(host: Probed, gpu: Gpu, wishes: Wishes) -> str:
    """Say why a GPU should be left to others; empty when it need not."""
    for given in host.facts.given:
        if given.cluster != wishes.cluster and given.has(gpu.index, gpu.uuid):
            return f"cluster {given.cluster} has it"
    state = next(
        (state for state in host.survey.gpus if state.index == gpu.index), GpuState(index=0)
    )
    if state.mig:
        return "split into instances (MIG)"
    if state.display:
        return "drives a display"
    own = {container.id for container in host.facts.containers}
    others = [
        process
        for process in host.facts.gpu_processes or ()
        if process.gpu == gpu.uuid and not process.runs_in(own)
    ]
    if sum(process.memory for process in others) < _HELD:
        return ""
    return f"in use by {', '.join(sorted({process.user or 'somebody' for process in others}))}"
