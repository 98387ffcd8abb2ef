"""Which nodes get which layers of an image, and from whom: decided from what each Docker has,
before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launcher.errors import NodeError, RequestError, together
from launcher.model import fold
from launcher.payload.chain import archive
from launcher.payload.chain.files import File, Manifest
from launcher.plan.copying import chunk, in_order
from launcher.sizes import told
from launcher.tools import image_store
from launcher.tools.docker import Image
from launcher.tools.image_store import Store

_MARGIN: Final = 1.02  # how much more room than bytes there must be
_ZSTD: Final = 23  # version of Docker


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes that have the first `has` layers of an image, and so lack the same ones: one chain."""

    has: int
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ImageCopying:
    """One copy to be: `source` has the image, each group's nodes get what they lack of it.

    `complete` are the nodes that have it already, `order` is all nodes in the inventory's.
    `unnamed` are those that have it under other names alone, each with its ID there.
    """

    name: str
    source: str
    image: Image
    groups: tuple[Group, ...]
    unnamed: Mapping[str, str]
    complete: tuple[str, ...]
    order: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """The nodes that get something, or a name for what they have."""
        given = tuple(name for group in self.groups for name in group.targets)
        return (*given, *self.unnamed)

    @property
    def names(self) -> tuple[str, ...]:
        """What the image is called on the nodes then."""
        tagged = ":" in self.name.rpartition("/")[2]
        return (self.name if tagged else f"{self.name}:latest",)


def plan_image(
    name: str,
    seen: Mapping[str, Store],
    *,
    source: str = "",
    targets: Sequence[str] = (),
) -> ImageCopying:
    """Return the copy that brings an image to all nodes, or to `targets`.

    Args:
        name: the image.
        seen: what each node's Docker has, in the inventory's order.
        source: whose image it is; by default the first node's that has it.
        targets: nodes that shall have it.

    Raises:
        RequestError: nobody has it, or nodes differ in what it is.
        NodeError: a node cannot take part.
    """
    has = {node: found for node, each in seen.items() if (found := each.image(name)) is not None}
    source = _source(name, has, seen, source)
    image = has[source]
    wanted = [node for node in (targets or seen) if node != source]
    there = {node: each for node, each in has.items() if each.identity == image.identity}
    lacking = [node for node in wanted if node not in there]
    _check_able(seen, [source, *lacking])
    if "@" in name and lacking:
        raise RequestError(
            f"{name} is named by its digest, and an image that is copied between nodes has none"
            " there: Docker knows digests of what came from a registry alone",
            hint="name it by a tag; the nodes' images are compared with each other all the same",
        )
    twins = {node: each.id for node in lacking if (each := _twin(seen[node], image)) is not None}
    groups: dict[int, list[str]] = {}
    for node in [node for node in lacking if node not in twins]:
        groups.setdefault(_has(seen[node], image), []).append(node)
    return ImageCopying(
        name=name,
        source=source,
        image=image,
        groups=tuple(
            Group(has=count, targets=in_order(groups[count], source)) for count in sorted(groups)
        ),
        unnamed=twins,
        complete=tuple(node for node in seen if node in there and node in (source, *wanted)),
        order=tuple(seen),
    )


def _twin(store: Store, image: Image) -> Image | None:
    """Return the same image of a node, which has another name there."""
    return next((each for each in store.images if each.identity == image.identity), None)


def _has(store: Store, image: Image) -> int:
    """Return how many layers of an image need not be sent to a node.

    Containerd's store keeps layers packed, as they came, and Docker does not tell which: there all
    are sent.
    """
    return 0 if store.containerd else store.has_layers(image.layers)


def _source(name: str, has: Mapping[str, Image], seen: Mapping[str, Store], source: str) -> str:
    """Return whose image is copied; raises RequestError and NodeError."""
    if source:
        _check_able(seen, [source])
        if source not in has:
            raise RequestError(f"{source} does not have {name}", hint=_LIST)
        return source
    if not has:
        _check_able(seen, [node for node, each in seen.items() if each.trouble])
        raise RequestError(
            f"no node has {name} ({fold(list(seen))} were asked)",
            hint=f"have one fetch it: `vlaunch image pull {name}`, or bring it from this machine:"
            f" `vlaunch image push {name} --here`",
        )
    first = next(iter(has))
    if others := [node for node in has if has[node].identity != has[first].identity]:
        raise RequestError(
            f"{name} is not the same image on {fold([first, *others])}",
            evidence=[f"{node}: {short(each)}, {told(each.size)}" for node, each in has.items()],
            hint=f"say whose it shall be: `vlaunch image push {name} --from {first}`",
        )
    return first


