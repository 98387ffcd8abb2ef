"""What a host has that could be used: images of vLLM, Hugging Face homes with models, AMD GPUs,
folders on its own disks.

It is asked behind the probe, which looks only at what an inventory names; the question reads and
changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher import shell
from launcher.errors import UnreadableAnswer
from launcher.tools import derived, docker_read, untrusted

_MARK = "@@stock"
# The paths that an inventory can name.
_DISK = re.compile(rf"^{_MARK} disk ([0-9]{{1,18}}) (/[A-Za-z0-9._@%+=/-]{{1,200}})$", re.MULTILINE)


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
    head, mark, images = text[max(0, text.find(_MARK)) :].partition(f"{_MARK} images\n")
    images, end, _ = images.partition(f"{_MARK} end")
    if not mark or not end:
        raise UnreadableAnswer(
            "the answer about images and models is incomplete",
            evidence=untrusted.shown(text, last=True),
        )
    amd = re.search(rf"^{_MARK} amd[ \t]+([0-9]{{1,6}})[ \t]*$", head, re.MULTILINE)
    return LocalAssets(
        homes=tuple(_homes(head.splitlines())),
        disks=tuple(
            Disk(path=found[2], free=int(found[1]) * 1024) for found in _DISK.finditer(head)
        ),
        images=_images(images.strip()),
        amd_gpus=int(amd[1]) if amd else 0,
    )


def _homes(lines: Sequence[str]) -> list[Home]:
    """Read the homes: each begins with a line of its own, then come its models and what is free."""
    homes: dict[str, Home] = {}
    path = ""
    for line in lines:
        word, _, rest = line.removeprefix(f"{_MARK} ").partition(" ")
        home = homes.get(path)
        if line.startswith(_MARK) and word == "home":
            path = rest
            homes.setdefault(path, Home(path=path))
        elif line.startswith(_MARK) and word == "model" and home:
            name = rest.removeprefix("models--").replace("--", "/")
            homes[path] = replace(home, models=tuple(dict.fromkeys((*home.models, name))))
        elif not line.startswith(_MARK) and home:
            homes[path] = replace(home, free=_free(line))
    return list(homes.values())


def _free(line: str) -> int | None:
    match = re.search(r"\s([0-9]{1,18})\s+[0-9]{1,3}%\s", line[:1000])
    return int(match[1]) * 1024 if match else None


def _images(text: str) -> dict[str, str]:
    """Return the identities of images whose names look like vLLM's."""
    return {
        name: image.identity
        for image in docker_read.parse_images(text)
        if derived.CONTENT not in image.labels
        for name in image.names
        if "vllm" in name.lower()
    }
