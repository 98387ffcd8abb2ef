"""`vlaunch serve --backend mp` on simulated nodes: no Ray is wanted, so nothing of Ray's may be in its way."""

from __future__ import annotations

import pytest

from tests.cli.conftest import INVENTORY, Cluster


@pytest.mark.parametrize(
    ("listening", "code"),
    [
        ((22, 6379, 8265, 8000), 0),  # Redis, a dashboard, and another server where the inventory has the API
        ((22, 8001), 1),
    ],
)
def test_only_the_ports_of_this_server_matter(cluster: Cluster, listening: tuple[int, ...], code: int) -> None:
    """The port that was asked for is looked at, and Ray's are not."""
    cluster.world.machines["gpu01"].listening = listening
    ran = cluster.run("serve", "--backend", "mp", "--model", "org/m", "--port", "8001", "--no-wait")

    assert ran.code == code, ran.err
    assert ("port 8001 (vLLM API) is taken" in ran.err) == (code == 1)
    assert "6379" not in ran.err


@pytest.mark.parametrize(
    ("secrets", "bind", "warned"),
    [("", "0.0.0.0", True), ("secrets: {VLLM_API_KEY: {env: HF_TOKEN}}", "0.0.0.0", False), ("", "127.0.0.1", False)],
)
def test_an_open_endpoint_is_told(cluster: Cluster, secrets: str, bind: str, warned: bool) -> None:
    """An API without a key, on an address that others can reach, is the user's choice, made knowingly."""
    cluster.write(f"{INVENTORY.replace('secrets: {HF_TOKEN: {env: HF_TOKEN}}', secrets)}\n")
    ran = cluster.run("serve", "--backend", "mp", "--model", "org/m", "--bind", bind, "--no-wait")

    assert ran.code == 0, ran.err
    assert ("whoever can reach port 8000 may use the model" in ran.err) is warned
