"""`vlaunch image push` and `pull`: an image from one node's Docker, or this machine's, to every
other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from launcher.cli import options
from launcher.cli.choose import chosen
from launcher.cli.command import Call, command
from launcher.cli.model_push import rate_of
from launcher.errors import NodeError
from launcher.model import Node, fold

if TYPE_CHECKING:
    from launcher.cli.session import Session

_PULL = 3600.0  # seconds, as `up` waits
_TO = click.option(
    "--to",
    "targets",
    multiple=True,
    metavar="NODE",
    help="Only to this node (may be given several times).",
)
_RATE = click.option(
    "--rate", callback=rate_of, metavar="SIZE", help="Bytes a second of each node, at most."
)


def _scratch(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.startswith("/") or "\0" in value:
        raise click.BadParameter("should be the path of a folder on the nodes, such as /var/tmp")
    return value.rstrip("/") or "/"


def _scratch_option(function: Callable[..., Any]) -> Callable[..., Any]:
    from launcher.tools.image_store import SCRATCH

    return click.option(
        "--scratch",
        default=SCRATCH,
        show_default=True,
        callback=_scratch,
        metavar="FOLDER",
        help="Where what is on its way lies on each node.",
    )(function)


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="bring an image to all nodes, from one that has it or from this machine",
)
@click.argument("image", required=False)
@click.option("--from", "source", metavar="NODE", help="Copy from this node.")
@click.option("--here", is_flag=True, help="Copy from this machine's Docker.")
@_TO
@_RATE
@_scratch_option
def push(
    call: Call,
    image: str | None,
    source: str | None,
    here: bool,
    targets: tuple[str, ...],
    rate: int,
    scratch: str,
) -> None:
    """Copy IMAGE, by default the inventory's, from one Docker to those of all nodes, without a
    registry: each node passes on to the next one what it has already got, so that all have it in
    about the time of one copy.

    Layers that a node has, as part of any image, do not travel. Every byte is compared on every
    node, Docker compares every layer with its digest, and at the end all images are compared with
    the source's. A node that fails stops no other. After Ctrl-C, or whatever else went wrong, the
    same command goes on where it was.
    """
    from launcher.cli import image_copying
    from launcher.plan.image_copying import plan_image
    from launcher.tools.chain import HERE

    if source and here:
        raise click.UsageError("--from names a node, --here is this machine: use one of them")
    name = image or call.inventory.image
    wanted = chosen(call.inventory, targets)
    givers = () if here else chosen(call.inventory, [source] if source else [])
    asked = [node for node in call.inventory.nodes if node in wanted or node in givers]
    wishes = image_copying.Wishes(rate=rate, scratch=scratch)
    with call.session(nodes=asked) as session, call.locked(session) as ours:
        session.begin("look", f"Look for {name} on {fold([node.name for node in asked])}")
        seen = image_copying.look(ours, asked, scratch=scratch, here=here)
        copying = plan_image(
            name,
            seen,
            source=HERE if here else source or "",
            targets=[node.name for node in wanted],
        )
        if call.dry_run:
            image_copying.print_plan(copying)
        else:
            image_copying.bring(ours, copying, seen, wishes)


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="have one node pull an image from its registry, and bring it to the others",
)
@click.argument("image", required=False)
@click.option("-n", "--node", "fetcher", metavar="NAME", help="Who pulls (the head by default).")
@_TO
@_RATE
@_scratch_option
def pull(
    call: Call,
    image: str | None,
    fetcher: str | None,
    targets: tuple[str, ...],
    rate: int,
    scratch: str,
) -> None:
    """Have one node pull IMAGE, by default the inventory's, as its own Docker does, with what is
    logged in there (`docker login`); then copy it to the others as `vlaunch image push` does.

    Where the tag means another image by now than what nodes have, they get the new one.
    """
    from launcher.cli import image_copying
    from launcher.plan.image_copying import plan_image

    name = image or call.inventory.image
    wanted = chosen(call.inventory, targets)
    (node,) = chosen(call.inventory, [fetcher or call.inventory.head.name])
    asked = [each for each in call.inventory.nodes if each in wanted or each is node]
    wishes = image_copying.Wishes(rate=rate, scratch=scratch)
    with call.session(nodes=asked) as session, call.locked(session) as ours:
        if call.dry_run:
            click.echo(f"{node.name} would pull {name}")
            click.echo(f"  {fold([each.name for each in asked if each is not node])} would get it")
            return
        fetch(ours, node, name)
        seen = image_copying.look(ours, asked, scratch=scratch)
        copying = plan_image(name, seen, source=node.name, targets=[each.name for each in wanted])
        image_copying.bring(ours, copying, seen, wishes)


def fetch(session: Session, node: Node, name: str) -> None:
    """Have a node pull an image; raises NodeError."""
    from launcher.tools import docker
    from launcher.transport import Command

    session.begin("pull", f"Pull {name} on {node.name}")
    session.wait("pull", "docker pull", deadline=_PULL)
    before = session.transport.record("image pull", {node.name: [f"pulling {name}"]})
    pulling = Command(
        node=node.name,
        argv=docker.pull(node.docker, name),
        timeout=_PULL,
        before=before[node.name],
    )
    (answer,) = session.transport.run([pulling])
    if not answer.ok:
        raise NodeError(
            node.name,
            f"cannot pull {name}",
            evidence=answer.tail,
            hint="try another node: `--node NAME`; or bring it from this machine: `vlaunch image"
            f" push {name} --here`",
        )
    session.step("pull", "pulled", node=node.name, seconds=answer.seconds)


def everywhere(session: Session, name: str) -> None:
    """Have all nodes have an image that one has, as a part of another command; raises what
    `vlaunch image push` does.
    """
    from launcher.cli import image_copying
    from launcher.plan.image_copying import plan_image

    nodes = session.inventory.nodes
    session.begin("look", f"Look for {name} on {fold([node.name for node in nodes])}")
    seen = image_copying.look(session, nodes)
    image_copying.bring(session, plan_image(name, seen), seen, image_copying.Wishes(alone=False))
