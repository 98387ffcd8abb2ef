"""What tests of servers share: two nodes whose containers are of this vlaunch, requests, and
servers that the head keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.agent.desired import Desired, Policy
from launcher.core.check import Finding
from launcher.core.domain import Inventory, Node, RaySettings
from launcher.serving.serve_plan import Start, plan_serve
from launcher.serving.serve_request import Request
from launcher.tools import docker
from launcher.tools.host import HostFacts
from launcher.tools.placement import choose, narrow
from launcher.tools.site import Site
from launcher.tools.snapshot import ClusterSnapshot
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
    backend: Any = "ray", tp: int | None = 8, pp: int | None = 2, dp: int = 1, **more: Any
) -> Request:
    """Ask for org/m on both nodes; `nodes` and `gpus` narrow where it is placed."""
    here = narrow(more.pop("inventory", INVENTORY), more.get("nodes", ()), more.get("gpus"))
    placed = choose(here, tp, pp, dp=dp, backend=backend)
    return Request(
        **{
            "model": "org/m",
            "placement": placed,
            "backend": backend,
            "host": "0.0.0.0",
            "port": 8000,
            **more,
        }
    )


def container(node: str, **more: Any) -> docker.Container:
    """Return a node's container, of this vlaunch."""
    own = Site(INVENTORY).container_name(INVENTORY.node(node))
    agent = ("/opt/vlaunch/entry.sh", "agent")
    return containers.container(**{"name": own, "id": own, "node": node, "argv": agent, **more})


def seen(
    *servers: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]] = (), **said: Any
) -> ClusterSnapshot:
    """Return a cluster that is up and keeps some servers."""
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
    kept = {"servers": list(servers), "members": {"n2": 1.0}, "agent": 1.0}
    return ClusterSnapshot(
        site=Site(INVENTORY, facts),
        said={"jobs": list(jobs), "nodes": table(*rows), **kept, **said},
    )


def planned(
    there: ClusterSnapshot, wanted: Request, inventory: Inventory = INVENTORY, **more: Any
) -> Start:
    """Plan a server at second 7."""
    site = replace(there.site, inventory=inventory)
    return plan_serve(
        replace(there, site=site), wanted, **{"asked": 7.0, "policy": Policy(), **more}
    )


def desired(
    asked: Request,
    inventory: Inventory = INVENTORY,
    there: ClusterSnapshot | None = None,
    **more: Any,
) -> Desired:
    """Return a request as the keeper is told of it."""
    return planned(there or ClusterSnapshot(site=Site(inventory)), asked, inventory, **more).desired


def kept(asked: Request | Desired, state: str = "ready", **more: Any) -> dict[str, Any]:
    """Return a server as the head tells of it."""
    wanted = asked if isinstance(asked, Desired) else desired(asked)
    own = {key: getattr(wanted, key) for key in ("name", "id", "asked", "model")}
    observed = {"version": 2, **own, "state": state, **more}
    return {"name": wanted.name, "desired": wanted.as_json(), "observed": observed, "age": 1.0}


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1] if name in argv else ""


def uneven(*gpus: int) -> Inventory:
    nodes = [
        replace(NODES[0], name=f"n{i + 1}", ip=f"10.0.0.{i + 1}", gpus=g, head=i == 0)
        for i, g in enumerate(gpus)
    ]
    return replace(INVENTORY, nodes=tuple(nodes))


def chat(**more: Any) -> Request:
    return request(**{"name": "chat", "backend": "mp", "tp": 4, "pp": 1, "nodes": ("n1",), **more})


def judged(start: Start, gate: str) -> list[Finding]:
    (found,) = [each for stage in start.plan.stages for each in stage.gates if each.id == gate]
    return [each for each in found.judge({}) if each.status != "pass"]
