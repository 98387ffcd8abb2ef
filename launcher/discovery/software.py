"""What the hosts run on and with: accelerators, the vLLM image, the Hugging Face home, and the
words for each choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, compress

from launcher.discovery.described import on_some, size_of
from launcher.discovery.local_assets import Home
from launcher.discovery.shape import HF_HOME, Choice, Probed
from launcher.errors import RequestError
from launcher.model import Accelerator, fold, natural
from launcher.tools import untrusted

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
_MANY = 6
# What an inventory takes (`launcher.values`); others cannot be chosen, however good.
_PATH = re.compile(r"/(?!.*(?:^|/)\.\.(?:/|$))[A-Za-z0-9._@%+=/-]*[A-Za-z0-9._@%+=-]")
_TAG = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")


def accelerator(
    hosts: Sequence[Probed], order: Sequence[str], wished: Accelerator | None
) -> tuple[Accelerator, list[int]]:
    """Return what the model runs on and how many of it each host has; raises RequestError when only
    some hosts have any.
    """
    for kind in _GPUS:
        counts = [gpus(host, kind) for host in hosts]
        if wished == kind or (wished is None and any(counts)):
            if not all(counts):
                raise _lacking(kind, hosts, order, counts)
            return kind, counts
    return "cpu", [max(1, host.survey.numa_nodes or 1) for host in hosts]


def gpus(host: Probed, kind: Accelerator) -> int:
    """Return how many GPUs of a kind a host has."""
    return len(host.facts.gpus or ()) if kind == "nvidia" else host.amd_gpus


def _lacking(
    kind: Accelerator, hosts: Sequence[Probed], order: Sequence[str], counts: Sequence[int]
) -> RequestError:
    have = list(compress(order, counts))
    lacking = {name: host for name, host in zip(order, hosts, strict=True) if name not in have}
    word, hint = _GPUS[kind]
    others = f", while {fold(have)} has some" if have else ""
    return RequestError(
        f"{fold(list(lacking))}: no {word} found{others}",
        evidence=[
            f"{name}: {_first_line(host.facts.said.get('gpus', '')) or 'none found'}"
            for name, host in lacking.items()
        ],
        hint=hint,
    )


def _first_line(said: str) -> str:
    return untrusted.shown(said.strip().partition("\n")[0])


def image(
    hosts: Sequence[Probed], order: Sequence[str], kind: Accelerator, wished: str | None
) -> Choice:
    """Choose the image: the wish, else one of vLLM that all hosts have, else vLLM's own for the
    accelerator and driver.
    """
    found = _image(hosts, order, kind)
    return found if wished in (None, found.value) else Choice(value=wished or "", why=("as asked",))


def _image(hosts: Sequence[Probed], order: Sequence[str], kind: Accelerator) -> Choice:
    there, not_there = _listed(hosts, order, kind)
    if not there:
        tag, why = _pulled(hosts, kind)
        return Choice(value=tag, why=(why, *not_there[:_MANY]))
    others = [f"not {tag}: also on all hosts" for tag in there[:-1]]
    return Choice(
        value=there[-1],
        why=(
            "on all hosts already, the same on each",
            *others[-_MANY:],
            *not_there[:_MANY],
        ),
    )


def _listed(
    hosts: Sequence[Probed], order: Sequence[str], kind: Accelerator
) -> tuple[list[str], list[str]]:
    """Return the images that all hosts have, the newest last, and why the others cannot be used."""
    owners: dict[str, list[str]] = {}
    for host, name in zip(hosts, order, strict=True):
        for tag in host.assets.images:
            if _TAG.fullmatch(tag) and _built_for(tag) == kind:
                owners.setdefault(tag, []).append(name)
    there: list[str] = []
    not_there: list[str] = []
    for tag, names in sorted(owners.items(), key=lambda item: natural(item[0])):
        if len(names) < len(hosts):
            not_there.append(f"not {tag}: only on {fold(names)}")
        elif len({host.assets.images[tag] for host in hosts}) > 1:
            not_there.append(f"not {tag}: on all hosts, but not the same image under this name")
        else:
            there.append(tag)
    return there, not_there


def _pulled(hosts: Sequence[Probed], kind: Accelerator) -> tuple[str, str]:
    """Return vLLM's own image for the accelerator and the oldest driver, and why it is that one."""
    tag, why = _IMAGES[kind], f"vLLM's own image for {_NAMES[kind]}; `vlaunch up` pulls it"
    drivers = {_major(gpu.driver): gpu.driver for host in hosts for gpu in host.facts.gpus or ()}
    oldest = min(drivers, default=0)
    if kind != "nvidia" or not 0 < oldest < _CUDA_13:
        return tag, why
    older = f"driver {drivers[oldest]} is older than {_CUDA_13}, which CUDA 13 needs"
    return f"{tag}-cu129", f"{why}; built for CUDA 12.9, because {older}"


