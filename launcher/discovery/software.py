"""What the hosts run on and with: accelerators, the vLLM image, the Hugging Face home, and the
words for each choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.discovery.shape import HF_HOME, Choice, Probed
from launcher.errors import RequestError
from launcher.model import Accelerator, fold, natural

VLLM = "v0.32.0"
# https://docs.vllm.ai/en/stable/deployment/docker/: one repository per platform.
_IMAGES: dict[Accelerator, str] = {
    "nvidia": f"vllm/vllm-openai:{VLLM}",
    "amd": f"vllm/vllm-openai-rocm:{VLLM}",
    "cpu": f"vllm/vllm-openai-cpu:{VLLM}",
}
# CUDA 13, which the tag without a suffix is built with, needs this driver
# (https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/).
_CUDA_13 = 580
_MANY = 6
# What an inventory takes (`launcher.inventory.values`); others cannot be chosen, however good.
_PATH = re.compile(r"/(?!.*(?:^|/)\.\.(?:/|$))[A-Za-z0-9._@%+=/-]*[A-Za-z0-9._@%+=-]")
_TAG = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")


def accelerator(
    hosts: Sequence[Probed], order: Sequence[str], wished: Accelerator | None
) -> tuple[Accelerator, list[int]]:
    """Return what the model runs on and how many of it each host has; raises RequestError when only
    some hosts have any.
    """
    counts: dict[Accelerator, list[int]] = {
        "nvidia": [len(host.facts.gpus or ()) for host in hosts],
        "amd": [max(host.stock.amd_gpus, host.facts.amd_gpus or 0) for host in hosts],
        "cpu": [max(1, host.survey.numa_nodes or 1) for host in hosts],
    }
    words: tuple[tuple[Accelerator, str], ...] = (("nvidia", "NVIDIA GPU"), ("amd", "AMD GPU"))
    for kind, word in words:
        if wished not in (None, kind) or (wished is None and not any(counts[kind])):
            continue
        lacking = [
            (name, host)
            for name, host, count in zip(order, hosts, counts[kind], strict=True)
            if not count
        ]
        if lacking:
            have = [name for name, count in zip(order, counts[kind], strict=True) if count]
            told = [
                f"{name}: {host.facts.said.get('gpus', 'none found').splitlines()[0][:200]}"
                for name, host in lacking
            ]
            raise RequestError(
                f"{fold([name for name, _ in lacking])}: no {word} found"
                + (f", while {fold(have)} has some" if have else ""),
                evidence=told,
                hint=(
                    "mend the driver there (`nvidia-smi`), leave the host out, or use the"
                    " processors with `--accelerator cpu`"
                    if kind == "nvidia"
                    else (
                        "mend the driver there (`ls /sys/class/kfd`), leave the host out, or use"
                        " `--accelerator cpu`"
                    )
                ),
            )
        return kind, counts[kind]
    return "cpu", counts["cpu"]


def image(
    hosts: Sequence[Probed], order: Sequence[str], kind: Accelerator, wished: str | None
) -> Choice:
    """Choose the image: the wish, else one of vLLM that all hosts have, else vLLM's own for the
    accelerator and driver.
    """
    found = _image(hosts, order, kind)
    return found if wished in (None, found.value) else Choice(value=wished or "", why=("as asked",))


def _image(hosts: Sequence[Probed], order: Sequence[str], kind: Accelerator) -> Choice:
    listed: dict[str, list[str]] = {}
    for host, name in zip(hosts, order, strict=True):
        for tag in host.stock.images:
            if _TAG.fullmatch(tag) and _built_for(tag) == kind:
                listed.setdefault(tag, []).append(name)
    why: list[str] = []
    there = []
    for tag, names in sorted(listed.items(), key=lambda item: natural(item[0])):
        if len(names) < len(hosts):
            why.append(f"not {tag}: only on {fold(names)}")
        elif len({host.stock.images[tag] for host in hosts}) > 1:
            why.append(f"not {tag}: on all hosts, but not the same image under this name")
        else:
            there.append(tag)
    if there:
        others = [f"not {tag}: also on all hosts" for tag in there[:-1]]
        return Choice(
            value=there[-1],
            why=("on all hosts already, the same on each", *others[-_MANY:], *why[:_MANY]),
        )
    chosen, reason = _IMAGES[kind], f"vLLM's own image for {_NAMES[kind]}; `vlaunch up` pulls it"
    drivers = {_major(gpu.driver): gpu.driver for host in hosts for gpu in host.facts.gpus or ()}
    if kind == "nvidia" and drivers and 0 < min(drivers) < _CUDA_13:
        chosen += "-cu129"
        reason += (
            f"; built for CUDA 12.9, because driver {drivers[min(drivers)]} is older than"
            f" {_CUDA_13}, which CUDA 13 needs"
        )
    return Choice(value=chosen, why=(reason, *why[:_MANY]))


_NAMES: dict[Accelerator, str] = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs", "cpu": "processors"}


def hf_home(hosts: Sequence[Probed], order: Sequence[str], wished: str | None) -> Choice:
    """Choose the Hugging Face home: the wish, else one that has models on all hosts, else the
    default.
    """
    homes = [
        {home.path: home for home in host.stock.homes if _PATH.fullmatch(home.path)}
        for host in hosts
    ]
    paths = list(dict.fromkeys(path for each in homes for path in each))
    full = [path for path in paths if all(path in each and each[path].models for each in homes)]
    chosen = wished or next(iter(full), HF_HOME)
    reason = (
        "has models on all hosts"
        if chosen in full
        else "the default: no cache with models is on all hosts"
    )
    why = [reason if chosen in full or chosen == HF_HOME else "as asked"]
    free = [
        (
            each[chosen].free
            if chosen in each
            else host.facts.disk_free
            if chosen == (wished or HF_HOME)
            else None
        )
        for host, each in zip(hosts, homes, strict=True)
    ]
    known = [(size, name) for size, name in zip(free, order, strict=True) if size is not None]
    if known:
        least, where = min(known)
        why.append(
            f"{size_of(least)} free"
            + (f", the least of all, on {where}" if len({s for s, _ in known}) > 1 else "")
        )
    for path in paths:
        owners: dict[str, list[str]] = {}
        for each, name in zip(homes, order, strict=True):
            for model in each[path].models if path in each else ():
                owners.setdefault(model, []).append(name)
        if not owners:
            continue
        told = [
            m if len(n) == len(hosts) else f"{m} (on {fold(n)})" for m, n in sorted(owners.items())
        ]
        more = f" and {len(told) - _MANY} more" if len(told) > _MANY else ""
        why.append(f"in {path}: {', '.join(told[:_MANY])}{more}")
    return Choice(value=chosen, why=tuple(why))


def size_of(count: int) -> str:
    """Write bytes as people do: `81 GiB`, `1.5 TiB`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return (
        f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "B" else f"{value:.1f} {units[0]}"
    )


def _built_for(tag: str) -> Accelerator | None:
    """Return what an image is for, as far as its name tells: one without a word is for NVIDIA GPUs,
    as vLLM's own is.
    """
    lowered = tag.lower()
    if "xpu" in lowered or "tpu" in lowered or "hpu" in lowered:
        return None
    return "amd" if "rocm" in lowered else "cpu" if "cpu" in lowered else "nvidia"


def _major(driver: str) -> int:
    head = driver.split(".", maxsplit=1)[0]
    return int(head) if head.isdigit() else 0
