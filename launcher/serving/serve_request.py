"""A server with its placement: the command line of its processes, and its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.core import secret_patterns
from launcher.core.domain import Argv, Inventory, Node, ServerSpec, options
from launcher.core.errors import RequestError
from launcher.tools import vllm
from launcher.tools.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(ServerSpec):
    """A server with its placement, which has the sizes that the spec may leave open."""

    placement: Placement

    @property
    def spec(self) -> ServerSpec:
        """The spec with the sizes of the placement."""
        split = self.placement
        return ServerSpec(**{**self.spec_fields(), "tp": split.tp, "pp": split.pp, "dp": split.dp})

    def command(self, own: Argv = ()) -> Argv:
        """Return the command of one process, with the options that are its own."""
        split = self.placement
        if self.backend == "ray" and split.dp > 1:
            # vLLM itself counts replicas that span nodes.
            local = options(data_parallel_size_local=split.replicas[0][1])
            own = own if split.spans else (*local, *own)
        return vllm.serve(self.spec, own)

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
        text = json.dumps([*self.command(), *kept_to, *env])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def asked_for(self) -> dict[str, Any]:
        """The spec by which a later run starts the same server (`tools/history.py`)."""
        lists = {"args": list(self.args), "nodes": list(self.nodes)}
        spec = {**self.spec.spec_fields(), **lists}
        del spec["name"]  # its folder has it
        return spec if self.env else {key: spec[key] for key in spec if key != "env"}

    def nodes_with_ranks(self, inventory: Inventory) -> list[Node]:
        """Return the nodes that are expected to hold ranks, the one that ranks meet at first."""
        return [inventory.node(name) for name, _ in self.placement.nodes]

    def api_nodes(self, inventory: Inventory) -> list[Node]:
        """Return the nodes whose processes answer."""
        if self.backend == "ray":
            return [inventory.head]
        nodes = self.nodes_with_ranks(inventory)
        return nodes[:1] if self.balancing == "internal" else nodes


def vllm_arguments(inventory: Inventory, args: Sequence[str]) -> tuple[str, ...]:
    """Return vLLM's own arguments, the inventory's first; raises RequestError for those that
    vlaunch sets, and for what looks like a secret.
    """
    for where, words in (
        ("`engine_args` or `serve: args` in the inventory", inventory.serve.args),
        ("the arguments after `--`", args),
    ):
        if said := vllm.collisions(words):
            raise RequestError(f"{where} set what vlaunch sets itself", evidence=said)
    for at, word in enumerate(args, start=1):
        if secret_patterns.VALUE.search(word):
            raise RequestError(
                f"argument {at} after `--` looks like a secret, which `ps` would show on the nodes",
                hint="name where it comes from under `secrets:` in the inventory",
            )
    return (*inventory.serve.args, *args)
