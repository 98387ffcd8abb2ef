"""`vlaunch serve --backend mp` on simulated nodes: no Ray is wanted, so nothing of Ray's may be in its way."""

from __future__ import annotations

import pytest

from launcher.model import Answer
from launcher.transport import Command
from tests.cli.conftest import Cluster


@pytest.mark.parametrize(
    ("listening", "code"),
    [
        ((22, 6379, 8265, 8000), 0),  # Redis, a dashboard, and another server where the inventory has the API
        ((22, 8001), 1),
    ],
)
def test_only_the_ports_of_this_server_matter(
    cluster: Cluster, listening: tuple[int, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port that was asked for is looked at, and Ray's are not."""
    answer = cluster.world.answer

    def with_model(command: Command) -> Answer | None:
        return Answer(node=command.node, code=4) if "--rm" in command.argv else answer(command)

    monkeypatch.setattr(cluster.world, "answer", with_model)
    cluster.world.machines["gpu01"].listening = listening
    ran = cluster.run("serve", "--backend", "mp", "--model", "org/m", "--port", "8001", "--no-wait")

    assert ran.code == code, ran.err
    assert ("port 8001 (vLLM API) is taken" in ran.err) == (code == 1)
    assert "6379" not in ran.err
