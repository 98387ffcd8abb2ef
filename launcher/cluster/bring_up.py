"""Steps of `up`: observe the nodes, plan what differs from the inventory, and apply the plans."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from launcher.app.session import Session
from launcher.cluster import up_inputs
from launcher.cluster.up_plan import (
    RayImage,
    nodes_without_image,
    plan_image,
    plan_up,
    privilege_notes,
)
from launcher.core.domain import Inventory, Secret
from launcher.core.plan import Plan
from launcher.core.sizes import format_count
from launcher.distribute import image_copy
from launcher.front import front_plan
from launcher.front.certificates import load_certificate
from launcher.front.update import update_front
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site


def plan_changes(
    session: Session, values: Mapping[str, Secret], *, renew: bool = False
) -> list[Plan]:
    """Observe the nodes, and plan what `bring_up` would change; raises like it.

    A missing image cannot be probed: the plans have gaps then.
    """
    inventory = session.inventory
    update = _front_update(session, values)
    site = _observe(session)
    image_plan = plan_image(site)
    if nodes_without_image(site):
        image = up_inputs.placeholder_image(inventory)
    else:
        checks = tuple(replace(stage, steps=()) for stage in image_plan.stages)
        _apply_image(session, replace(image_plan, stages=checks))
        image = up_inputs.resolve_ray_image(session, site.facts)
    py_spy = up_inputs.load_py_spy(session, site, download=False)
    up_plan = _plan_containers(site, values, image, make=False, renew=renew, py_spy=py_spy)
    return [image_plan, up_plan, update(site, dry_run=True)]


def bring_up(
    session: Session, values: Mapping[str, Secret], *, join_timeout: float, renew: bool = False
) -> None:
    """Observe, plan and apply. With `renew` the agents always get new certificates.

    There are two plans: the image must be on the head to be probed, and the build depends on the
    result.
    """
    began = time.monotonic()
    inventory = session.inventory
    update = _front_update(session, values)
    site = _observe(session)
    missing_images = len(nodes_without_image(site))
    _apply_image(session, plan_image(site))
    if missing_images:
        if inventory.image_source == "nodes":
            image_copy.copy_to_all(session, inventory.image)
        site = _observe(session)
    image = up_inputs.resolve_ray_image(session, site.facts)
    py_spy = up_inputs.load_py_spy(session, site)
    up_plan = _plan_containers(
        site, values, image, renew=renew, py_spy=py_spy, join_timeout=join_timeout
    )
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


def plan_offline(inventory: Inventory) -> list[Plan]:
    """Plan for nodes without containers and images, and without values of secrets."""
    values = dict.fromkeys(inventory.secrets, Secret(""))
    site = Site(inventory)
    up_plan = _plan_containers(site, values, up_inputs.placeholder_image(inventory), make=False)
    certificate = Secret("") if front_plan.uses_tls(inventory) else None
    server_key = values.get(front_plan.SERVER_KEY)
    inputs = front_plan.FrontInputs(certificate=certificate, server_key=server_key)
    return [plan_image(site), up_plan, front_plan.plan_front(site, inputs, verb="up")]


def _observe(session: Session) -> Site:
    inventory = session.inventory
    images = [inventory.image, *([inventory.front.image] if inventory.front else [])]
    return Site(inventory, probe_nodes(inventory, session.transport, images))


def _apply_image(session: Session, plan: Plan) -> None:
    for note in privilege_notes(session.inventory):
        session.warn("rights", note)
    session.apply(plan)


def _plan_containers(
    site: Site,
    values: Mapping[str, Secret],
    image: RayImage,
    *,
    make: bool = True,
    renew: bool = False,
    **options: Any,
) -> Plan:
    """Plan with the cluster's token and the agents' certificates; unless `make`, new ones are
    placeholders.
    """
    inventory, facts = site.inventory, site.facts
    secrets = up_inputs.add_token(inventory, facts, values, make=make)
    renewal = up_inputs.renew_certificates(inventory, facts, make=make, force=renew)
    return plan_up(site, secrets, image, renewal, **options)


def _front_update(session: Session, values: Mapping[str, Secret]) -> Callable[..., Plan]:
    """Return the update of the front; its certificate is read now."""
    return partial(
        update_front,
        session,
        verb="up",
        start=True,
        certificate=load_certificate(session.inventory),
        server_key=values.get(front_plan.SERVER_KEY),
    )
