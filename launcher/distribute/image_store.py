"""Images of a node's Docker and the space for more: the query, and the parser of its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from launcher.core import shell, untrusted
from launcher.core.domain import Argv
from launcher.core.errors import UnreadableAnswer
from launcher.tools import docker_read, host_read
from launcher.tools.docker import Image
from launcher.tools.parts import Parts, read_parts

# Where what is on its way lies: a disk of the node's own that outlasts a reboot (hier(7)). A home
# may be on a slow file system that all nodes share, and what Docker has belongs to root.
SCRATCH: Final = "/var/tmp"
# The driver type of containerd's image store in `docker info`
# (https://docs.docker.com/engine/storage/containerd/).
_CONTAINERD = "io.containerd.snapshotter.v1"
OLDEST: Final = (3, 8)  # Python that runs our program


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The images of one node, and what room there is: `free` bytes where Docker keeps them, and
    `scratch` where what is on its way lies, which may be the same disk.

    `folder` is where that is, `top` the one above that belongs to the login; `unfinished` bytes of
    interrupted copies lie there. `trouble` is what Docker said when it did not answer. `python` is
    what the node has, `(0, 0)` where it has none. `containerd`: images are kept as they came,
    packed, and named by their manifest.
    """

    images: tuple[Image, ...] = ()
    free: int = 0
    scratch: int = 0
    same_disk: bool = False
    folder: str
    top: str
    unfinished: int = 0
    python: tuple[int, int] = (0, 0)
    version: str = ""
    containerd: bool = False
    trouble: str = ""

    def image(self, name: str) -> Image | None:
        """Return the image that has a name, with or without a registry and tag."""
        return next((each for each in self.images if is_named(each, name)), None)

    def has_layers(self, layers: Sequence[str]) -> int:
        """Return how many layers of an image, from its first one on, are there as part of another
        one: Docker keeps a layer together with all below it.
        """
        best = 0
        for each in self.images:
            count = 0
            for mine, wanted in zip(each.layers, layers, strict=False):
                if mine != wanted:
                    break
                count += 1
            best = max(best, count)
        return best


def is_named(image: Image, name: str) -> bool:
    """True when an image has a name; without a tag or digest it is the tag `latest`."""
    if "@" in name:
        return name in image.digests
    wanted = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    return any(bare(wanted) == bare(each) for each in image.names)


def bare(name: str) -> str:
    """Return a name without the registry that Docker assumes."""
    for begin in ("docker.io/library/", "docker.io/", "index.docker.io/"):
        if name.startswith(begin):
            return name[len(begin) :]
    return name


def ask(docker: Argv, *, cluster: str, node: str, scratch: str = SCRATCH) -> Argv:
    """Ask for everything in one round trip; it changes nothing."""
    words = (scratch, cluster, node, *docker)
    return ("sh", "-c", shell.program("images"), "images", *words)


def parse(text: str, *, cluster: str, node: str, scratch: str = SCRATCH) -> Store:
    """Read the answer; raises UnreadableAnswer."""
    parts = read_parts(text)
    if "end" not in parts:
        raise UnreadableAnswer(
            f"what {node} says of its images is incomplete",
            evidence=untrusted.shown(text, last=True),
        )
    try:
        return _store(parts, f"{scratch}/vlaunch-{_number(parts.said('user'))}", cluster, node)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnreadableAnswer(
            f"what {node} says of its images cannot be read ({error!r:.200})",
            evidence=untrusted.shown(text, last=True),
        ) from None


def _store(parts: Parts, top: str, cluster: str, node: str) -> Store:
    info: dict[str, Any] = untrusted.loads(parts.good("info") or "{}")
    listed = parts.good("images")
    answered = parts.good("docker") is not None and listed is not None
    python = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", (parts.good("python") or "").strip())
    devices = [parts.good(each) for each in ("device", "dockerdevice")]
    return Store(
        images=docker_read.parse_images(listed) if listed else (),
        free=host_read.free(parts.good("dockerdisk") or "- - - 0"),
        scratch=host_read.free(parts.good("disk") or "- - - 0"),
        same_disk=None not in devices and devices[0] == devices[1],
        folder=f"{top}/{cluster}/{node}",
        top=top,
        unfinished=1024 * _number((parts.good("unfinished") or "0").split()[0]),
        python=(int(python[1]), int(python[2])) if python else (0, 0),
        version=str(info.get("ServerVersion") or ""),
        containerd=any(
            _CONTAINERD in [str(word) for word in each] for each in info.get("DriverStatus") or ()
        ),
        trouble="" if answered else _trouble(parts.said("images") or parts.said("docker")),
    )


def _trouble(text: str) -> str:
    """Return what Docker said; of a server that it cannot reach it prints `null` besides."""
    return "\n".join(line for line in text.splitlines() if line != "null") or "it said nothing"


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text.strip()):
        raise ValueError(f"{text[:50]!r} is no number")
    return int(text)
