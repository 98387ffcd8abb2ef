"""`vlaunch up`: start the cluster, or apply changes of the inventory."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.inventory_path import remember
from launcher.app.secrets import resolve
from launcher.app.session import Session
from launcher.core.domain import Inventory, Secret
from launcher.core.plan import Plan
from launcher.core.sizes import format_count
from launcher.distribute import image_copy
from launcher.tools.node_probes import probe_nodes
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
def up(call: CommandContext, join_timeout: float) -> None:
    """Start the cluster, or apply changes of the inventory to it.

    Nodes are scanned first; then only what is missing or different is changed. A second run changes
    nothing.
    """
    if call.offline and not call.dry_run:
        raise click.UsageError("--offline requires --dry-run")
    inventory = call.inventory
    if call.offline:
        call.print_script(_plan_offline(inventory))
        return
    values = resolve(inventory.secrets, inventory.path.parent)
    with call.session(hooks_of="up") as session:
        with call.locked(session) as locked:
            locked.hooks.run_pre(locked.printer)
            plans = bring_up(locked, values, dry_run=call.dry_run, join_timeout=join_timeout)
        if not call.dry_run:
            remember(inventory.path)
            session.hooks.run_post(session.printer)
    if call.dry_run:
        call.print_script(plans)


def bring_up(
    session: Session,
    values: Mapping[str, Secret],
    *,
    dry_run: bool,
    join_timeout: float,
    renew: bool = False,
) -> list[Plan]:
    """Observe, plan and apply; with `dry_run` only return the plans. With `renew` the agents always
    get new certificates.

    There are two plans: the image must be on the head to be probed, and the build depends on the
    result.
    """
    from launcher.cluster import up_inputs
    from launcher.cluster.up_plan import nodes_without_image, plan_image, plan_up, privilege_notes
    from launcher.front.certificates import load_certificate
    from launcher.front.front_plan import SERVER_KEY
    from launcher.front.update import update_front

    began = time.monotonic()
    inventory = session.inventory
    update = partial(
        update_front,
        session,
        verb="up",
        start=True,
        dry_run=dry_run,
        certificate=load_certificate(inventory),
        server_key=values.get(SERVER_KEY),
    )
    images = [inventory.image, *([inventory.front.image] if inventory.front else [])]
    facts = probe_nodes(inventory, session.transport, images)
    site = Site(inventory, facts)
    image_plan = plan_image(site)
    missing_images = len(nodes_without_image(site))
    if dry_run and missing_images:
        secrets = up_inputs.add_token(inventory, facts, values, make=not dry_run)
        renewal = up_inputs.renew_certificates(inventory, facts, make=False, force=renew)
        programs = up_inputs.load_py_spy(session, site, download=False)
        image = up_inputs.placeholder_image(inventory)
        up_plan = plan_up(site, secrets, image, renewal, py_spy=programs)
        return [image_plan, up_plan, update(site)]
    for note in privilege_notes(inventory):
        session.warn("rights", note)
    checks = tuple(replace(stage, steps=()) for stage in image_plan.stages)
    session.apply(replace(image_plan, stages=checks) if dry_run else image_plan)
    if missing_images:
        if inventory.image_source == "nodes":
            image_copy.copy_to_all(session, inventory.image)
        facts = probe_nodes(inventory, session.transport, images)
        site = Site(inventory, facts)
    image = up_inputs.resolve_ray_image(session, facts)
    secrets = up_inputs.add_token(inventory, facts, values, make=not dry_run)
    renewal = up_inputs.renew_certificates(inventory, facts, make=not dry_run, force=renew)
    programs = up_inputs.load_py_spy(session, site, download=not dry_run)
    up_plan = plan_up(site, secrets, image, renewal, py_spy=programs, join_timeout=join_timeout)
    if dry_run:
        return [image_plan, up_plan, update(site)]
    if up_plan.notes:
        session.begin("difference", "Differences from the inventory")
    for note in up_plan.notes:
        session.note("difference", note)
    session.apply(up_plan)
    front = update(site)
    changed = missing_images + len(up_plan.steps) + len(front.steps)
    text = (
        f"cluster {inventory.cluster} is up: {format_count(len(inventory.nodes), 'node')},"
        f" {format_count(inventory.gpus, 'GPU')}"
        if changed
        else f"cluster {inventory.cluster} is already up; nothing was changed"
    )
    session.done(text, seconds=time.monotonic() - began, data={"changed": changed})
    return [image_plan, up_plan, front]


def _plan_offline(inventory: Inventory) -> list[Plan]:
    from launcher.cluster import up_inputs
    from launcher.cluster.up_plan import plan_image, plan_up
    from launcher.front import front_plan
    from launcher.front.front_plan import SERVER_KEY

    secrets = up_inputs.add_token(
        inventory, {}, dict.fromkeys(inventory.secrets, Secret("")), make=False
    )
    image, renewal = (
        up_inputs.placeholder_image(inventory),
        up_inputs.renew_certificates(inventory, {}, make=False),
    )
    site = Site(inventory)
    certificate = Secret("") if front_plan.uses_tls(inventory) else None
    inputs = front_plan.FrontInputs(certificate=certificate, server_key=secrets.get(SERVER_KEY))
    front = front_plan.plan_front(site, inputs, verb="up")
    return [plan_image(site), plan_up(site, secrets, image, renewal), front]
