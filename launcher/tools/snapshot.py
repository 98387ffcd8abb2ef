"""What was seen of a cluster before anything is decided about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.tools import model, servers
from launcher.tools.history import Answered
from launcher.tools.network_verdict import Record
from launcher.tools.servers import Kept
from launcher.tools.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """What was observed before anything is decided: nodes, what the head said about Ray and
    servers, the model on each node, what has answered before, and the last verdict on the network
    (`launcher.tools.network_verdict`).
    """

    site: Site
    said: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, model.ModelSeen] = field(default_factory=dict)
    network: Record = field(default_factory=Record)
    answered: tuple[Answered, ...] = ()

    @property
    def kept(self) -> Kept:
        """The servers."""
        return servers.read(self.said)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the model's weights on the head; 0 where they are not known."""
        scan = self.models.get(self.site.head.name)
        return scan.weight_bytes if scan else 0

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's `config.json` from the first node that has one."""
        return next((each.config for each in self.models.values() if each.config is not None), None)
