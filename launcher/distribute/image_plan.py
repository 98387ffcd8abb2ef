"""Plan of a copy of an image: the nodes that lack it and the layers that they lack, decided from
what each Docker has before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launcher.core.domain import fold
from launcher.core.errors import NodeError, RequestError, together
from launcher.core.sizes import told
from launcher.distribute import image_store
from launcher.distribute.chain import Exported
from launcher.distribute.image_store import Store
from launcher.distribute.model_plan import Copying, chunk, in_order
from launcher.distribute.node.files import File, Manifest
from launcher.tools.docker import Image

_MARGIN: Final = 1.02  # how much more room than bytes there must be
_LIST: Final = "see what is where: `vlaunch image list`"


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """A copy of an image: `lacking` are the nodes that get it from `source`, in the order of the
    chain. All of them have its first `has` layers.

    `complete` are the nodes that have it already, `order` is all nodes in the inventory's.
    `unnamed` are those that have it under other names alone, each with its ID there.
    """

    name: str
    source: str
    image: Image
    lacking: tuple[str, ...]
    has: int
    unnamed: Mapping[str, str]
    complete: tuple[str, ...]
    order: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """The nodes that get something, or a name for what they have."""
        return (*self.lacking, *self.unnamed)

    @property
    def tagged(self) -> str:
        """The image's name with its tag."""
        return self.name if ":" in self.name.rpartition("/")[2] else f"{self.name}:latest"


def plan_image(
    name: str,
    seen: Mapping[str, Store],
    *,
    source: str = "",
    targets: Sequence[str] = (),
) -> ImagePlan:
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
    unnamed = {node: twin.id for node in lacking if (twin := _twin(seen[node], image)) is not None}
    lacking = [node for node in lacking if node not in unnamed]
    return ImagePlan(
        name=name,
        source=source,
        image=image,
        lacking=in_order(lacking, source),
        has=min((_has(seen[node], image) for node in lacking), default=0),
        unnamed=unnamed,
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
            f" `vlaunch image copy {name} --here`",
        )
    first = next(iter(has))
    if others := [node for node in has if has[node].identity != has[first].identity]:
        raise RequestError(
            f"{name} is not the same image on {fold([first, *others])}",
            evidence=[f"{node}: {short(each)}, {told(each.size)}" for node, each in has.items()],
            hint=f"say whose it shall be: `vlaunch image copy {name} --from {first}`",
        )
    return first


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


def plan_files(plan: ImagePlan, exported: Exported) -> Copying:
    """Return the copy of the files of an image, without layers that all targets have."""
    present = {*exported.layers[: plan.has]} - {*exported.layers[plan.has :]}
    files = [File(*row) for row in exported.files if row[0] not in present]
    total = sum(each.size for each in files)
    return Copying(
        model=plan.name,
        revision="",
        source=plan.source,
        targets=plan.lacking,
        complete=plan.complete,
        manifest=Manifest(files, chunk(total)),
        links=(),
        refs=(),
        missing=dict.fromkeys(plan.lacking, total),
        order=plan.order,
    )


def check_source(plan: ImagePlan, store: Store) -> int:
    """Return the bytes that the source needs for its export of the image; raises NodeError when
    there are fewer.

    Docker's classic store first writes all of it to its own disk.
    """
    need = round(plan.image.size * _MARGIN)
    docker = 0 if store.containerd else need
    if errors := _check(plan.source, store, scratch=need - store.unfinished, docker=docker):
        raise errors[0]
    return max(0, need - store.unfinished)


def check_targets(plan: ImagePlan, copying: Copying, seen: Mapping[str, Store]) -> None:
    """Raise NodeError for every node that has too little room.

    The files are stored three times for a while: as they came, in Docker's temporary folder, and
    unpacked. Containerd's store exports layers packed.
    """
    missing = copying.manifest.bytes
    unpacked = plan.image.size if seen[plan.source].containerd else missing
    docker = round((missing + unpacked) * _MARGIN)
    errors = [
        error
        for node in plan.lacking
        for error in _check(
            node,
            seen[node],
            scratch=round(missing * _MARGIN) - seen[node].unfinished,
            docker=docker,
        )
    ]
    if errors:
        raise together(errors, "has too little room for the image")


def _check(node: str, store: Store, *, scratch: int, docker: int) -> list[NodeError]:
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
    if enough:
        return []
    hint = (
        "remove images that no container uses: `vlaunch exec --host -- docker image prune -a -f`;"
        " or stage the copy on another disk: `--scratch FOLDER`"
    )
    return [NodeError(node, f"has too little room for the image: {text}", hint=hint)]
