"""`vlaunch image`: list images; copy and pull are in a module of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from launcher.app import options
from launcher.app.choose import chosen
from launcher.app.command import Call, command
from launcher.app.terminal import dump_json, say, show
from launcher.distribute import images_view as ui
from launcher.distribute.image_copy import copy, look, pull
from launcher.distribute.image_store import Store
from launcher.tools.docker import Image


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
        seen = look(session, reached) if reached else {}
        remarks = [error.message for error in session.missing.values()]
    remarks += [f"{name}: Docker: {each.trouble}" for name, each in seen.items() if each.trouble]
    if call.as_json:
        click.echo(dump_json(_as_json(call.inventory.cluster, seen, remarks)))
    elif not any(each.images for each in seen.values()) and not remarks:
        say("there is no image on these nodes")
    else:
        show(ui.render(seen, remarks))
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
