"""Software of the hosts: the vLLM image, the Hugging Face home and the state directory, with the
words for each choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain

from launcher.core.domain import Accelerator, fold, natural
from launcher.hosts.discovery.described import grouped, lines, on_some, size_of
from launcher.hosts.discovery.local_assets import Home
from launcher.hosts.discovery.shape import HF_HOME, Choice, Probed

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
_NAMES: dict[Accelerator, str] = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs", "cpu": "processors"}
_MANY = 6
# What an inventory takes (`launcher.core.values`); others cannot be chosen, however good.
_PATH = re.compile(r"/(?!.*(?:^|/)\.\.(?:/|$))[A-Za-z0-9._@%+=/-]*[A-Za-z0-9._@%+=-]")
_TAG = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")


def image(hosts: Sequence[Probed], kind: Accelerator, requested: str | None) -> Choice:
    """Choose the image: the wish, else one of vLLM that all hosts have, else vLLM's own for the
    accelerator and driver.
    """
    choice = _image(hosts, kind)
    return (
        choice
        if requested in (None, choice.value)
        else Choice(value=requested or "", why=("as asked",))
    )


def _image(hosts: Sequence[Probed], kind: Accelerator) -> Choice:
    owners = grouped(
        (tag, host.name)
        for host in hosts
        for tag in host.assets.images
        if _TAG.fullmatch(tag) and _built_for(tag) == kind
    )
    common: list[str] = []  # on all hosts, the newest last
    rejected: list[str] = []
    for tag, names in sorted(owners.items(), key=lambda item: natural(item[0])):
        if len(names) < len(hosts):
            rejected.append(f"not {tag}: only on {fold(names)}")
        elif len({host.assets.images[tag] for host in hosts}) > 1:
            rejected.append(f"not {tag}: on all hosts, but not the same image under this name")
        else:
            common.append(tag)
    if not common:
        tag, why = _pulled(hosts, kind)
        return Choice(value=tag, why=(why, *rejected[:_MANY]))
    others = [f"not {tag}: also on all hosts" for tag in common[:-1]]
    why = "on all hosts already, the same on each"
    return Choice(value=common[-1], why=(why, *others[-_MANY:], *rejected[:_MANY]))


def _pulled(hosts: Sequence[Probed], kind: Accelerator) -> tuple[str, str]:
    """Return vLLM's own image for the accelerator and the oldest driver, and why it is that one."""
    tag, why = _IMAGES[kind], f"vLLM's own image for {_NAMES[kind]}; `vlaunch up` pulls it"
    drivers = {_major(gpu.driver): gpu.driver for host in hosts for gpu in host.facts.gpus or ()}
    oldest = min(drivers, default=0)
    if kind != "nvidia" or not 0 < oldest < _CUDA_13:
        return tag, why
    reason = f"driver {drivers[oldest]} is older than {_CUDA_13}, which CUDA 13 needs"
    return f"{tag}-cu129", f"{why}; built for CUDA 12.9, because {reason}"


def hf_home(hosts: Sequence[Probed], requested: str | None) -> Choice:
    """Choose the Hugging Face home: the wish, else one that has models on all hosts, else the
    default.
    """
    # Those that an inventory can name, by their paths.
    homes = {
        host.name: {home.path: home for home in host.assets.homes if _PATH.fullmatch(home.path)}
        for host in hosts
    }
    paths = list(dict.fromkeys(chain.from_iterable(homes.values())))
    with_models = [
        path
        for path in paths
        if all(path in own_homes and own_homes[path].models for own_homes in homes.values())
    ]
    chosen = requested or next(iter(with_models), HF_HOME)
    if chosen in with_models:
        reason = "has models on all hosts"
    elif chosen == HF_HOME:
        reason = f"the default{'' if with_models else ': no cache with models is on all hosts'}"
    else:
        reason = "as asked"
    free = {}
    for host in hosts:
        if chosen in homes[host.name]:
            free[host.name] = homes[host.name][chosen].free
        elif chosen == (requested or HF_HOME):  # the probe knows it before the home is there
            free[host.name] = host.facts.disk_free
    contents = (_contents(path, homes, hosts) for path in paths)
    return Choice(value=chosen, why=tuple(filter(None, (reason, _least(free), *contents))))


def _least(free: Mapping[str, int | None]) -> str:
    """Say how much is free where it is least; empty when no host knows."""
    sizes = [(size, name) for name, size in free.items() if size is not None]
    if not sizes:
        return ""
    # Of equal ones, the host that comes first.
    smallest, host = min(sizes, key=lambda pair: pair[0])
    differs = any(size != smallest for size, _ in sizes)
    return f"{size_of(smallest)} free" + f", the least of all, on {host}" * differs


def _contents(path: str, homes: Mapping[str, Mapping[str, Home]], hosts: Sequence[Probed]) -> str:
    """Say which models are in a home, and where they are not on all hosts; empty when there is
    none.
    """
    owners = (
        (model, name)
        for name, own_homes in homes.items()
        if path in own_homes
        for model in own_homes[path].models
    )
    models = lines(sorted(owners, key=lambda pair: pair[0]), hosts)
    suffix = f" and {len(models) - _MANY} more" if len(models) > _MANY else ""
    return f"in {path}: {', '.join(models[:_MANY])}{suffix}" if models else ""


def state_dir(hosts: Sequence[Probed]) -> tuple[Choice | None, tuple[str, ...]]:
    """Choose a folder on a disk of each host's own where homes lie over the network: there, by
    default, root may not write (exports(5), `root_squash`), which containers are, and hosts would
    share what engines compile for themselves alone.

    Without a choice the login's home will do, or there is none better, which a warning tells.
    """
    caches = {host.name: host.facts.compiled for host in hosts}
    kinds = {name: cache.kind for name, cache in caches.items() if cache and cache.remote}
    if not kinds:
        return None, ()
    text = f"the login's home lies on {' and '.join(sorted(set(kinds.values())))}, over the network"
    disks = [{disk.path: disk.free for disk in host.assets.disks} for host in hosts]
    free = {
        path: min(own_disks[path] for own_disks in disks)
        for path in disks[0]
        if all(path in own_disks for own_disks in disks)
    }
    if not free:
        user = hosts[0].facts.user or "LOGIN"
        fix = f"`sudo install -d -o {user} /var/lib/vlaunch` there, then `state_dir:` names it"
        none = f"{fold(list(kinds))}: {text}, and no disk of all hosts' own is the login's to write"
        return None, (f"{none}: {fix}",)
    path = max(free, key=lambda path: free[path])
    why = (
        f"{text}{on_some(list(kinds), hosts)}, where containers' root may not write",
        f"{path} is on a disk of each host's own: {size_of(free[path])} free",
        "what engines compile lies there, too, in `cache` (`cache_dir:`)",
    )
    return Choice(value=f"{path.rstrip('/')}/vlaunch", why=why), ()


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
