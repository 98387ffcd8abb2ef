"""More requests than a server can handle, and a frozen engine: `status` and the supervisor
distinguish them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import client, flood
from benchmarks.client import Endpoint
from launcher.core.domain import Inventory
from launcher.inventory.load import load
from launcher.tools.site.servers import DEFAULT
from tests.integration.conftest import LabCluster
from tests.integration.servers import query_status, serve

pytestmark = [pytest.mark.lab, pytest.mark.long]


@pytest.fixture(scope="module", params=["ray", "mp"])
def loaded(
    lab_cluster: LabCluster, request: pytest.FixtureRequest
) -> Iterator[tuple[LabCluster, Inventory, Endpoint]]:
    """A server that runs up to eight requests at once, and is stopped when it hangs for a
    minute.
    """
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    path = lab_cluster.write(lambda document: document["serve"].update(stuck=60))
    up = lab_cluster.vlaunch("up")
    assert up.code == 0, up.output
    serve(lab_cluster, "--backend", request.param)
    inventory = load(path)
    yield lab_cluster, inventory, client.server_endpoint(inventory, query_status(lab_cluster)[1])
    lab_cluster.vlaunch("down", "--yes")
    lab_cluster.write()


def test_a_flood(loaded: tuple[LabCluster, Inventory, Endpoint]) -> None:
    """Each `status` is green, with the queue; no request fails, and nothing is restarted."""
    _, inventory, target = loaded
    goals = flood.run_flood(inventory, DEFAULT, target, requests=300, seconds=60, tokens=16)

    assert [goal for goal in goals if not goal.met] == []


def test_a_frozen_engine(loaded: tuple[LabCluster, Inventory, Endpoint]) -> None:
    """Briefly: nothing happens. For good: red in time, stopped, and back."""
    lab_cluster, inventory, target = loaded
    goals = list(flood.freeze(inventory, DEFAULT, target, 60, lab_cluster.lab.hosts))

    assert [goal for goal in goals if not goal.met] == []
