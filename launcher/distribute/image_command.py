"""`vlaunch image`: list images; copy and pull are in a module of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.app import options
from launcher.app.choose import chosen
from launcher.app.command import Call, command
from launcher.app.terminal import dump_json, line, make_table, plain, say, show
from launcher.core.domain import fold
from launcher.core.sizes import told
from launcher.distribute.image_copy import copy, look, pull
from launcher.distribute.image_store import Store
from launcher.tools.docker import Image

if TYPE_CHECKING:
    from rich.console import RenderableType


_NONE = "<none>"


@click.group()
def image() -> None:
    """List the images of the nodes, or copy one to all nodes without a registry."""


@command(
    "list",
    under=image,
    path=True,
    shows="none",
    flags=[options.JSON],
    short_help="List the images of all nodes, and those that differ",
)
@options.NODES
def list_(call: Call, nodes: tuple[str, ...]) -> int:
    """Show the images of every node's Docker, and how much room there is.

    Images of one name stand in one line as long as layers and configuration are the same. The exit
    code is 1 when a node cannot be asked.
    """
    picked = chosen(call.inventory, nodes)
    with call.session(partial=True, nodes=picked) as session:
        reached = session.reached_of(picked)
        stores = look(session, reached) if reached else {}
        remarks = [error.message for error in session.missing.values()]
    remarks += [
        f"{name}: Docker: {store.trouble}" for name, store in stores.items() if store.trouble
    ]
    if call.as_json:
        click.echo(dump_json(_as_json(call.inventory.cluster, stores, remarks)))
    elif not any(store.images for store in stores.values()) and not remarks:
        say("there is no image on these nodes")
    else:
        show(render(stores, remarks))
    return 1 if remarks else 0


def _as_json(cluster: str, seen: Mapping[str, Store], remarks: Sequence[str]) -> dict[str, Any]:
    def one(found: Image) -> dict[str, Any]:
        wanted = ("id", "identity", "names", "digests", "architecture", "layers", "size")
        return {key: value for key, value in asdict(found).items() if key in wanted}

    nodes = {
        name: {
            "free": each.free,
            "docker": each.version,
            "store": "containerd" if each.containerd else "classic",
            "unfinished": each.unfinished,
            "images": [one(found) for found in each.images],
        }
        for name, each in seen.items()
    }
    return {"cluster": cluster, "nodes": nodes, "remarks": list(remarks)}


image.add_command(copy)
image.add_command(pull)


def render(seen: Mapping[str, Store], remarks: Sequence[str] = ()) -> RenderableType:
    """Return the table: one row for each name, and one more for each image that it means elsewhere;
    below it those that differ, unfinished copies, and what room is left.
    """
    from rich.console import Group

    table = make_table("IMAGE", "ID", "SIZE", "LAYERS", "ON")
    rows: dict[tuple[str, str], list[tuple[str, Image]]] = {}
    for node, each in seen.items():
        for image in each.images:
            for name in image.names or (_NONE,):
                rows.setdefault((name, image.identity), []).append((node, image))
    for key in sorted(rows, key=lambda key: key[0]):
        table.add_row(*(plain(cell) for cell in _cells(key[0], rows[key])))
    return Group(
        table,
        *(line(each, "yellow") for each in _differing(list(rows))),
        *(line(each) for each in _left(seen)),
        *(line(f"{node}: {told(each.free)} free") for node, each in seen.items()),
        *(line(each, "red") for each in remarks),
    )


def _cells(name: str, found: Sequence[tuple[str, Image]]) -> tuple[str, ...]:
    image = found[0][1]
    # Docker's two kinds of stores name the same image by different digests.
    ids = dict.fromkeys(each.id.removeprefix("sha256:")[:12] for _, each in found)
    size = told(max(each.size for _, each in found))
    return (name, " ".join(ids), size, str(len(image.layers)), fold([node for node, _ in found]))


def _differing(rows: Sequence[tuple[str, str]]) -> list[str]:
    names = [name for name, _ in rows if name != _NONE]
    return [
        f"{name} is not the same image everywhere; `vlaunch image copy {name} --from NODE` mends it"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]


def _left(seen: Mapping[str, Store]) -> list[str]:
    return [
        f"{node}: {told(each.unfinished)} of unfinished copies in {each.folder}; the same command"
        " continues them"
        for node, each in seen.items()
        if each.unfinished
    ]
