"""`vlaunch image`: which images lie on which nodes, whether they are the same, and how to bring one
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.cli import options
from launcher.cli.choose import chosen
from launcher.cli.command import Call, command
from launcher.cli.image_prune import prune
from launcher.cli.image_push import pull, push
from launcher.cli.model import NODE
from launcher.errors import NodeError, RequestError, UnreadableAnswer
from launcher.model import Node, fold

if TYPE_CHECKING:
    from launcher.cli.session import Session
    from launcher.tools.docker import Image
    from launcher.tools.image_store import Store

_READ = 7200.0  # seconds


@click.group()
def image() -> None:
    """Show which images lie on which nodes, compare them, bring one to all nodes without a
    registry, or remove what is left over.
    """


@command(
    "list",
    under=image,
    path=True,
    shows="none",
    flags=[options.JSON],
    short_help="which images are where, and which of one name are not the same",
)
@NODE
def list_(call: Call, nodes: tuple[str, ...]) -> int:
    """Show the images of every node's Docker, and how much room there is.

    Images of one name stand in one line as long as layers and configuration are the same. The exit
    code is 1 when a node cannot be asked.
    """
    from launcher.cli import image_copying
    from launcher.ui import images as ui
    from launcher.ui import json_line
    from launcher.ui.terminal import say, show

    picked = chosen(call.inventory, nodes)
    with call.session(partial=True, nodes=picked) as session:
        reached = session.reached_of(picked)
        seen = image_copying.look(session, reached) if reached else {}
        remarks = [error.message for error in session.missing.values()]
    remarks += [f"{name}: Docker: {each.trouble}" for name, each in seen.items() if each.trouble]
    if call.as_json:
        click.echo(json_line.dumps(_as_json(call.inventory.cluster, seen, remarks)))
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


@command(
    under=image,
    flags=[options.JSON],
    short_help="whether an image is the same on all nodes, and its layers are what they should be",
)
@click.argument("name", metavar="[IMAGE]", required=False)
@click.option("--deep", is_flag=True, help="Read all layers back from Docker.")
@NODE
def verify(call: Call, name: str | None, deep: bool, nodes: tuple[str, ...]) -> None:
    """Compare IMAGE, by default the inventory's, between the nodes: layers and configuration must
    be the same, whatever registry they are from.

    With --deep every node reads all layers back from its Docker (`docker save`), and compares them
    with their digests, which finds damage on its disk. The exit code is 1 when something differs.
    """
    from launcher.cli import image_copying
    from launcher.cli.model_programs import missing_told

    name = name or call.inventory.image
    picked = chosen(call.inventory, nodes)
    with call.session(partial=True, nodes=picked) as session:
        missing_told(session)
        reached = session.reached_of(picked)
        session.begin("verify", f"Compare {name} on {fold([node.name for node in reached])}")
        seen = image_copying.look(session, reached) if reached else {}
        found = {
            node: there for node, each in seen.items() if (there := each.image(name)) is not None
        }
        _compare(session, name, seen, found)
        if deep:
            _read_back(session, name, [node for node in reached if node.name in found])
        session.done(f"{name} is the same on {fold(list(found))}", stage="verify")


def _compare(
    session: Session, name: str, seen: Mapping[str, Store], found: Mapping[str, Image]
) -> None:
    """Raise when an image is not the same everywhere, or nowhere."""
    from launcher.plan.image_copying import short
    from launcher.sizes import told

    if not found:
        raise RequestError(f"no node has {name}", hint="see what is where: `vlaunch image list`")
    groups: dict[str, list[str]] = {}
    for node, each in found.items():
        groups.setdefault(each.identity, []).append(node)
    for nodes in groups.values():
        each = found[nodes[0]]
        text = f"{short(each)}, {told(each.size)}, {len(each.layers)} layers"
        session.note("verify", text, node=fold(nodes))
    lacking = [node for node in seen if node not in found]
    first = max(groups.values(), key=len)
    others = [node for nodes in groups.values() if nodes is not first for node in nodes]
    if lacking or others:
        raise NodeError(
            fold([*lacking, *others]),
            f"{name} is not the same everywhere",
            evidence=[
                *([f"{fold(lacking)}: it is not there"] if lacking else []),
                *([f"{fold(others)}: another image than on {fold(first)}"] if others else []),
            ],
            hint=f"bring one everywhere: `vlaunch image push {name} --from {first[0]}`",
        )


def _read_back(session: Session, name: str, nodes: Sequence[Node]) -> None:
    """Have every node read all layers; raises NodeError when one is not what it should be."""
    from launcher.cli.image_copying import program
    from launcher.errors import together
    from launcher.sizes import told
    from launcher.tools import image_copy

    session.wait("verify", "reading all layers", deadline=_READ)
    asked = [
        program(session, node.name, image_copy.read_back(node.docker, image=name), timeout=_READ)
        for node in nodes
    ]
    failed = []
    for answer in session.transport.run(asked):
        try:
            said = image_copy.parse_read_back(answer)
        except UnreadableAnswer as error:
            why = [image_copy.why(error), error.evidence]
            hint = f"remove it there, and bring it again: `docker rmi --force {name}`"
            text = f"{name} is not what it should be"
            failed.append(NodeError(answer.node, text, evidence=why, hint=hint))
        else:
            text = f"all {said.layers} layers are right; {told(said.bytes)} read"
            session.step("verify", text, node=answer.node, seconds=said.seconds)
    if failed:
        raise together(failed, f"{name} is not what it should be")


image.add_command(push)
image.add_command(pull)
image.add_command(prune)