_NAMES: dict[Accelerator, str] = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs", "cpu": "processors"}


def hf_home(hosts: Sequence[Probed], order: Sequence[str], wished: str | None) -> Choice:
    """Choose the Hugging Face home: the wish, else one that has models on all hosts, else the
    default.
    """
    homes = [_homes(host) for host in hosts]
    paths = list(dict.fromkeys(chain.from_iterable(homes)))
    full = [path for path in paths if all(_models(each, path) for each in homes)]
    asked = wished or HF_HOME
    chosen = wished or next(iter(full), HF_HOME)
    free = [_free(host, each, chosen, asked) for host, each in zip(hosts, homes, strict=True)]
    why = [
        _why_home(chosen, full),
        _least(free, order),
        *(_contents(path, homes, order) for path in paths),
    ]
    return Choice(value=chosen, why=tuple(filter(None, why)))


def _homes(host: Probed) -> dict[str, Home]:
    """Return the Hugging Face homes of a host that an inventory can name, by their paths."""
    return {home.path: home for home in host.assets.homes if _PATH.fullmatch(home.path)}


def _models(homes: Mapping[str, Home], path: str) -> tuple[str, ...]:
    return homes[path].models if path in homes else ()


def _free(host: Probed, homes: Mapping[str, Home], path: str, asked: str) -> int | None:
    """Return the bytes free for a home; of the one that was asked for, the probe knows them before
    it is there.
    """
    if path in homes:
        return homes[path].free
    return host.facts.disk_free if path == asked else None


def _why_home(chosen: str, full: Sequence[str]) -> str:
    if chosen in full:
        return "has models on all hosts"
    if chosen == HF_HOME:
        return f"the default{'' if full else ': no cache with models is on all hosts'}"
    return "as asked"


def _least(free: Sequence[int | None], order: Sequence[str]) -> str:
    """Say how much is free where it is least; empty when no host knows."""
    known = [(size, name) for size, name in zip(free, order, strict=True) if size is not None]
    if not known:
        return ""
    least, where = min(known)
    differs = any(size != least for size, _ in known)
    return f"{size_of(least)} free" + (f", the least of all, on {where}" if differs else "")


def _contents(path: str, homes: Sequence[Mapping[str, Home]], order: Sequence[str]) -> str:
    """Say which models are in a home, and where they are not on all hosts; empty when there is
    none.
    """
    owners: dict[str, list[str]] = {}
    for each, name in zip(homes, order, strict=True):
        for model in _models(each, path):
            owners.setdefault(model, []).append(name)
    if not owners:
        return ""
    told = [model + on_some(names, order) for model, names in sorted(owners.items())]
    more = f" and {len(told) - _MANY} more" if len(told) > _MANY else ""
    return f"in {path}: {', '.join(told[:_MANY])}{more}"


def _built_for(tag: str) -> Accelerator | None:
    """Return what an image is for, as far as its name tells: one without a word is for NVIDIA GPUs,
    as vLLM's own is.
    """
    lowered = tag.lower()
    if "xpu" in lowered or "tpu" in lowered or "hpu" in lowered:
        return None
    if "rocm" in lowered:
        return "amd"
    return "cpu" if "cpu" in lowered else "nvidia"


def _major(driver: str) -> int:
    head = driver.split(".", maxsplit=1)[0]
    return int(head) if head.isdigit() else 0
