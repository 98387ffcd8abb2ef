"""What runs beside servers, from Ray's jobs: batch jobs, and who else may hold GPUs; and what an
older vlaunch left running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher import containers
from launcher.checks import batch
from launcher.checks.batch import OVER
from launcher.checks.gpu_use import Holder
from launcher.errors import RequestError
from launcher.site import Site
from launcher.state import servers
from launcher.tools import job_store, payload
from launcher.transport import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch job that waits or runs. `id` is its Ray job."""

    name: str
    id: str


def ask_jobs(site: Site) -> Command:
    """Ask the head for jobs, nodes, actors and placement groups, and for its servers; without Ray
    for these alone.
    """
    inventory = site.inventory
    host = payload.api_host(inventory.serve.bind)
    return site.inside(site.head, payload.jobs(inventory.ports, host, ray=not inventory.ray.off))


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
        *batch.holders(said),
    ]


def refuse_older(site: Site, said: Mapping[str, Any]) -> None:
    """Raise RequestError when an older vlaunch started the head's container: its programs do not
    know what is asked today.
    """
    own = site.running(site.head)
    if own is not None and not containers.renewed(own):
        what = older(site, said)
        raise RequestError(
            "an older vlaunch started the containers of this"
            f" cluster{f', and {what} in them' if what else ''}",
            hint=(
                "`vlaunch up` renews them, which ends what runs in them; `vlaunch down` ends"
                " everything"
            ),
        )


def older(site: Site, said: Mapping[str, Any]) -> str:
    """Name a server that an older vlaunch started, which no keeper knows of; empty when there is
    none.
    """
    for job in said.get("jobs", ()):
        if job["status"] not in OVER and (
            model := (job.get("metadata") or {}).get("vlaunch.model")
        ):
            return f"{model} (Ray job {job['submission_id']})"
    for node in site.seen:
        for each in site.facts[node.name].containers:
            if each.role == "rank" and each.running:
                return (
                    f"{each.labels.get('vlaunch.model', 'a server')} (container {each.name} on"
                    f" {node.name})"
                )
    return ""
