"""Observed state of a cluster, the basis of all plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.agent.desired import Desired
from launcher.tools import model
from launcher.tools.site import Site, servers
from launcher.tools.site.history import ServerRevision
from launcher.tools.site.network_verdict import NetworkRecord
from launcher.tools.site.servers import ServersState


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Nodes, the head's reply about Ray and servers (`payload`), the model on each node, earlier
    revisions of servers, and the last verdict on the network.
    """

    site: Site
    payload: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, model.ModelScan] = field(default_factory=dict)
    network: NetworkRecord = field(default_factory=NetworkRecord)
    revisions: tuple[ServerRevision, ...] = ()

    @property
    def servers_state(self) -> ServersState:
        """The servers."""
        return servers.parse_servers(self.payload)

    def with_server(self, spec: Desired) -> ClusterSnapshot:
        """Return the snapshot with a server of this spec, which has not started yet."""
        rows = self.payload.get("servers")
        others = [
            row
            for row in (rows if isinstance(rows, list) else ())
            if isinstance(row, Mapping) and row.get("name") != spec.name
        ]
        new = {"name": spec.name, "desired": spec.as_json()}
        return replace(self, payload={**self.payload, "servers": [*others, new]})

    @property
    def weight_bytes(self) -> int:
        """Size of the model's weights on the head in bytes; 0 if unknown."""
        scan = self.models.get(self.site.head.name)
        return scan.weight_bytes if scan else 0

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Model's `config.json` from the first node that has one."""
        return next((scan.config for scan in self.models.values() if scan.config is not None), None)
