"""Servers and batch jobs that may hold GPUs, and the query for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.core.transport import Command
from launcher.tools import agent_queries, servers, serving_judges
from launcher.tools.serving_judges import Holder
from launcher.tools.site import Site


def ask_jobs(site: Site, peers: tuple[str, ...] = ()) -> Command:
    """Ask the head for jobs, nodes, actors and placement groups, for its servers, and which `peers`
    (`ip:port`) are closed; without Ray for its servers alone.
    """
    if site.inventory.ray.off:
        return servers.ask(site)
    return site.inside(site.head, agent_queries.jobs(site.inventory.ports, peers))


def holders(said: Mapping[str, Any]) -> list[Holder]:
    """Return who may hold accelerators: servers, and batch jobs."""
    running = servers.read(said).running
    return [*(holder(server, server.gpus) for server in running), *serving_judges.job_holders(said)]


def holder(server: servers.Server, gpus: int) -> Holder:
    """Return a server as the holder of so many GPUs."""
    return Holder(what=server.what, gpus=gpus, end=f"vlaunch stop {server.name}")
