"""Images in a node's Docker, and free space: the query and the parser of its answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from launcher.core import shell, untrusted
from launcher.core.domain import Argv
from launcher.core.errors import UnreadableAnswer
from launcher.tools.docker import Image, docker_output
from launcher.tools.host import host_output
from launcher.tools.host.parts import Parts, parse_parts

# A local disk that survives reboots (hier(7)). A home may be on a slow file system that all nodes
# share, and Docker's folders belong to root.
SCRATCH: Final = "/var/tmp"
# The driver type of containerd's image store in `docker info`
# (https://docs.docker.com/engine/storage/containerd/).
_CONTAINERD = "io.containerd.snapshotter.v1"
OLDEST: Final = (3, 8)  # oldest Python that runs the node program


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStore:
    """Images of one node, and free space in bytes: `free` on Docker's disk, and `scratch_free` on
    the staging disk, which may be the same one.

    `folder` is the staging folder, with `unfinished` bytes of interrupted copies, and `top` the one
    above it that belongs to the SSH user. `docker_error` is Docker's output where it failed.
    `python` is the node's version, `(0, 0)` without Python. `containerd`: the store keeps layers
    compressed, and names images by their manifests.
    """

    images: tuple[Image, ...] = ()
    free: int = 0
    scratch_free: int = 0
    same_disk: bool = False
    folder: str
    top: str
    unfinished: int = 0
    python: tuple[int, int] = (0, 0)
    docker_version: str = ""
    containerd: bool = False
    docker_error: str = ""

    def find_image(self, name: str) -> Image | None:
        """Return the image of a name, which may omit registry and tag."""
        return next((image for image in self.images if is_named(image, name)), None)

    def count_layers(self, layers: Sequence[str]) -> int:
        """Count the first layers of an image that another image has, too: Docker keeps a layer
        together with all below it.
        """
        best = 0
        for image in self.images:
            count = 0
            for stored, layer in zip(image.layers, layers, strict=False):
                if stored != layer:
                    break
                count += 1
            best = max(best, count)
        return best


def is_named(image: Image, name: str) -> bool:
    """True when an image has a name; a name without tag or digest means the tag `latest`."""
    if "@" in name:
        return name in image.digests
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    return any(strip_registry(tagged) == strip_registry(stored) for stored in image.names)


def strip_registry(name: str) -> str:
    """Remove Docker's default registry from a name."""
    for registry in ("docker.io/library/", "docker.io/", "index.docker.io/"):
        if name.startswith(registry):
            return name[len(registry) :]
    return name


def query_argv(docker: Argv, *, cluster: str, node: str, scratch: str = SCRATCH) -> Argv:
    """Return the command that queries images and space in one round trip; it changes nothing."""
    return ("sh", "-c", shell.program_text("images"), "images", scratch, cluster, node, *docker)


def parse_store(text: str, *, cluster: str, node: str, scratch: str = SCRATCH) -> ImageStore:
    """Parse the answer; raises UnreadableAnswer."""
    parts = parse_parts(text)
    if "end" not in parts:
        raise UnreadableAnswer(
            f"the list of images on {node} is incomplete",
            evidence=untrusted.excerpt(text, last=True),
        )
    try:
        top = f"{scratch}/vlaunch-{_parse_number(parts.output('user'))}"
        return _build_store(parts, top, cluster, node)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnreadableAnswer(
            f"the list of images on {node} cannot be read ({error!r:.200})",
            evidence=untrusted.excerpt(text, last=True),
        ) from None


def _build_store(parts: Parts, top: str, cluster: str, node: str) -> ImageStore:
    info: dict[str, Any] = untrusted.loads(parts.output_if_ok("info") or "{}")
    images = parts.output_if_ok("images")
    answered = parts.output_if_ok("docker") is not None and images is not None
    output = parts.output("images") or parts.output("docker")
    version = (parts.output_if_ok("python") or "").strip()
    python = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", version)
    devices = [parts.output_if_ok(name) for name in ("device", "dockerdevice")]
    return ImageStore(
        images=docker_output.parse_images(images) if images else (),
        free=host_output.parse_free_bytes(parts.output_if_ok("dockerdisk") or "- - - 0"),
        scratch_free=host_output.parse_free_bytes(parts.output_if_ok("disk") or "- - - 0"),
        same_disk=None not in devices and devices[0] == devices[1],
        folder=f"{top}/{cluster}/{node}",
        top=top,
        unfinished=1024 * _parse_number((parts.output_if_ok("unfinished") or "0").split()[0]),
        python=(int(python[1]), int(python[2])) if python else (0, 0),
        docker_version=str(info.get("ServerVersion") or ""),
        containerd=any(
            _CONTAINERD in [str(value) for value in row] for row in info.get("DriverStatus") or ()
        ),
        docker_error="" if answered else _docker_error(output),
    )


def _docker_error(text: str) -> str:
    """Return Docker's message, without the `null` that it prints when it reaches no server."""
    return "\n".join(line for line in text.splitlines() if line != "null") or "no output"


def _parse_number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text.strip()):
        raise ValueError(f"{text[:50]!r} is not a number")
    return int(text)
