"""What a host has that could be used: images of vLLM, Hugging Face homes with models, AMD GPUs,
folders on its own disks.

It is asked behind the probe, which looks only at what an inventory names; the question reads and
changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from launcher.core import shell, untrusted
from launcher.core.errors import UnreadableAnswer
from launcher.tools import derived, docker_read

_MARK = "@@stock"
# What it is, a number where there is one (KiB that are free, or how many), and a path or a name.
_LINE = re.compile(
    rf"^{_MARK} (disk|home|model|amd)[ \t]+(?:([0-9]{{1,15}})(?=[ \t]|$))?[ \t]*(.*)$", re.MULTILINE
)
_PATH = re.compile(r"/[A-Za-z0-9._@%+=/-]{1,200}")  # as an inventory can name it


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A Hugging Face home: the models in it, and the bytes free on its disk."""

    path: str
    models: tuple[str, ...] = ()
    free: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder on a disk of the host's own that belongs to the login; `free` is in bytes."""

    path: str
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAssets:
    """`images` has the identity of each image whose name looks like vLLM's, but not those that
    vlaunch made.
    """

    homes: tuple[Home, ...] = ()
    disks: tuple[Disk, ...] = ()
    images: Mapping[str, str] = field(default_factory=dict)
    amd_gpus: int = 0


def script() -> str:
    """Return the shell that asks for it, to run behind the probe (`host.probe(more=…)`)."""
    return shell.program("local_assets")


def parse(text: str) -> LocalAssets:
    """Read the end of a probe's answer; raises UnreadableAnswer when it is cut short or is
    something else.
    """
    head, marker, images = text[max(0, text.find(_MARK)) :].partition(f"{_MARK} images\n")
    images, end, _ = images.partition(f"{_MARK} end")
    if not marker or not end:
        raise UnreadableAnswer(
            "the answer about images and models is incomplete",
            evidence=untrusted.shown(text, last=True),
        )
    homes: dict[str, Home] = {}
    disks, amd_gpus, home = list[Disk](), 0, ""
    for kind, number, value in _LINE.findall(untrusted.cut(head)):
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
        images=_images(images.strip()),
        amd_gpus=amd_gpus,
    )


def _images(text: str) -> dict[str, str]:
    """Return the identities of images whose names look like vLLM's."""
    return {
        name: image.identity
        for image in docker_read.parse_images(text)
        if derived.CONTENT not in image.labels
        for name in image.names
        if "vllm" in name.lower()
    }
