"""Plan of an image copy: the nodes and layers to copy, decided from the stores of all nodes before
anything is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launcher.core.domain import fold
from launcher.core.errors import NodeError, RequestError, combine_errors
from launcher.core.sizes import format_size
from launcher.distribute import image_store
from launcher.distribute.chain import Exported
from launcher.distribute.image_store import ImageStore
from launcher.distribute.model_plan import CopyPlan, chain_order, choose_chunk_size
from launcher.distribute.node.files import CopyManifest, ManifestFile
from launcher.tools.docker import Image

_MARGIN: Final = 1.02  # space required per byte
_LIST_HINT: Final = "list the images: `vlaunch image list`"


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """A copy of an image from `source` to `receivers`, in the order of the chain; these all have
    its first `common_layers` layers.

    `complete_nodes` have the image, `all_nodes` follow the inventory's order, and `unnamed` maps
    nodes that have the image only under other names to its ID.
    """

    name: str
    source: str
    image: Image
    receivers: tuple[str, ...]
    common_layers: int
    unnamed: Mapping[str, str]
    complete_nodes: tuple[str, ...]
    all_nodes: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """Nodes that get the image, or a name for it."""
        return (*self.receivers, *self.unnamed)

    @property
    def tagged_name(self) -> str:
        """The image's name with its tag."""
        return self.name if ":" in self.name.rpartition("/")[2] else f"{self.name}:latest"


def plan_image(
    name: str,
    stores: Mapping[str, ImageStore],
    *,
    source: str = "",
    targets: Sequence[str] = (),
) -> ImagePlan:
    """Plan a copy of an image to all nodes, or to `targets`.

    Args:
        name: the image.
        stores: the nodes' images, in the inventory's order.
        source: the node to copy from; by default the first one that has the image.
        targets: nodes to copy to.

    Raises:
        RequestError: no node has the image, or the nodes' images differ.
        NodeError: a node cannot take part.
    """
    stored = {node: store.find_image(name) for node, store in stores.items()}
    images = {node: image for node, image in stored.items() if image is not None}
    source = _choose_source(name, images, stores, source)
    image = images[source]
    requested = [node for node in (targets or stores) if node != source]
    matching = {node for node in images if images[node].identity == image.identity}
    receivers = [node for node in requested if node not in matching]
    _check_ready(stores, [source, *receivers])
    if "@" in name and receivers:
        raise RequestError(
            f"{name} is named by its digest, but Docker keeps digests only of images from a"
            " registry, not of copied ones",
            hint="use a tag: vlaunch compares the nodes' images in any case",
        )
    unnamed = _find_unnamed(stores, image, receivers)
    receivers = [node for node in receivers if node not in unnamed]
    common_layers = [_count_common_layers(stores[node], image) for node in receivers]
    return ImagePlan(
        name=name,
        source=source,
        image=image,
        receivers=chain_order(receivers, source),
        common_layers=min(common_layers, default=0),
        unnamed=unnamed,
        complete_nodes=tuple(node for node in stores if node in matching & {source, *requested}),
        all_nodes=tuple(stores),
    )


def _find_unnamed(
    stores: Mapping[str, ImageStore], image: Image, nodes: Sequence[str]
) -> dict[str, str]:
    """Return the image's id on nodes that have it under another name only."""
    return {
        node: stored.id
        for node in nodes
        for stored in reversed(stores[node].images)
        if stored.identity == image.identity
    }


def _count_common_layers(store: ImageStore, image: Image) -> int:
    """Count the first layers of an image that need not be sent to a node.

    Containerd's store keeps the compressed layers, and Docker does not list them: all are sent.
    """
    return 0 if store.containerd else store.count_layers(image.layers)


def _choose_source(
    name: str, images: Mapping[str, Image], stores: Mapping[str, ImageStore], source: str
) -> str:
    """Return the node to copy from; raises RequestError and NodeError."""
    if source:
        _check_ready(stores, [source])
        if source not in images:
            raise RequestError(f"{source} does not have {name}", hint=_LIST_HINT)
        return source
    if not images:
        _check_ready(stores, [node for node, store in stores.items() if store.docker_error])
        raise RequestError(
            f"no node has {name} (checked: {fold(list(stores))})",
            hint=f"pull it: `vlaunch image pull {name}`, or copy it from this machine: `vlaunch"
            f" image copy {name} --local`",
        )
    first = next(iter(images))
    if others := [node for node in images if images[node].identity != images[first].identity]:
        raise RequestError(
            f"{name} differs between {fold([first, *others])}",
            evidence=[f"{n}: {short_id(i)}, {format_size(i.size)}" for n, i in images.items()],
            hint=f"choose the source: `vlaunch image copy {name} --from {first}`",
        )
    return first


