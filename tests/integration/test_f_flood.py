"""More requests than a server can take, and an engine that is frozen: `status` tells them apart,
and so does the keeper.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import client, flood
from benchmarks.client import Endpoint
from launcher.core.domain import Inventory
from launcher.inventory.load import load
from launcher.tools.servers import DEFAULT
from tests.integration.conftest import Practice
from tests.integration.servers import serve, status

pytestmark = [pytest.mark.lab, pytest.mark.long]


@pytest.fixture(scope="module", params=["ray", "mp"])
def loaded(
    practice: Practice, request: pytest.FixtureRequest
) -> Iterator[tuple[Practice, Inventory, Endpoint]]:
    """A server that runs up to eight requests at once, and is stopped after a hang of a minute."""
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0
    path = practice.write(lambda document: document["serve"].update(stuck=60))
    up = practice.vlaunch("up")
    assert up.code == 0, up.said
    serve(practice, "--backend", request.param)
    inventory = load(path)
    yield practice, inventory, client.endpoint(inventory, status(practice)[1])
    practice.vlaunch("down", "--yes")
    practice.write()


def test_a_flood(loaded: tuple[Practice, Inventory, Endpoint]) -> None:
    """Each look at it is green, with the queue; none fails, and nothing is restarted."""
    _, inventory, target = loaded
    goals = flood.flood(inventory, DEFAULT, target, requests=300, seconds=60, tokens=16)

    assert [each for each in goals if not each.met] == []


def test_a_frozen_engine(loaded: tuple[Practice, Inventory, Endpoint]) -> None:
    """For a while: nothing happens. For good: red in time, ended, and back."""
    practice, inventory, target = loaded
    goals = list(flood.freeze(inventory, DEFAULT, target, 60, practice.lab.hosts))

    assert [each for each in goals if not each.met] == []
