"""State of the front's containers, for `status`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from launcher.front.front_plan import describe_drift, front_container
from launcher.tools.shipped import certificates
from launcher.tools.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontState:
    """The front's URL, the states of its containers by node, and their drift; `certificate` is a
    warning before its certificate expires.
    """

    url: str
    nodes: Mapping[str, str]
    drift: tuple[str, ...] = ()
    certificate: str = ""

    @property
    def whole(self) -> bool:
        """True if all of them run and match the inventory, with a valid certificate."""
        good = not self.drift and " expired " not in self.certificate
        return good and all(state == "running" for state in self.nodes.values())


def front_state(site: Site, now: datetime) -> FrontState | None:
    """Return the state of the front's containers; None if there is no front."""
    inventory = site.inventory
    observed = {node.name: front_container(site, node) for node in site.observed_nodes}
    if inventory.front is None and not any(observed.values()):
        return None
    nodes = {node.name: observed.get(node.name) for node in inventory.front_nodes}
    return FrontState(
        url=f"{inventory.front_url}/NAME/v1" if inventory.front else "",
        nodes={
            name: container.status if container else "absent" if name in observed else "unknown"
            for name, container in nodes.items()
        },
        drift=tuple(describe_drift(site)),
        certificate=certificates.front_warning(inventory, site.facts, now),
    )
