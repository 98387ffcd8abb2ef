"""`vlaunch up`: bring the cluster up, or to the inventory's state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from launcher.cli import options

if TYPE_CHECKING:
    from launcher.cli.session import Session
    from launcher.model import Inventory, Secret
    from launcher.plan.shape import Plan


@click.command()
@click.argument("path", metavar="[INVENTORY]", required=False)
@options.reaching
@options.as_json
@click.option(
    "--dry-run", is_flag=True, help="Print the script that would be sent; change nothing."
)
@click.option(
    "--offline",
    is_flag=True,
    help="With --dry-run: touch no node, and assume that nothing is there yet.",
)
@options.lock_wait
@options.no_hooks
@click.option(
    "--join-timeout", default=180.0, show_default=True, help="Seconds for all nodes to join."
)
def up(
    path: str | None,
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    as_json: bool,
    dry_run: bool,
    offline: bool,
    lock_wait: int,
    no_hooks: bool,
    join_timeout: float,
) -> None:
    """Bring the cluster up, or to the inventory's state.

    Nodes are looked at first; then only what is missing or different is changed. A second run
    changes nothing.
    """
    from launcher.cli import session
    from launcher.cli.find import remember
    from launcher.cli.hooks import hooks
    from launcher.cli.locked import locked
    from launcher.plan.script import script
    from launcher.remote.secrets import resolve
    from launcher.ui.progress import printer

    if offline and not dry_run:
        raise click.UsageError(
            "--offline goes with --dry-run: no cluster comes up without its nodes"
        )
    wanted = session.read(path, inventory)
    if offline:
        click.echo(script(wanted, _unseen(wanted)), nl=False)
        return
    programs = hooks(wanted, "up", skip=no_hooks, dry_run=dry_run)
    given = resolve(wanted.secrets, wanted.path.parent)
    with (
        printer(as_json=as_json, quiet=dry_run) as to,
        programs.watching(to),
        session.reach(
            wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose
        ) as reached,
    ):
        with locked(reached, wait=lock_wait, unless=dry_run) as ours:
            programs.pre(to)
            plans = bring_up(ours, given, dry_run=dry_run, join_timeout=join_timeout)
        if not dry_run:
            remember(wanted.path)
            programs.post(to)
    if dry_run:
        click.echo(script(wanted, plans), nl=False)


def bring_up(
    session: Session, given: Mapping[str, Secret], *, dry_run: bool, join_timeout: float
) -> list[Plan]:
    """Observe, plan and apply; with `dry_run` only say which plans there would be.

    Two plans, because what has to be built follows from what the image says about itself, and it
    must be there to be asked.
    """
    from launcher.apply import apply
    from launcher.cli import prepare
    from launcher.events import Event
    from launcher.plan.observe import observe
    from launcher.plan.up import base_image, plan_image, plan_up
    from launcher.ui.progress import show_all

    began = time.monotonic()
    inventory, to = session.inventory, session.to
    facts = observe(inventory, session.transport, [inventory.image])
    first = plan_image(inventory, facts)
    if dry_run and first.steps:
        secrets = prepare.with_token(inventory, facts, given, make=not dry_run)
        unknown = base_image(inventory) if inventory.ray.off else prepare.unknown_image(inventory)
        return [first, plan_up(inventory, facts, secrets, unknown)]
    show_all(apply(first, session.transport), to)
    if first.steps:
        facts = observe(inventory, session.transport, [inventory.image])
    image = base_image(inventory) if inventory.ray.off else prepare.ray_image(session, facts)
    secrets = prepare.with_token(inventory, facts, given, make=not dry_run)
    second = plan_up(inventory, facts, secrets, image, join_timeout=join_timeout)
    if dry_run:
        return [first, second]
    if second.notes:
        to.show(
            Event(
                kind="stage",
                stage="difference",
                text="What differs from the inventory",
                state="running",
            )
        )
    for note in second.notes:
        to.show(Event(kind="note", stage="difference", text=note))
    show_all(apply(second, session.transport), to)
    changed = len(first.steps) + len(second.steps)
    text = (
        f"cluster {inventory.cluster} is up: {len(inventory.nodes)} nodes, {inventory.gpus} GPUs"
        if changed
        else f"cluster {inventory.cluster} is up already; nothing was changed"
    )
    to.show(
        Event(
            kind="done",
            text=text,
            state="ok",
            seconds=time.monotonic() - began,
            data={"changed": changed},
        )
    )
    return [first, second]


def _unseen(inventory: Inventory) -> list[Plan]:
    from launcher.cli import prepare
    from launcher.model import Secret
    from launcher.plan.up import base_image, plan_image, plan_up

    secrets = prepare.with_token(
        inventory, {}, dict.fromkeys(inventory.secrets, Secret("")), make=False
    )
    image = base_image(inventory) if inventory.ray.off else prepare.unknown_image(inventory)
    return [plan_image(inventory, {}), plan_up(inventory, {}, secrets, image)]
