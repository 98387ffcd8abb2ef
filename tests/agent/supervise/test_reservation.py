"""GPUs reserved in Ray, as the supervisor sees them."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent.desired import Desired, Ray
from launcher.agent.processes import ray_driver
from tests.agent import specs
from tests.agent.stage import Make


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Let Ray reserve GPUs; the last element of the returned list is the error, if any."""
    requests: list[Any] = ['{"gpus": {"10.0.0.2": [4, 5]}}']

    def say(*args: str) -> tuple[int, str]:
        text = requests[0]
        requests.append(args)
        return (0 if "gpus" in text else 1), f"noise of Ray\n{text}\n"

    monkeypatch.setattr(ray_driver, "run", say)
    return requests


def reserving(**fields: bool) -> Desired:
    """An `mp` server beside Ray, on some of a node's GPUs."""
    return specs.mp(
        "gpu1",
        "gpu2",
        places={"gpu1": 8, "gpu2": 2},
        addresses={"gpu1": "10.0.0.1", "gpu2": "10.0.0.2"},
        ray=Ray(dashboard=1, node_manager=2, gpus=10, reserve=True, **fields),
        visible="CUDA_VISIBLE_DEVICES",
    )


def test_gpus_are_set_aside_in_ray(make: Make, reserve: list[Any]) -> None:
    """The processes see only the reserved GPUs; a stop releases them."""
    stage = make(reserving(partial=True))
    stage.until("ready")
    assert reserve[1:] == [("take", "chat", "10.0.0.1=8", "10.0.0.2=2")]
    assert (stage.orders["gpu2"].env, stage.orders["gpu2"].gpus) == (
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        (4, 5),
    )
    assert stage.orders["gpu1"].gpus is None

    stage.store_spec(None)
    stage.until("stopped")
    assert reserve[-1] == ("free", "chat")


def test_a_start_waits_for_the_reservation(make: Make, reserve: list[Any]) -> None:
    """Ray chooses some of a node's GPUs; whole nodes leave no choice, and do not wait for Ray."""
    reserve[0] = '{"error": "others hold them"}'
    stage = make(reserving(partial=True))
    stage.run(20)
    assert (stage.status.state, stage.status.doing) == (
        "waiting",
        "waiting for Ray to reserve its GPUs: others hold them",
    )
    reserve[0] = '{"gpus": {}}'
    stage.until("ready")


def test_whole_nodes_do_not_wait_for_ray(make: Make, reserve: list[Any]) -> None:
    """The reservation is repeated while the server runs: a restarted Ray has lost it."""
    reserve[0] = "Traceback"
    stage = make(reserving())
    stage.until("ready")
    stage.run(100)
    requests = len(reserve)
    stage.run(100)

    assert 2 <= len(reserve) - requests <= 5
