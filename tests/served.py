"""Two nodes with containers of this version, requests, and servers, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.agent.desired import Desired, Policy
from launcher.core.check import Finding
from launcher.core.domain import Inventory, Node, RaySettings
from launcher.serving.serve_plan import StartPlan, plan_serve
from launcher.serving.serve_request import ServeRequest
from launcher.tools import docker
from launcher.tools.host import HostFacts
from launcher.tools.site import Site
from launcher.tools.site.placement import choose_placement, narrow_inventory
from launcher.tools.site.snapshot import ClusterSnapshot
from tests import containers
from tests.ray_rows import table

NODES = (
    Node(name="n1", host="n1", ip="10.0.0.1", gpus=8, head=True),
    Node(name="n2", host="n2", ip="10.0.0.2", gpus=8),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="base:1", nodes=NODES)
BARE = replace(INVENTORY, ray=RaySettings(version="none"))
IMAGE = docker.Image(id="sha256:1", identity="1", digests=(), architecture="amd64", labels={})


def request(
    backend: Any = "ray", tp: int | None = 8, pp: int | None = 2, dp: int = 1, **changes: Any
) -> ServeRequest:
    """Return a request for org/m on both nodes; `nodes` and `gpus` narrow its placement."""
    inventory = narrow_inventory(
        changes.pop("inventory", INVENTORY), changes.get("nodes", ()), changes.get("gpus")
    )
    placement = choose_placement(inventory, tp, pp, dp=dp, backend=backend)
    return ServeRequest(
        **{
            "model": "org/m",
            "placement": placement,
            "backend": backend,
            "host": "0.0.0.0",
            "port": 8000,
            **changes,
        }
    )


def container(node: str, **changes: Any) -> docker.Container:
    """Return a node's container of this version."""
    own = Site(INVENTORY).container_name(INVENTORY.node(node))
    agent = ("/opt/vlaunch/entry.sh", "agent")
    return containers.container(**{"name": own, "id": own, "node": node, "argv": agent, **changes})


def make_snapshot(
    *servers: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]] = (), **payload: Any
) -> ClusterSnapshot:
    """Return a running cluster with some servers."""
    facts = {
        node.name: HostFacts(
            containers=(container(node.name),),
            listening=frozenset(),
            images={"base:1": IMAGE},
            docker_version="27",
        )
        for node in NODES
    }
    rows = [{"node_id": f"id-{node.ip}", "node_ip": node.ip, "state": "ALIVE"} for node in NODES]
    state = {"servers": list(servers), "members": {"n2": 1.0}, "agent": 1.0}
    return ClusterSnapshot(
        site=Site(INVENTORY, facts),
        payload={"jobs": list(jobs), "nodes": table(*rows), **state, **payload},
    )


def plan_start(
    snapshot: ClusterSnapshot,
    server: ServeRequest,
    inventory: Inventory = INVENTORY,
    **options: Any,
) -> StartPlan:
    """Plan a server at second 7."""
    site = replace(snapshot.site, inventory=inventory)
    return plan_serve(
        replace(snapshot, site=site), server, **{"requested_at": 7.0, "policy": Policy(), **options}
    )


def make_spec(
    server: ServeRequest,
    inventory: Inventory = INVENTORY,
    snapshot: ClusterSnapshot | None = None,
    **options: Any,
) -> Desired:
    """Return the spec of a request."""
    return plan_start(
        snapshot or ClusterSnapshot(site=Site(inventory)), server, inventory, **options
    ).spec


def server_row(
    server: ServeRequest | Desired, state: str = "ready", **changes: Any
) -> dict[str, Any]:
    """Return the head's row of a server."""
    spec = server if isinstance(server, Desired) else make_spec(server)
    identity = {key: getattr(spec, key) for key in ("name", "id", "asked", "model")}
    observed = {"version": 2, **identity, "state": state, **changes}
    return {"name": spec.name, "desired": spec.as_json(), "observed": observed, "age": 1.0}


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1] if name in argv else ""


def uneven(*gpus: int) -> Inventory:
    nodes = [
        replace(NODES[0], name=f"n{i + 1}", ip=f"10.0.0.{i + 1}", gpus=g, head=i == 0)
        for i, g in enumerate(gpus)
    ]
    return replace(INVENTORY, nodes=tuple(nodes))


def chat(**changes: Any) -> ServeRequest:
    return request(
        **{"name": "chat", "backend": "mp", "tp": 4, "pp": 1, "nodes": ("n1",), **changes}
    )


def judge_gate(start: StartPlan, gate: str) -> list[Finding]:
    gates = {item.id: item for stage in start.plan.stages for item in stage.gates}
    return [finding for finding in gates[gate].judge({}) if finding.status != "pass"]
