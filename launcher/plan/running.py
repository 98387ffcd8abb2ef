"""Which server runs already, read from Ray's jobs and the labels of rank containers: there is no state file to ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.checks.serving import OVER
from launcher.model import Backend, Inventory, Node
from launcher.plan import containers
from launcher.tools import docker, payload
from launcher.tools.host import HostFacts
from launcher.transport import Command

MODEL, ARGS, TP, PP, HOST, PORT = (f"vlaunch.{name}" for name in ("model", "args", "tp", "pp", "host", "port"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that is starting or serving. `id` is its Ray job, or empty; `digest` is of what was asked for."""

    backend: Backend
    model: str
    digest: str
    host: str
    port: int
    id: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Name it for people."""
        return f"Ray job {self.id}" if self.backend == "ray" else "the rank containers"


def head_runs(inventory: Inventory, facts: Mapping[str, HostFacts]) -> bool:
    """True when the head's Ray container runs, so that it can be asked."""
    return containers.own(inventory, inventory.head, facts[inventory.head.name]) is not None


def in_ray(inventory: Inventory, argv: tuple[str, ...], *, timeout: float = 60.0) -> Command:
    """Run one of the helper programs in the head's Ray container."""
    head = inventory.head
    return Command(node=head.name, argv=docker.exec_(head.docker, containers.name(inventory, head), *argv), timeout=timeout)


def ask_jobs(inventory: Inventory, host: str, port: int) -> Command:
    """Ask the head about jobs, nodes, actors, placement groups and whether the API port is open."""
    return in_ray(inventory, payload.jobs(replace(inventory.ports, api=port), payload.api_host(host)))


def find(inventory: Inventory, facts: Mapping[str, HostFacts], said: Mapping[str, Any]) -> list[Running]:
    """Return what runs: jobs that are not over, and rank containers of which at least one runs."""
    found = [
        _from_labels("ray", job["metadata"], inventory, id=job["submission_id"])
        for job in said.get("jobs", ())
        if job["status"] not in OVER and MODEL in (job.get("metadata") or {})
    ]
    ranks = {node.name: rank for node in inventory.nodes if (rank := _rank(inventory, node, facts)) is not None}
    running = [rank for rank in ranks.values() if rank.running]
    if running:
        found.append(_from_labels("mp", running[0].labels, inventory, nodes=tuple(ranks)))
    return found


def ended_ranks(inventory: Inventory, facts: Mapping[str, HostFacts]) -> list[Node]:
    """Return the nodes that still have a rank container which has ended."""
    return [
        node
        for node in inventory.nodes
        if (rank := _rank(inventory, node, facts)) is not None and not rank.running
    ]  # fmt: skip


def _rank(inventory: Inventory, node: Node, facts: Mapping[str, HostFacts]) -> docker.Container | None:
    return facts[node.name].container(containers.rank_name(inventory, node)) if node.name in facts else None


def _from_labels(
    backend: Backend, labels: Mapping[str, str], inventory: Inventory, *, id: str = "", nodes: tuple[str, ...] = ()
) -> Running:
    port = labels.get(PORT, "")
    return Running(
        backend=backend, model=labels.get(MODEL, "?"), digest=labels.get(ARGS, ""), id=id, nodes=nodes,
        host=labels.get(HOST) or inventory.serve.bind, port=int(port) if port.isdigit() else inventory.ports.api,
    )  # fmt: skip
