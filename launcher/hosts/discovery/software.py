"""Choice of the vLLM image, the Hugging Face home and the state directory, with reasons."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain

from launcher.core.domain import Accelerator, fold, natural_key
from launcher.hosts.discovery.host_descriptions import (
    annotate_hosts,
    format_bytes,
    group_names,
    host_suffix,
)
from launcher.hosts.discovery.local_assets import Home
from launcher.hosts.discovery.shape import HF_HOME, Choice, ScannedHost

VLLM = "v0.33.0"
# https://docs.vllm.ai/en/stable/deployment/docker/: one repository per platform. For CPUs it is
# the release that runs on lab hosts.
_IMAGES: dict[Accelerator, str] = {
    "nvidia": f"vllm/vllm-openai:{VLLM}",
    "amd": f"vllm/vllm-openai-rocm:{VLLM}",
    "cpu": "vllm/vllm-openai-cpu:v0.32.0",
}
# Required by CUDA 13, which images without a suffix use
_CUDA_13 = 580
_NAMES: dict[Accelerator, str] = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs", "cpu": "processors"}
_MAX_LISTED = 6
# Paths and tags that an inventory accepts (`launcher.core.values`).
_PATH = re.compile(r"/(?!.*(?:^|/)\.\.(?:/|$))[A-Za-z0-9._@%+=/-]*[A-Za-z0-9._@%+=-]")
_TAG = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")


def choose_image(hosts: Sequence[ScannedHost], kind: Accelerator, requested: str | None) -> Choice:
    """Choose the image: as requested, else a vLLM image on all hosts, else vLLM's own."""
    best = _best_image(hosts, kind)
    if requested in (None, best.value):
        return best
    return Choice(value=requested or "", why=("as requested",))


def _best_image(hosts: Sequence[ScannedHost], kind: Accelerator) -> Choice:
    owners = group_names(
        (tag, host.name)
        for host in hosts
        for tag in host.assets.images
        if _TAG.fullmatch(tag) and _built_for(tag) == kind
    )
    common: list[str] = []  # on all hosts, newest last
    rejected: list[str] = []
    for tag, names in sorted(owners.items(), key=lambda item: natural_key(item[0])):
        if len(names) < len(hosts):
            rejected.append(f"not {tag}: only on {fold(names)}")
        elif len({host.assets.images[tag] for host in hosts}) > 1:
            rejected.append(f"not {tag}: on all hosts, but not the same image under this name")
        else:
            common.append(tag)
    if not common:
        tag, why = _upstream_image(hosts, kind)
        return Choice(value=tag, why=(why, *rejected[:_MAX_LISTED]))
    others = [f"not {tag}: also on all hosts" for tag in common[:-1]]
    why = "on all hosts already, the same on each"
    return Choice(value=common[-1], why=(why, *others[-_MAX_LISTED:], *rejected[:_MAX_LISTED]))


def _upstream_image(hosts: Sequence[ScannedHost], kind: Accelerator) -> tuple[str, str]:
    tag, why = _IMAGES[kind], f"vLLM's own image for {_NAMES[kind]}; `vlaunch up` pulls it"
    drivers = {_major(gpu.driver): gpu.driver for host in hosts for gpu in host.facts.gpus or ()}
    oldest = min(drivers, default=0)
    if kind != "nvidia" or not 0 < oldest < _CUDA_13:
        return tag, why
    reason = f"driver {drivers[oldest]} is older than {_CUDA_13}, which CUDA 13 needs"
    return f"{tag}-cu129", f"{why}; built for CUDA 12.9, because {reason}"


