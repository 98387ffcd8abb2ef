"""A simulated cluster as `status` sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.model import Inventory, Secret
from launcher.payload.agent.desired import Desired
from launcher.payload.agent.observed import Observed
from launcher.site import Site
from launcher.state import endpoints, status, verdict
from launcher.state.endpoints import Heard
from launcher.state.observe import commands, read
from launcher.state.status import ClusterStatus, ServerStatus
from tests import kept
from tests.conftest import Load
from tests.fakes import FakeTransport
from tests.plan import case
from tests.simulated import World

SECRETS = {"RAY_AUTH_TOKEN": Secret("tok")}
OPEN = "ray: {token_auth: false}"
ANSWER = {"status": 200, "model": "m", "system_fingerprint": "vllm-0.32.0-pp2-x", "seconds": 0.25}
LATE = {"status": 0, "error": "timed out"}


@pytest.fixture
def world(load: Load) -> World:
    """A cluster of two that is up, without a server."""
    made = World(load())
    case.bring_up(made.inventory, made, SECRETS)
    jobs(made)
    return made


def look(
    world: World, *missing: str, inventory: Inventory | None = None, **completions: dict[str, Any]
) -> ClusterStatus:
    """Observe as the command does; servers answer by their names, of several endpoints by those of
    their nodes, or do not.
    """
    inventory = inventory or world.inventory
    transport = FakeTransport(world.answer)
    seen, _ = read(transport.run(commands(inventory, [inventory.image], compiled=True)))
    facts = {name: each for name, each in seen.items() if name not in missing}
    said = status.Said()
    if asked := status.query_head(Site(inventory, facts)):
        answer, proof = transport.run(asked)
        said = status.Said(head=status.parse_answer(answer), network=verdict.parse_record(proof))
    heard = {
        each.name: {
            node: Heard(
                about=world.said.get("about", {}),
                completion=completions.get(node, completions.get(each.name, LATE)),
            )
            for node in endpoints.query(Site(inventory, facts), each)
        }
        for each in said.kept.running
    }
    said = dataclasses.replace(said, heard=heard)
    return status.read(
        Site(inventory, facts), said, {name: f"{name}: no route" for name in missing}
    )


def jobs(world: World, *rows: dict[str, Any], **more: Any) -> None:
    """Let the head tell of servers."""
    world.said["jobs"] = {
        "jobs": [],
        "nodes": world.ray_table(),
        "actors": {"data": {"result": {"result": []}}},
        **kept.said(*rows),
        **more,
    }


def serve(
    world: World, how: Observed | None = None, *, wanted: Desired | None = None, **more: Any
) -> ServerStatus:
    """Let one server be, and look at it."""
    completion = {key: more.pop(key) for key in ("default", "gpu01", "gpu02") if key in more}
    jobs(world, kept.one(wanted or kept.wanted(), how, age=more.pop("age", 2.0)), **more)
    (server,) = look(world, **completion).servers
    return server
