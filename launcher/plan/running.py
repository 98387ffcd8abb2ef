"""What runs beside servers, from Ray's jobs: batch jobs, and who else may hold GPUs; and what an
older vlaunch left running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.checks import serving
from launcher.checks.serving import OVER, Holder
from launcher.errors import RequestError
from launcher.model import Inventory
from launcher.plan import containers, servers
from launcher.tools import docker, job_store, payload
from launcher.tools.host import HostFacts
from launcher.transport import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch job that waits or runs. `id` is its Ray job."""

    name: str
    id: str


def head_runs(inventory: Inventory, facts: Mapping[str, HostFacts]) -> bool:
    """True when the head's container runs, so that it can be asked."""
    return containers.own(inventory, inventory.head, facts[inventory.head.name]) is not None


def in_ray(inventory: Inventory, argv: tuple[str, ...], *, timeout: float = 60.0) -> Command:
    """Run something in the head's container."""
    head = inventory.head
    inside = docker.exec_(head.docker, containers.name(inventory, head), *argv)
    return Command(node=head.name, argv=inside, timeout=timeout)


def ask_jobs(inventory: Inventory) -> Command:
    """Ask the head for jobs, nodes, actors and placement groups, and for its servers; without Ray
    for these alone.
    """
    host = payload.api_host(inventory.serve.bind)
    return in_ray(inventory, payload.jobs(inventory.ports, host, ray=not inventory.ray.off))


def batches(said: Mapping[str, Any]) -> list[Batch]:
    """Return the batch jobs that are not over."""
    return [
        Batch(name=name, id=job["submission_id"])
        for job in said.get("jobs", ())
        if job["status"] not in OVER and (name := job_store.named(job.get("metadata") or {}))
    ]


def holders(said: Mapping[str, Any]) -> list[Holder]:
    """Return who may hold accelerators: servers, and batch jobs."""
    found = servers.read(said).running
    return [
        *(
            Holder(what=each.what, gpus=each.gpus, end=f"vlaunch stop {each.name}")
            for each in found
        ),
        *serving.batch_holders(said),
    ]


def refuse_older(
    inventory: Inventory, facts: Mapping[str, HostFacts], said: Mapping[str, Any]
) -> None:
    """Raise RequestError when an older vlaunch started the head's container: its programs do not
    know what is asked today.
    """
    own = containers.own(inventory, inventory.head, facts.get(inventory.head.name))
    if own is not None and not containers.renewed(own):
        what = older(inventory, facts, said)
        raise RequestError(
            "an older vlaunch started the containers of this"
            f" cluster{f', and {what} in them' if what else ''}",
            hint=(
                "`vlaunch up` renews them, which ends what runs in them; `vlaunch down` ends"
                " everything"
            ),
        )


def older(inventory: Inventory, facts: Mapping[str, HostFacts], said: Mapping[str, Any]) -> str:
    """Name a server that an older vlaunch started, which no keeper knows of; empty when there is
    none.
    """
    for job in said.get("jobs", ()):
        if job["status"] not in OVER and (
            model := (job.get("metadata") or {}).get("vlaunch.model")
        ):
            return f"{model} (Ray job {job['submission_id']})"
    for node in inventory.nodes:
        for each in facts[node.name].containers if node.name in facts else ():
            if each.role == "rank" and each.running:
                return (
                    f"{each.labels.get('vlaunch.model', 'a server')} (container {each.name} on"
                    f" {node.name})"
                )
    return ""
