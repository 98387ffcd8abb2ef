"""A server with its placement: the command line of its processes, and its identity."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.core import secret_patterns
from launcher.core.domain import Argv, Inventory, Node, ServerSpec, long_options
from launcher.core.errors import RequestError
from launcher.tools import vllm
from launcher.tools.site.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest(ServerSpec):
    """A server's spec with its placement, whose sizes it takes.

    Without an address of its own (`default_host`), `host` follows from inventory and placement;
    empty, each API listens on its node's `ip`.
    """

    placement: Placement
    default_host: bool = False

    def __post_init__(self) -> None:
        """Take the sizes of the placement."""
        for name in ("tp", "pp", "dp"):
            object.__setattr__(self, name, getattr(self.placement, name))

    def build_command(self, process_args: Argv = (), ip: str = "") -> Argv:
        """Return the command of one process, with that process's own options; `ip` is its node's
        address.
        """
        placement = self.placement
        if self.backend == "ray" and placement.dp > 1:
            # For replicas that span nodes, vLLM computes it.
            local = long_options(data_parallel_size_local=placement.replicas[0][1])
            process_args = process_args if placement.spans else (*local, *process_args)
        return vllm.serve(self if self.host else replace(self, host=ip), process_args)

    @property
    def balancing(self) -> vllm.Balancing:
        """Load-balancing mode of the replicas."""
        modes = vllm.balancing_modes(self.args)
        return next((mode for mode in ("hybrid", "external") if mode in modes), "internal")

    @property
    def digest(self) -> str:
        """Eight hex digits that identify the server: equal for equal requests only."""
        node_limits = [[self.nodes, self.gpus]] if self.nodes or self.gpus else []
        env = [dict(sorted(self.env.items()))] if self.env else []
        text = json.dumps([*self.build_command(), *node_limits, *env])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def original_spec(self) -> dict[str, Any]:
        """Spec with which a later run starts the same server (`tools/site/history.py`)."""
        lists = {"args": list(self.args), "nodes": list(self.nodes)}
        host = "" if self.default_host else self.host
        spec = {**self.spec_fields(), **lists, "host": host}
        del spec["name"]  # its folder has it
        return spec if self.env else {key: spec[key] for key in spec if key != "env"}

    def rank_nodes(self, inventory: Inventory) -> list[Node]:
        """Return the nodes that are expected to run ranks, the rendezvous node first."""
        return [inventory.node(name) for name, _ in self.placement.nodes]

    def api_nodes(self, inventory: Inventory) -> list[Node]:
        """Return the nodes whose processes serve the API."""
        if self.backend == "ray":
            return [inventory.head]
        nodes = self.rank_nodes(inventory)
        return nodes[:1] if self.balancing == "internal" else nodes


def merge_vllm_args(inventory: Inventory, args: Sequence[str]) -> tuple[str, ...]:
    """Return vLLM's own arguments, the inventory's first. Raises RequestError for those that
    vlaunch sets, and for one that looks like a secret.
    """
    for source, argv in (
        ("`engine_args` or `serve: args` in the inventory", inventory.serve.args),
        ("the arguments after `--`", args),
    ):
        if collisions := vllm.describe_collisions(argv):
            raise RequestError(f"{source} set reserved options", evidence=collisions)
    for number, arg in enumerate(args, start=1):
        if secret_patterns.VALUE.search(arg):
            raise RequestError(
                f"argument {number} after `--` looks like a secret, which `ps` would show on the"
                " nodes",
                hint="add its source under `secrets:` in the inventory",
            )
    return (*inventory.serve.args, *args)
