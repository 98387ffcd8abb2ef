"""Which NVIDIA GPUs of each host to use, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.discovery.described import on_some
from launcher.discovery.shape import Probed, Wishes
from launcher.tools.host import Gpu
from launcher.tools.survey import GpuState

# MiB in use by others from which on a GPU counts as theirs; a context alone takes some hundreds.
_HELD = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The GPUs of each host, by index; nothing for a host whose first ones are meant."""

    counts: tuple[int, ...]
    ids: tuple[tuple[str, ...], ...]
    why: tuple[str, ...] = ()


def choose(
    hosts: Sequence[Probed], order: Sequence[str], wishes: Wishes, counts: Sequence[int]
) -> Chosen:
    """Leave out GPUs that others have, that drive a display, or that are split into instances.

    A host on which that would leave none keeps all of them: `vlaunch check` says what is wrong.
    """
    out = [_left_out(host, wishes) for host in hosts]
    kept = [_kept(host, each) for host, each in zip(hosts, out, strict=True)]
    reasons: dict[str, list[str]] = {}
    for name, each in zip(order, out, strict=True):
        for text in _told(each):
            reasons.setdefault(text, []).append(name)
    return Chosen(
        counts=tuple(len(each) or count for each, count in zip(kept, counts, strict=True)),
        ids=tuple(_named(each) for each in kept),
        why=tuple(text + on_some(names, order) for text, names in reasons.items()),
    )


def _kept(host: Probed, out: Mapping[int, str]) -> list[int]:
    return [gpu.index for gpu in host.facts.gpus or () if gpu.index not in out]


def _named(indexes: Sequence[int]) -> tuple[str, ...]:
    """Name GPUs by their indexes; nothing where they are the first ones, as a number says."""
    return () if list(indexes) == list(range(len(indexes))) else tuple(map(str, indexes))


def _told(out: Mapping[int, str]) -> Iterator[str]:
    """Say once of all GPUs with the same reason that they are not used."""
    for why in dict.fromkeys(out.values()):
        which = [str(index) for index, other in out.items() if other == why]
        yield f"not GPU {', '.join(which)}: {why}"


def _left_out(host: Probed, wishes: Wishes) -> dict[int, str]:
    there = host.facts.gpus or ()
    found = {gpu.index: why for gpu in there if (why := _why_not(host, gpu, wishes))}
    return found if len(found) < len(there) else {}


def _why_not(host: Probed, gpu: Gpu, wishes: Wishes) -> str:
    """Say why a GPU should be left to others; empty when it need not."""
    for given in host.facts.given:
        if given.cluster != wishes.cluster and given.has(gpu.index, gpu.uuid):
            return f"cluster {given.cluster} has it"
    return _odd(host, gpu) or _busy(host, gpu)


def _odd(host: Probed, gpu: Gpu) -> str:
    state = next((each for each in host.survey.gpus if each.index == gpu.index), GpuState(index=0))
    if state.mig:
        return "split into instances (MIG)"
    return "drives a display" if state.display else ""


def _busy(host: Probed, gpu: Gpu) -> str:
    own = {container.id for container in host.facts.containers}
    on_it = [each for each in host.facts.gpu_processes or () if each.gpu == gpu.uuid]
    strangers = [each for each in on_it if not each.runs_in(own)]
    if sum(each.memory for each in strangers) < _HELD:
        return ""
    return f"in use by {', '.join(sorted({each.user or 'somebody' for each in strangers}))}"
