"""Scan for usable assets on a host: vLLM images, Hugging Face homes with models, AMD GPUs, local
disks.

Runs after the probe, which reads only paths of the inventory; changes nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from launcher.core import shell, untrusted
from launcher.core.errors import UnreadableAnswer
from launcher.tools.docker import docker_output
from launcher.tools.shipped import derived

_MARK = "@@stock"
# Kind, optional number (free KiB or a count), path or name.
_LINE = re.compile(
    rf"^{_MARK} (disk|home|model|amd)[ \t]+(?:([0-9]{{1,15}})(?=[ \t]|$))?[ \t]*(.*)$", re.MULTILINE
)
_PATH = re.compile(r"/[A-Za-z0-9._@%+=/-]{1,200}")  # accepted by inventories


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A Hugging Face home: its models, and the free bytes on its disk."""

    path: str
    models: tuple[str, ...] = ()
    free: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder of the SSH user on a local disk; `free` is in bytes."""

    path: str
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAssets:
    """Assets of a host; `images` maps vLLM-like names to identities, without derived images."""

    homes: tuple[Home, ...] = ()
    disks: tuple[Disk, ...] = ()
    images: Mapping[str, str] = field(default_factory=dict)
    amd_gpus: int = 0


def probe_script() -> str:
    """Return the shell text of the scan, to run after the probe (`host.probe(more=…)`)."""
    return shell.program_text("local_assets")


def parse_local_assets(text: str) -> LocalAssets:
    """Parse the scan's part of a probe's answer; raises UnreadableAnswer if it is incomplete."""
    head, marker, images = text[max(0, text.find(_MARK)) :].partition(f"{_MARK} images\n")
    images, end, _ = images.partition(f"{_MARK} end")
    if not marker or not end:
        raise UnreadableAnswer(
            "the list of images and models is incomplete",
            evidence=untrusted.excerpt(text, last=True),
        )
    homes: dict[str, Home] = {}
    disks, amd_gpus, home = list[Disk](), 0, ""
    for kind, number, value in _LINE.findall(untrusted.truncate(head)):
        free = int(number) * 1024 if number else None
        if kind == "home":
            home = value
            homes.setdefault(home, Home(path=home, free=free))
        elif kind == "model" and home in homes:
            name = value.removeprefix("models--").replace("--", "/")
            models = dict.fromkeys((*homes[home].models, name))
            homes[home] = replace(homes[home], models=tuple(models))
        elif kind == "disk" and free is not None and _PATH.fullmatch(value):
            disks.append(Disk(path=value, free=free))
        elif kind == "amd":
            amd_gpus = int(number or 0)
    return LocalAssets(
        homes=tuple(homes.values()),
        disks=tuple(disks),
        images=_parse_images(images.strip()),
        amd_gpus=amd_gpus,
    )


def _parse_images(text: str) -> dict[str, str]:
    return {
        name: image.identity
        for image in docker_output.parse_images(text)
        if derived.CONTENT not in image.labels
        for name in image.names
        if "vllm" in name.lower()
    }
