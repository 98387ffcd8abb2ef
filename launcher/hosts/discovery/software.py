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


def image(hosts: Sequence[Probed], kind: Accelerator, wished: str | None) -> Choice:
    """Choose the image: the wish, else one of vLLM that all hosts have, else vLLM's own for the
    accelerator and driver.
    """
    found = _image(hosts, kind)
    return found if wished in (None, found.value) else Choice(value=wished or "", why=("as asked",))


def _image(hosts: Sequence[Probed], kind: Accelerator) -> Choice:
    owners = grouped(
        (tag, host.name)
        for host in hosts
        for tag in host.assets.images
        if _TAG.fullmatch(tag) and _built_for(tag) == kind
    )
    there: list[str] = []  # on all hosts, the newest last
    not_there: list[str] = []
    for tag, names in sorted(owners.items(), key=lambda item: natural(item[0])):
        if len(names) < len(hosts):
            not_there.append(f"not {tag}: only on {fold(names)}")
        elif len({host.assets.images[tag] for host in hosts}) > 1:
            not_there.append(f"not {tag}: on all hosts, but not the same image under this name")
        else:
            there.append(tag)
    if not there:
        tag, why = _pulled(hosts, kind)
        return Choice(value=tag, why=(why, *not_there[:_MANY]))
    others = [f"not {tag}: also on all hosts" for tag in there[:-1]]
    why = "on all hosts already, the same on each"
    return Choice(value=there[-1], why=(why, *others[-_MANY:], *not_there[:_MANY]))


def _pulled(hosts: Sequence[Probed], kind: Accelerator) -> tuple[str, str]:
    """Return vLLM's own image for the accelerator and the oldest driver, and why it is that one."""
    tag, why = _IMAGES[kind], f"vLLM's own image for {_NAMES[kind]}; `vlaunch up` pulls it"
    drivers = {_major(gpu.driver): gpu.driver for host in hosts for gpu in host.facts.gpus or ()}
    oldest = min(drivers, default=0)
    if kind != "nvidia" or not 0 < oldest < _CUDA_13:
        return tag, why
    older = f"driver {drivers[oldest]} is older than {_CUDA_13}, which CUDA 13 needs"
    return f"{tag}-cu129", f"{why}; built for CUDA 12.9, because {older}"


def hf_home(hosts: Sequence[Probed], wished: str | None) -> Choice:
    """Choose the Hugging Face home: the wish, else one that has models on all hosts, else the
    default.
    """
    # Those that an inventory can name, by their paths.
    homes = {
        host.name: {home.path: home for home in host.assets.homes if _PATH.fullmatch(home.path)}
        for host in hosts
    }
    paths = list(dict.fromkeys(chain.from_iterable(homes.values())))
    full = [
        path for path in paths if all(path in own and own[path].models for own in homes.values())
    ]
    chosen = wished or next(iter(full), HF_HOME)
    if chosen in full:
        reason = "has models on all hosts"
    elif chosen == HF_HOME:
        reason = f"the default{'' if full else ': no cache with models is on all hosts'}"
    else:
        reason = "as asked"
    free = {}
    for host in hosts:
        if chosen in homes[host.name]:
            free[host.name] = homes[host.name][chosen].free
        elif chosen == (wished or HF_HOME):  # the probe knows it before the home is there
            free[host.name] = host.facts.disk_free
    contents = (_contents(path, homes, hosts) for path in paths)
    return Choice(value=chosen, why=tuple(filter(None, (reason, _least(free), *contents))))


def _least(free: Mapping[str, int | None]) -> str:
    """Say how much is free where it is least; empty when no host knows."""
    known = [(size, name) for name, size in free.items() if size is not None]
    if not known:
        return ""
    # Of equal ones, the host that comes first.
    least, where = min(known, key=lambda pair: pair[0])
    differs = any(size != least for size, _ in known)
    return f"{size_of(least)} free" + f", the least of all, on {where}" * differs


def _contents(path: str, homes: Mapping[str, Mapping[str, Home]], hosts: Sequence[Probed]) -> str:
    """Say which models are in a home, and where they are not on all hosts; empty when there is
    none.
    """
    owners = (
        (model, name) for name, own in homes.items() if path in own for model in own[path].models
    )
    told = lines(sorted(owners, key=lambda pair: pair[0]), hosts)
    more = f" and {len(told) - _MANY} more" if len(told) > _MANY else ""
    return f"in {path}: {', '.join(told[:_MANY])}{more}" if told else ""


def state_dir(hosts: Sequence[Probed]) -> tuple[Choice | None, tuple[str, ...]]:
    """Choose a folder on a disk of each host's own where homes lie over the network: there, by
    default, root may not write (exports(5), `root_squash`), which containers are, and hosts would
    share what engines compile for themselves alone.

    Without a choice the login's home will do, or there is none better, which a warning tells.
    """
    compiled = {host.name: host.facts.compiled for host in hosts}
    kinds = {name: found.kind for name, found in compiled.items() if found and found.remote}
    if not kinds:
        return None, ()
    text = f"the login's home lies on {' and '.join(sorted(set(kinds.values())))}, over the network"
    disks = [{disk.path: disk.free for disk in host.assets.disks} for host in hosts]
    free = {
        path: min(own[path] for own in disks)
        for path in disks[0]
        if all(path in own for own in disks)
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
