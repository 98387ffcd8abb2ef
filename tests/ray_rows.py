"""Rows of Ray's state lists, as in `ray list`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(*rows: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a list of Ray's, as the agent answers it."""
    return list(rows)


def ray_nodes(*ips: str, dead: str = "") -> list[Mapping[str, Any]]:
    """Return the list of nodes, each with one GPU."""
    return table(
        *(
            {
                "node_id": f"id-{ip}",
                "node_ip": ip,
                "state": "DEAD" if ip == dead else "ALIVE",
                "resources_total": {"GPU": 1.0},
            }
            for ip in ips
        )
    )


def group(gpus: int = 2, state: str = "CREATED", job: str = "02", ip: str = "") -> dict[str, Any]:
    """Return a placement group of one job, with a bundle for each GPU, all on one node."""
    bundles = [{"unit_resources": {"GPU": 1.0}, "node_id": ip and f"id-{ip}"}] * gpus
    return {"state": state, "creator_job_id": job, "bundles": bundles}


def rank(ip: str, name: str = "vllm_Worker_17_PP0", **fields: object) -> dict[str, Any]:
    """Return an actor of vLLM's on a node."""
    return {"name": name, "state": "ALIVE", "node_id": f"id-{ip}", **fields}
