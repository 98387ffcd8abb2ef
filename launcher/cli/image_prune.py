"""`vlaunch image prune`: remove what interrupted copies have left, and images of Ray that were made
for something else than what the cluster runs now.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from launcher.cli import options
from launcher.cli.choose import chosen
from launcher.cli.command import Call, command
from launcher.cli.model import NODE
from launcher.errors import NodeError, RequestError, together
from launcher.model import Node, fold

if TYPE_CHECKING:
    from launcher.cli.session import Session
    from launcher.plan.pruning import Doomed
    from launcher.tools.image_store import Store


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="remove unfinished copies, and images of Ray that nothing uses any more",
)
@NODE
@click.option("--yes", is_flag=True, help="Do not ask.")
def prune(call: Call, nodes: tuple[str, ...], yes: bool) -> None:
    """Remove from every node what interrupted copies of images have left, and the images that
    `vlaunch up` made to have Ray (`vlaunch/ray:…`), but for those of the inventory's image and
    those that a container, of whatever cluster, is made of.

    Nothing else is touched: `docker image prune` on a node removes more.
    """
    from launcher.cli import image_copying
    from launcher.cli.model_programs import missing_told
    from launcher.plan.pruning import doomed

    picked = chosen(call.inventory, nodes)
    with call.session(partial=True) as session, call.locked(session) as ours:
        missing_told(ours)
        reached = session.reached_of(picked)
        seen = image_copying.look(ours, reached) if reached else {}
        found = {
            name: each
            for name, store in seen.items()
            if (each := doomed(store, call.inventory.image))
        }
        if not found:
            session.done("there was nothing to remove", stage="prune", data={"changed": 0})
        elif call.dry_run:
            _print(found)
        else:
            _confirm(ours, found, yes=yes)
            _remove(ours, [node for node in reached if node.name in found], seen, found)


def _print(found: Mapping[str, Doomed]) -> None:
    from launcher.sizes import told

    for name, each in found.items():
        if each.unfinished:
            click.echo(f"{name}: unfinished copies would be removed, {told(each.unfinished)}")
        for image in each.images:
            click.echo(f"{name}: {image} would be removed, where no container needs it")


def _confirm(session: Session, found: Mapping[str, Doomed], *, yes: bool) -> None:
    if yes:
        return
    where = fold(list(found))
    if not sys.stdin.isatty():
        raise RequestError(
            f"nobody can be asked whether this may be removed from {where}",
            hint="see what it is: `vlaunch image prune --dry-run`; then say it: `vlaunch image"
            " prune --yes`",
        )
    with session.to.paused():
        _print(found)
        click.confirm("Remove this?", abort=True, err=True)


def _remove(
    session: Session,
    nodes: Sequence[Node],
    seen: Mapping[str, Store],
    found: Mapping[str, Doomed],
) -> None:
    from launcher.cli.image_copying import program
    from launcher.tools import docker, image_copy
    from launcher.transport import Command

    words = {node.name: ["removing images that nothing uses"] for node in nodes}
    before = dict(session.transport.record("image prune", words))
    commands = []
    for node in nodes:
        doomed, store = found[node.name], seen[node.name]
        if doomed.unfinished:
            request = image_copy.drop(store.folder, store.top)
            first = before.pop(node.name, ())
            commands.append(program(session, node.name, request, timeout=600.0, before=first))
        commands += [
            Command(
                node=node.name,
                argv=docker.remove_image(node.docker, image),
                timeout=600.0,
                before=before.pop(node.name, ()),
            )
            for image in doomed.images
        ]
    failed, used = [], 0
    for answer in session.transport.run(commands):
        if answer.ok:
            continue
        if "is using its referenced image" in answer.err or "is being used" in answer.err:
            used += 1
            session.note("prune", "an image that a container needs stays", node=answer.node)
        else:
            failed.append(NodeError(answer.node, "cannot remove it", evidence=answer.tail))
    if failed:
        raise together(failed, "cannot remove all of it")
    removed = len(commands) - used
    text = f"removed from {fold([node.name for node in nodes])}: {removed} images and copies"
    session.done(text, stage="prune", data={"changed": removed})
