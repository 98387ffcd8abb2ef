"""A server that is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.model import Argv, Backend, Inventory, Node
from launcher.placement import Placement
from launcher.state import servers
from launcher.tools import vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A server that is asked for.

    `nodes` and `gpus` are what it was told to keep to; without them it may take all. `env` are
    variables of its processes alone.
    """

    name: str = servers.DEFAULT
    model: str
    placement: Placement
    backend: Backend
    host: str
    port: int
    args: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    gpus: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> Argv:
        """The command of the only process (Ray) or of one node (`mp`, without what differs per
        node).
        """
        return self.command()

    def command(self, own: Argv = ()) -> Argv:
        """Return the command of one process, with the options that are its own."""
        split = self.placement
        if self.backend == "ray" and split.dp > 1:
            own = (*vllm.ray_replicas(split.replicas[0][1], split.spans), *own)
        return vllm.serve(
            self.model,
            tp=split.tp,
            pp=split.pp,
            dp=split.dp,
            backend=self.backend,
            host=self.host,
            port=self.port,
            args=self.args,
            multi_node=own,
        )

    @property
    def balancing(self) -> vllm.Balancing:
        """Who hands requests to its replicas."""
        asked = vllm.balancing(self.args)
        return next((each for each in ("hybrid", "external") if each in asked), "internal")

    @property
    def digest(self) -> str:
        """Eight hex digits that are equal exactly when the same server is asked for."""
        kept_to = [[self.nodes, self.gpus]] if self.nodes or self.gpus else []
        env = [dict(sorted(self.env.items()))] if self.env else []
        return hashlib.sha256(json.dumps([*self.argv, *kept_to, *env]).encode()).hexdigest()[:8]

    @property
    def asked_for(self) -> dict[str, Any]:
        """What a later run needs to ask for the same server again (`state/history.py`)."""
        split = self.placement
        return {
            "model": self.model,
            "backend": self.backend,
            "host": self.host,
            "port": self.port,
            "tp": split.tp,
            "pp": split.pp,
            "dp": split.dp,
            "args": list(self.args),
            "nodes": list(self.nodes),
            "gpus": self.gpus,
            **({"env": dict(self.env)} if self.env else {}),
        }

    def nodes_with_ranks(self, inventory: Inventory) -> list[Node]:
        """Return the nodes that are expected to hold ranks, the one that ranks meet at first."""
        return [inventory.node(name) for name, _ in self.placement.nodes]

    def api_nodes(self, inventory: Inventory) -> list[Node]:
        """Return the nodes whose processes answer."""
        if self.backend == "ray":
            return [inventory.head]
        nodes = self.nodes_with_ranks(inventory)
        return nodes[:1] if self.balancing == "internal" else nodes
