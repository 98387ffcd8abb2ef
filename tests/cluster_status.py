"""A simulated cluster as `status` sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.agent.desired import Desired
from launcher.agent.observed import Observed
from launcher.core.domain import Inventory, Secret
from launcher.serving import status
from launcher.serving.status import ClusterStatus, ServerStatus
from launcher.tools import network_verdict
from launcher.tools.node_probes import parse_answers, probe_commands
from launcher.tools.ray_judges import try_payload
from launcher.tools.site import Site
from launcher.tools.snapshot import ClusterSnapshot
from tests import plan_case as case
from tests import supervision
from tests.conftest import Load
from tests.fakes import FakeTransport
from tests.simulated import World

SECRETS = {"RAY_AUTH_TOKEN": Secret("tok")}
OPEN = "ray: {token_auth: false}"


@pytest.fixture
def world(load: Load) -> World:
    """A cluster of two that is up, without a server."""
    made = World(load())
    case.bring_up(made.inventory, made, SECRETS)
    jobs(made)
    return made


def look(world: World, *missing: str, inventory: Inventory | None = None) -> ClusterStatus:
    """Observe as the command does."""
    inventory = inventory or world.inventory
    transport = FakeTransport(world.answer)
    seen, _ = parse_answers(
        transport.run(probe_commands(inventory, [inventory.image], compiled=True))
    )
    facts = {name: each for name, each in seen.items() if name not in missing}
    snapshot = ClusterSnapshot(site=Site(inventory, facts))
    if asked := status.query_head(snapshot.site):
        answer, proof = transport.run(asked)
        record = network_verdict.parse_record(proof)
        snapshot = replace(snapshot, payload=try_payload(answer), network=record)
    return status.build_status(snapshot, {name: f"{name}: no route" for name in missing})


def jobs(world: World, *rows: dict[str, Any], **more: Any) -> None:
    """Let the head tell of servers."""
    world.said["jobs"] = {
        "jobs": [],
        "nodes": world.ray_table(),
        "actors": [],
        **supervision.head_report(*rows),
        **more,
    }


def serve(
    world: World, how: Observed | None = None, *, wanted: Desired | None = None, **more: Any
) -> ServerStatus:
    """Let one server be, and look at it."""
    jobs(
        world,
        supervision.server_row(wanted or supervision.make_spec(), how, age=more.pop("age", 2.0)),
        **more,
    )
    (server,) = look(world).servers
    return server
