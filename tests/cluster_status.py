"""A simulated cluster, as `status` sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.agent.desired import Desired
from launcher.agent.observed import Observed
from launcher.core.domain import Inventory, Secret
from launcher.serving import status
from launcher.serving.status import ClusterStatus, ServerStatus
from launcher.tools.host.node_probes import parse_answers, probe_commands
from launcher.tools.site import Site, network_verdict
from launcher.tools.site.ray_judges import try_payload
from launcher.tools.site.snapshot import ClusterSnapshot
from tests import plan_case as case
from tests import supervision
from tests.conftest import Load
from tests.fakes import FakeTransport
from tests.simulated import World

SECRETS = {"RAY_AUTH_TOKEN": Secret("tok")}
OPEN = "ray: {token_auth: false}"


@pytest.fixture
def world(load: Load) -> World:
    """A running cluster of two nodes without a server."""
    world = World(load())
    case.bring_up(world.inventory, world, SECRETS)
    jobs(world)
    return world


def query_status(world: World, *missing: str, inventory: Inventory | None = None) -> ClusterStatus:
    """Build the status as the command does."""
    inventory = inventory or world.inventory
    transport = FakeTransport(world.answer)
    parsed, _ = parse_answers(
        transport.run(probe_commands(inventory, [inventory.image], compiled=True))
    )
    facts = {name: node for name, node in parsed.items() if name not in missing}
    snapshot = ClusterSnapshot(site=Site(inventory, facts))
    if commands := status.query_head(snapshot.site):
        answer, proof = transport.run(commands)
        record = network_verdict.parse_record(proof)
        snapshot = replace(snapshot, payload=try_payload(answer), network=record)
    return status.build_status(snapshot, {name: f"{name}: no route" for name in missing})


def jobs(world: World, *rows: dict[str, Any], **fields: Any) -> None:
    """Set the head's report of servers."""
    world.responses["jobs"] = {
        "jobs": [],
        "nodes": world.ray_table(),
        "actors": [],
        **supervision.head_report(*rows),
        **fields,
    }


def serve(
    world: World, observed: Observed | None = None, *, spec: Desired | None = None, **fields: Any
) -> ServerStatus:
    """Set one server and return its status."""
    jobs(
        world,
        supervision.server_row(
            spec or supervision.make_spec(), observed, age=fields.pop("age", 2.0)
        ),
        **fields,
    )
    (server,) = query_status(world).servers
    return server
