"""Which server and which batch jobs run already, from Ray's jobs and the labels of rank containers: no state file is asked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.checks import serving
from launcher.checks.serving import OVER, Holder
from launcher.model import Backend, Inventory, Node
from launcher.plan import containers, supervised
from launcher.tools import desk, docker, payload
from launcher.tools.host import HostFacts
from launcher.transport import Command

# What a server carries wherever it runs: `Request.labels`.
LABELS = tuple(f"vlaunch.{name}" for name in ("model", "args", "tp", "pp", "host", "port", "dp"))
MODEL, ARGS, TP, PP, HOST, PORT, DP = LABELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that is starting or serving. `id` is its Ray job, or empty; `digest` is of what was asked for.

    `gpus` is TP × PP × replicas, or 0 where nobody wrote it down; `replicas` are those of data parallelism.
    """

    backend: Backend
    model: str
    digest: str
    host: str
    port: int
    id: str = ""
    nodes: tuple[str, ...] = ()
    gpus: float = 0.0
    replicas: int = 1

    @property
    def what(self) -> str:
        """Name it for people."""
        return f"Ray job {self.id}" if self.backend == "ray" else "the rank containers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch job that waits or runs. `id` is its Ray job."""

    name: str
    id: str


def head_runs(inventory: Inventory, facts: Mapping[str, HostFacts]) -> bool:
    """True when the head's Ray container runs, so that it can be asked."""
    return containers.own(inventory, inventory.head, facts[inventory.head.name]) is not None


def in_ray(inventory: Inventory, argv: tuple[str, ...], *, timeout: float = 60.0) -> Command:
    """Run one of the helper programs in the head's Ray container."""
    head = inventory.head
    return Command(node=head.name, argv=docker.exec_(head.docker, containers.name(inventory, head), *argv), timeout=timeout)


def ask_jobs(inventory: Inventory, host: str, port: int, *, peers: tuple[str, ...] = ()) -> Command:
    """Ask the head about jobs, nodes, actors, placement groups, and whether the API port, and those of `peers`, are open."""
    return in_ray(inventory, payload.jobs(replace(inventory.ports, api=port), payload.api_host(host), peers))


def find(inventory: Inventory, facts: Mapping[str, HostFacts], said: Mapping[str, Any]) -> list[Running]:
    """Return what runs: jobs that are not over, and rank containers of which at least one runs.

    A server that comes back by itself runs too, though Ray, which restarted with its head, does not know of it yet.
    """
    found = [
        _from_labels("ray", job["metadata"], inventory, id=job["submission_id"])
        for job in said.get("jobs", ())
        if job["status"] not in OVER and MODEL in (job.get("metadata") or {})
    ]
    ranks = {node.name: rank for node in inventory.nodes if (rank := _rank(inventory, node, facts)) is not None}
    running = [rank for rank in ranks.values() if rank.running]
    kept = supervised.read(inventory, said.get("supervised"))
    if kept is not None and kept.waits and not (found or running) and (labels := supervised.labels(said["supervised"])):
        found.append(_from_labels("ray", labels, inventory, id=f"serve-{kept.id}-0"))
    if running:
        found.append(_from_labels("mp", running[0].labels, inventory, nodes=tuple(ranks)))
    return found


def batches(said: Mapping[str, Any]) -> list[Batch]:
    """Return the batch jobs that are not over."""
    return [
        Batch(name=name, id=job["submission_id"])
        for job in said.get("jobs", ())
        if job["status"] not in OVER and (name := desk.named(job.get("metadata") or {}))
    ]


def holders(inventory: Inventory, facts: Mapping[str, HostFacts], said: Mapping[str, Any]) -> list[Holder]:
    """Return who may hold accelerators: the server, and batch jobs."""
    servers = [
        Holder(what=f"the server of {each.model}", gpus=each.gpus, end="vlaunch stop", in_ray=each.backend == "ray")
        for each in find(inventory, facts, said)
    ]
    return [*servers, *serving.batch_holders(said)]


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
    port, split = labels.get(PORT, ""), [labels.get(TP, ""), labels.get(PP, ""), labels.get(DP, "1")]
    counts = [int(each) if re.fullmatch("[0-9]{1,6}", each) else None for each in split]
    gpus = float(math.prod(each for each in counts if each is not None)) if None not in counts else 0.0
    return Running(
        backend=backend, model=labels.get(MODEL, "?"), digest=labels.get(ARGS, ""), id=id, nodes=nodes, gpus=gpus,
        replicas=1 if counts[2] is None else counts[2],
        host=labels.get(HOST) or inventory.serve.bind,
        port=int(port) if re.fullmatch("[0-9]{1,5}", port) else inventory.ports.api,
    )  # fmt: skip
