"""How the containers that are there differ from what the inventory asks for."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.core.domain import Node, Secret
from launcher.tools import containers, docker, ray
from launcher.tools.site import Site


def drift(site: Site, node: Node) -> tuple[str, ...]:
    """Say how a node's container differs from the inventory.

    `status` fetches no secrets, so that a new value of one goes unseen: the container's own
    fingerprint stands in for it.
    """
    there = site.container(node)
    return tuple(_differences(site, node, there)) if there is not None else ()


def _differences(site: Site, node: Node, there: docker.Container) -> list[str]:
    inventory = site.inventory
    base, image = site.image(node, inventory.image), site.image(node, there.image)
    made_from = image.labels.get("vlaunch.base") if image else None
    secrets = dict.fromkeys([*inventory.secrets, ray.TOKEN], Secret(""))
    spec = containers.node_spec(
        site,
        node,
        there.image if made_from else inventory.image,
        secrets,
        fingerprinted=there.labels.get("vlaunch.secrets"),
    )
    said = []
    if made_from and (base is None or made_from != base.identity):
        said.append(f"{there.image} was not made from the present {inventory.image}")
    if there.spec != spec.hash:
        said += docker.differences(there, spec, image.env if image else _own_env(there, spec))
    return said


def _own_env(there: docker.Container, spec: docker.ContainerSpec) -> Mapping[str, str]:
    """Return which variables an image brings that was not looked at: those that nobody sets are its
    own.
    """
    return {name: value for name, value in there.env.items() if name not in spec.env}