def short_id(image: Image) -> str:
    """Return the 12-digit ID that Docker's commands print."""
    return image.id.removeprefix("sha256:")[:12]


def _check_ready(stores: Mapping[str, ImageStore], nodes: Sequence[str]) -> None:
    """Raise NodeError for every node without a working Docker or Python."""
    errors = []
    for node in nodes:
        store = stores[node]
        if store.docker_error:
            errors.append(NodeError(node, "Docker does not answer", evidence=store.docker_error))
        elif store.python < image_store.OLDEST:
            version = ".".join(map(str, store.python)) if store.python[0] else "none"
            errors.append(
                NodeError(
                    node,
                    "copying an image needs Python 3.8 or newer",
                    evidence=f"python3 on the node: {version}",
                    hint="install it, or copy the image yourself: `docker save IMAGE | ssh"
                    f" {node} docker load`",
                )
            )
    if errors:
        raise combine_errors(errors, "cannot take part")


def plan_files(plan: ImagePlan, exported: Exported) -> CopyPlan:
    """Plan the copy of an image's files, without layers that all targets have."""
    present = {*exported.layers[: plan.common_layers]} - {*exported.layers[plan.common_layers :]}
    files = [ManifestFile(*row) for row in exported.files if row[0] not in present]
    total = sum(file.size for file in files)
    return CopyPlan(
        model=plan.name,
        revision="",
        source=plan.source,
        targets=plan.receivers,
        complete_nodes=plan.complete_nodes,
        manifest=CopyManifest(files, choose_chunk_size(total)),
        links=(),
        refs=(),
        missing_bytes=dict.fromkeys(plan.receivers, total),
        all_nodes=plan.all_nodes,
    )


def check_source(plan: ImagePlan, store: ImageStore) -> int:
    """Return the bytes that the source still needs to export the image; raises NodeError without
    enough space.

    Docker's classic store first writes the whole image to its own disk.
    """
    need = round(plan.image.size * _MARGIN)
    docker = 0 if store.containerd else need
    if errors := _check_space(plan.source, store, scratch=need - store.unfinished, docker=docker):
        raise errors[0]
    return max(0, need - store.unfinished)


def check_targets(plan: ImagePlan, copy_plan: CopyPlan, stores: Mapping[str, ImageStore]) -> None:
    """Raise NodeError for every target with too little space.

    Loading needs the files three times: as copied, in Docker's temporary folder, and unpacked.
    Containerd's store exports compressed layers.
    """
    size = copy_plan.manifest.total_bytes
    unpacked = plan.image.size if stores[plan.source].containerd else size
    docker = round((size + unpacked) * _MARGIN)
    errors = [
        error
        for node in plan.receivers
        for error in _check_space(
            node,
            stores[node],
            scratch=round(size * _MARGIN) - stores[node].unfinished,
            docker=docker,
        )
    ]
    if errors:
        raise combine_errors(errors, "has too little disk space for the image")


def _check_space(node: str, store: ImageStore, *, scratch: int, docker: int) -> list[NodeError]:
    if store.same_disk:
        enough = scratch + docker <= store.free
        text = f"{format_size(scratch + docker)} needed, {format_size(store.free)} free"
    else:
        enough = scratch <= store.scratch_free and docker <= store.free
        text = (
            f"{format_size(max(0, scratch))} needed in {store.top.rpartition('/')[0]},"
            f" {format_size(store.scratch_free)} free; {format_size(docker)} needed where Docker"
            f" stores images, {format_size(store.free)} free"
        )
    if enough:
        return []
    hint = (
        "remove images that no container uses: `vlaunch exec --host -- docker image prune -a -f`;"
        " or stage the copy on another disk: `--scratch FOLDER`"
    )
    return [NodeError(node, f"has too little disk space for the image: {text}", hint=hint)]
