"""`vlaunch image`, and `vlaunch image list`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.selection import select_nodes
from launcher.app.terminal import dump_json, make_table, plain_text, say, show, text_line
from launcher.core.domain import fold
from launcher.core.sizes import format_size
from launcher.distribute.image_copy import copy, pull, query_stores
from launcher.distribute.image_store import ImageStore
from launcher.tools.docker import Image

if TYPE_CHECKING:
    from rich.console import RenderableType


_NONE = "<none>"


@click.group()
def image() -> None:
    """List, pull and copy images; copies need no registry."""


@command(
    "list",
    under=image,
    shows="none",
    flags=[options.JSON],
    short_help="List the images on all nodes and their differences",
)
@options.NODES
def list_(call: CommandContext, nodes: tuple[str, ...]) -> int:
    """List the images in every node's Docker, and the free disk space.

    Images of one name share a line if their layers and configuration are the same. The exit code is
    1 when a node cannot be queried.
    """
    picked = select_nodes(call.inventory, nodes)
    with call.session(partial=True, nodes=picked) as session:
        reached = session.reached_of(picked)
        stores = query_stores(session, reached) if reached else {}
        remarks = [error.message for error in session.missing.values()]
    remarks += [f"{name}: Docker: {s.docker_error}" for name, s in stores.items() if s.docker_error]
    if call.as_json:
        click.echo(dump_json(_as_json(call.inventory.cluster, stores, remarks)))
    elif not any(store.images for store in stores.values()) and not remarks:
        say("these nodes have no images")
    else:
        show(render_images(stores, remarks))
    return 1 if remarks else 0


def _as_json(cluster: str, stores: Mapping[str, ImageStore], remarks: list[str]) -> dict[str, Any]:
    def image_json(image: Image) -> dict[str, Any]:
        keys = ("id", "identity", "names", "digests", "architecture", "layers", "size")
        return {key: value for key, value in asdict(image).items() if key in keys}

    nodes = {
        name: {
            "free": store.free,
            "docker": store.docker_version,
            "store": "containerd" if store.containerd else "classic",
            "unfinished": store.unfinished,
            "images": [image_json(image) for image in store.images],
        }
        for name, store in stores.items()
    }
    return {"cluster": cluster, "nodes": nodes, "remarks": list(remarks)}


image.add_command(copy)
image.add_command(pull)


def render_images(stores: Mapping[str, ImageStore], remarks: Sequence[str] = ()) -> RenderableType:
    """Return a table with one row per name and image, and below it names of differing images,
    unfinished copies and free space.
    """
    from rich.console import Group

    table = make_table("IMAGE", "ID", "SIZE", "LAYERS", "ON")
    rows: dict[tuple[str, str], list[tuple[str, Image]]] = {}
    for node, store in stores.items():
        for image in store.images:
            for name in image.names or (_NONE,):
                rows.setdefault((name, image.identity), []).append((node, image))
    for key in sorted(rows, key=lambda key: key[0]):
        table.add_row(*(plain_text(cell) for cell in _cells(key[0], rows[key])))
    return Group(
        table,
        *(text_line(text, "yellow") for text in _describe_differences(list(rows))),
        *(text_line(text) for text in _describe_unfinished(stores)),
        *(text_line(f"{node}: {format_size(store.free)} free") for node, store in stores.items()),
        *(text_line(text, "red") for text in remarks),
    )


def _cells(name: str, images: Sequence[tuple[str, Image]]) -> tuple[str, ...]:
    layers = str(len(images[0][1].layers))
    # Docker's two kinds of stores name the same image by different digests.
    ids = dict.fromkeys(image.id.removeprefix("sha256:")[:12] for _, image in images)
    size = format_size(max(image.size for _, image in images))
    return (name, " ".join(ids), size, layers, fold([node for node, _ in images]))


def _describe_differences(rows: Sequence[tuple[str, str]]) -> list[str]:
    names = [name for name, _ in rows if name != _NONE]
    return [
        f"{name} differs between nodes; to fix it, run `vlaunch image copy {name} --from NODE`"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]


def _describe_unfinished(stores: Mapping[str, ImageStore]) -> list[str]:
    return [
        f"{node}: {format_size(store.unfinished)} of incomplete copies in {store.folder}; run the"
        " same command again to continue"
        for node, store in stores.items()
        if store.unfinished
    ]