_LIST: Final = "see what is where: `vlaunch image list`"


def short(image: Image) -> str:
    """Return the twelve digits that people compare."""
    return image.id.removeprefix("sha256:")[:12]


def _check_able(seen: Mapping[str, Store], nodes: Sequence[str]) -> None:
    """Raise NodeError for every node whose Docker or Python is not there."""
    errors = []
    for node in nodes:
        store = seen[node]
        if store.trouble:
            errors.append(NodeError(node, "Docker does not answer", evidence=store.trouble))
        elif store.python < image_store.OLDEST:
            found = ".".join(map(str, store.python)) if store.python[0] else "none"
            errors.append(
                NodeError(
                    node,
                    "an image is copied by Python 3.8 or newer",
                    evidence=f"python3 on the node: {found}",
                    hint="install it, or bring the image yourself: `docker save IMAGE | ssh"
                    f" {node} docker load`",
                )
            )
    if errors:
        raise together(errors, "cannot take part")


def check_export(copying: ImageCopying, store: Store) -> int:
    """Return the bytes that the source needs while the image is taken out of its Docker; raises
    NodeError when there are fewer.

    Docker's classic store writes all of it to its own disk first.
    """
    need = round(copying.image.size * _MARGIN)
    own = 0 if store.containerd else need
    _check(copying.source, store, scratch=need - store.unfinished, docker=own)
    return max(0, need - store.unfinished)


def check_targets(copying: ImageCopying, image: archive.Image, seen: Mapping[str, Store]) -> None:
    """Raise NodeError for every node that has too little room for what it gets, or a Docker that
    cannot unpack it.

    What comes lies there three times for a while: as it came, in Docker's temporary folder, and
    unpacked.
    """
    errors = _too_old(copying, image, seen)
    if errors:
        raise together(errors, "cannot take this image")
    for group in copying.groups:
        missing = manifest(image, group.has).bytes
        unpacked = missing if not _packed(image) else copying.image.size
        for node in group.targets:
            try:
                scratch = round(missing * _MARGIN) - seen[node].unfinished
                docker = round((missing + unpacked) * _MARGIN)
                _check(node, seen[node], scratch=scratch, docker=docker)
            except NodeError as error:
                errors.append(error)
    if errors:
        raise together(errors, "has too little room for the image")


def _too_old(
    copying: ImageCopying, image: archive.Image, seen: Mapping[str, Store]
) -> list[NodeError]:
    """Return an error for every node whose Docker does not know zstd, which came with 23.0
    (moby #28394; tried: 20.10 does not, 26.1 does).
    """
    if "+zstd" not in image.manifest:
        return []
    majors = {name: seen[name].version.partition(".")[0] for name in copying.targets}
    return [
        NodeError(
            name,
            f"Docker {seen[name].version} cannot unpack layers packed with zstd",
            hint="install Docker 23.0 or newer there, or take an image that is packed with gzip",
        )
        for name, major in majors.items()
        if major.isdigit() and int(major) < _ZSTD
    ]


def _packed(image: archive.Image) -> bool:
    return any(each.digest != each.diff for each in image.layers)


def _check(node: str, store: Store, *, scratch: int, docker: int) -> None:
    if store.same_disk:
        enough = scratch + docker <= store.free
        text = f"{told(scratch + docker)} are needed, {told(store.free)} are free"
    else:
        enough = scratch <= store.scratch and docker <= store.free
        text = (
            f"{told(max(0, scratch))} are needed in {store.top.rpartition('/')[0]},"
            f" {told(store.scratch)} are free;"
            f" {told(docker)} where Docker keeps images, {told(store.free)} are free"
        )
    if not enough:
        raise NodeError(
            node,
            f"has too little room for the image: {text}",
            hint="remove images that no container uses: `vlaunch exec --host -- docker image prune"
            " -a -f`; or stage the copy on another disk: `--scratch FOLDER`",
        )


def manifest(image: archive.Image, has: int) -> Manifest:
    """Return what travels to nodes that have the first `has` layers: the configuration, and the
    other layers, each once.
    """
    sizes = {image.config: image.config_size}
    sizes.update({each.digest: each.size for each in image.layers[has:]})
    files = [File(digest, size, sum=digest) for digest, size in sizes.items()]
    return Manifest(files, chunk(sum(sizes.values())))
