"""`vlaunch up`: bring the cluster up, or to the inventory's state."""

from __future__ import annotations

import time
from collections.abc import Mapping

import click

from launcher.app import options
from launcher.app.command import Call, command
from launcher.app.find_inventory import remember
from launcher.app.secrets import resolve
from launcher.app.session import Session
from launcher.core.domain import Inventory, Secret
from launcher.core.plan import Plan
from launcher.distribute import image_copy
from launcher.tools.observe import observe
from launcher.tools.site import Site


@command(
    path=True,
    flags=[
        options.DRY_RUN,
        options.OFFLINE,
        options.LOCK_WAIT,
        options.NO_HOOKS,
        options.JSON,
    ],
)
@options.JOIN_TIMEOUT
def up(call: Call, join_timeout: float) -> None:
    """Bring the cluster up, or to the inventory's state.

    Nodes are looked at first; then only what is missing or different is changed. A second run
    changes nothing.
    """
    if call.offline and not call.dry_run:
        raise click.UsageError(
            "--offline goes with --dry-run: no cluster comes up without its nodes"
        )
    wanted = call.inventory
    if call.offline:
        call.print_script(_unseen(wanted))
        return
    given = resolve(wanted.secrets, wanted.path.parent)
    with call.session(hooks_of="up") as session:
        with call.locked(session) as ours:
            ours.hooks.pre(ours.to)
            plans = bring_up(ours, given, dry_run=call.dry_run, join_timeout=join_timeout)
        if not call.dry_run:
            remember(wanted.path)
            session.hooks.post(session.to)
    if call.dry_run:
        call.print_script(plans)


def bring_up(
    session: Session,
    given: Mapping[str, Secret],
    *,
    dry_run: bool,
    join_timeout: float,
    renew: bool = False,
) -> list[Plan]:
    """Observe, plan and apply; with `dry_run` only return the plans. With `renew` the agents always
    get new certificates.

    Two plans, because what has to be built follows from what the image says about itself, and it
    must be there to be asked.
    """
    from launcher.cluster import prepare
    from launcher.cluster.up_plan import lacks_image, plan_image, plan_up, rights

    began = time.monotonic()
    inventory = session.inventory
    facts = observe(inventory, session.transport, [inventory.image])
    site = Site(inventory, facts)
    first = plan_image(site)
    changes = len(lacks_image(site))
    if dry_run and changes:
        secrets = prepare.with_token(inventory, facts, given, make=not dry_run)
        renewal = prepare.renewal(inventory, facts, make=False, force=renew)
        programs = prepare.py_spy(session, site, download=False)
        image = prepare.unknown_image(inventory)
        return [first, plan_up(site, secrets, image, renewal, py_spy=programs)]
    for note in rights(inventory):
        session.warn("rights", note)
    session.apply(first)
    if changes:
        if inventory.image_source == "nodes":
            image_copy.everywhere(session, inventory.image)
        facts = observe(inventory, session.transport, [inventory.image])
        site = Site(inventory, facts)
    image = prepare.ray_image(session, facts)
    secrets = prepare.with_token(inventory, facts, given, make=not dry_run)
    renewal = prepare.renewal(inventory, facts, make=not dry_run, force=renew)
    programs = prepare.py_spy(session, site, download=not dry_run)
    second = plan_up(site, secrets, image, renewal, py_spy=programs, join_timeout=join_timeout)
    if dry_run:
        return [first, second]
    if second.notes:
        session.begin("difference", "What differs from the inventory")
    for note in second.notes:
        session.note("difference", note)
    session.apply(second)
    changed = changes + len(second.steps)
    text = (
        f"cluster {inventory.cluster} is up: {len(inventory.nodes)} nodes, {inventory.gpus} GPUs"
        if changed
        else f"cluster {inventory.cluster} is up already; nothing was changed"
    )
    session.done(text, seconds=time.monotonic() - began, data={"changed": changed})
    return [first, second]


def _unseen(inventory: Inventory) -> list[Plan]:
    from launcher.cluster import prepare
    from launcher.cluster.up_plan import plan_image, plan_up

    secrets = prepare.with_token(
        inventory, {}, dict.fromkeys(inventory.secrets, Secret("")), make=False
    )
    image, renewal = prepare.unknown_image(inventory), prepare.renewal(inventory, {}, make=False)
    return [plan_image(Site(inventory)), plan_up(Site(inventory), secrets, image, renewal)]