def choose_hf_home(hosts: Sequence[ScannedHost], requested: str | None) -> Choice:
    """Choose the Hugging Face home: as requested, else with models on all hosts, else the
    default.
    """
    # Homes by path, if an inventory can name it.
    homes = {
        host.name: {home.path: home for home in host.assets.homes if _PATH.fullmatch(home.path)}
        for host in hosts
    }
    paths = list(dict.fromkeys(chain.from_iterable(homes.values())))
    with_models = [
        path for path in paths if all(path in own and own[path].models for own in homes.values())
    ]
    chosen = requested or next(iter(with_models), HF_HOME)
    if chosen in with_models:
        reason = "has models on all hosts"
    elif chosen == HF_HOME:
        reason = f"the default{'' if with_models else ': no cache with models is on all hosts'}"
    else:
        reason = "as requested"
    free = {}
    for host in hosts:
        if chosen in homes[host.name]:
            free[host.name] = homes[host.name][chosen].free
        elif chosen == (requested or HF_HOME):  # probed even before the home exists
            free[host.name] = host.facts.disk_free
    contents = (_describe_contents(path, homes, hosts) for path in paths)
    return Choice(value=chosen, why=tuple(filter(None, (reason, _describe_free(free), *contents))))


def _describe_free(free: Mapping[str, int | None]) -> str:
    sizes = [(size, name) for name, size in free.items() if size is not None]
    if not sizes:
        return ""
    # The first host wins ties.
    smallest, host = min(sizes, key=lambda pair: pair[0])
    differs = any(size != smallest for size, _ in sizes)
    return f"{format_bytes(smallest)} free" + f", the least of all, on {host}" * differs


def _describe_contents(
    path: str, homes: Mapping[str, Mapping[str, Home]], hosts: Sequence[ScannedHost]
) -> str:
    owners = (
        (model, name) for name, own in homes.items() if path in own for model in own[path].models
    )
    models = annotate_hosts(sorted(owners, key=lambda pair: pair[0]), hosts)
    suffix = f" and {len(models) - _MAX_LISTED} more" if len(models) > _MAX_LISTED else ""
    return f"in {path}: {', '.join(models[:_MAX_LISTED])}{suffix}" if models else ""


def choose_state_dir(hosts: Sequence[ScannedHost]) -> tuple[Choice | None, tuple[str, ...]]:
    """Choose a folder on local disks if home directories are on a network file system.

    Containers run as root, which may not write to such a home (exports(5), `root_squash`), and
    hosts would share their compile caches. Without a choice the home is fine, or a warning explains
    the alternative.
    """
    caches = {host.name: host.facts.compile_cache for host in hosts}
    kinds = {name: cache.kind for name, cache in caches.items() if cache and cache.remote}
    if not kinds:
        return None, ()
    text = (
        f"the SSH user's home is on {' and '.join(sorted(set(kinds.values())))}, a network file"
        " system"
    )
    disks = [{disk.path: disk.free for disk in host.assets.disks} for host in hosts]
    free = {
        path: min(own_disks[path] for own_disks in disks)
        for path in disks[0]
        if all(path in own_disks for own_disks in disks)
    }
    if not free:
        user = hosts[0].facts.user or "USER"
        fix = (
            f"`sudo install -d -o {user} /var/lib/vlaunch` on the hosts, then set `state_dir:` to"
            " it"
        )
        none = f"{fold(list(kinds))}: {text}, and no local disk common to all hosts is writable"
        return None, (f"{none}: {fix}",)
    path = max(free, key=lambda path: free[path])
    why = (
        f"{text}{host_suffix(list(kinds), hosts)}, where root of the containers cannot write",
        f"{path} is on a local disk of each host: {format_bytes(free[path])} free",
        "the compile cache is there too, in `cache` (`cache_dir:`)",
    )
    return Choice(value=f"{path.rstrip('/')}/vlaunch", why=why), ()


def _built_for(tag: str) -> Accelerator | None:
    """Return the accelerator that an image's name implies, by default NVIDIA."""
    lowered = tag.lower()
    if "xpu" in lowered or "tpu" in lowered or "hpu" in lowered:
        return None
    if "rocm" in lowered:
        return "amd"
    return "cpu" if "cpu" in lowered else "nvidia"


def _major(driver: str) -> int:
    head = driver.split(".", maxsplit=1)[0]
    return int(head) if head.isdigit() else 0
