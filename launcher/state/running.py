"""What runs beside servers, from Ray's jobs: batch jobs, and who else may hold GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.checks import serving
from launcher.checks.serving import OVER, Holder
from launcher.site import Site
from launcher.state import servers
from launcher.tools import job_store, payload
from launcher.transport import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch job that waits or runs. `id` is its Ray job."""

    name: str
    id: str


def ask_jobs(site: Site, peers: tuple[str, ...] = ()) -> Command:
    """Ask the head for jobs, nodes, actors and placement groups, for its servers, and which `peers`
    (`ip:port`) are closed; without Ray for its servers alone.
    """
    inventory = site.inventory
    off = inventory.ray.off
    return site.inside(site.head, payload.jobs(inventory.ports, () if off else peers, ray=not off))


def batches(said: Mapping[str, Any]) -> list[Batch]:
    """Return the batch jobs that are not over."""
    return [
        Batch(name=name, id=job["submission_id"])
        for job in said.get("jobs", ())
        if job["status"] not in OVER and (name := job_store.named(job.get("metadata") or {}))
    ]


def holders(said: Mapping[str, Any]) -> list[Holder]:
    """Return who may hold accelerators: servers, and batch jobs."""
    running = servers.read(said).running
    return [*(holder(server, server.gpus) for server in running), *serving.job_holders(said)]


def holder(server: servers.Server, gpus: int) -> Holder:
    """Return a server as the holder of so many GPUs."""
    return Holder(what=server.what, gpus=gpus, end=f"vlaunch stop {server.name}")
