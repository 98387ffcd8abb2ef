"""`vlaunch serve --backend mp` on simulated nodes, with and without Ray beside it."""

from __future__ import annotations

import pytest

from tests.command_line import INVENTORY, Cluster
from tests.simulated import query


@pytest.mark.parametrize(
    ("listening", "code"),
    [
        # Redis, a dashboard, and another server at the inventory's API port
        ((22, 6379, 8265, 8000), 0),
        ((22, 8001), 1),
    ],
)
def test_only_the_ports_of_this_server_matter(
    cluster: Cluster, listening: tuple[int, ...], code: int
) -> None:
    """The requested port is checked, Ray's are not."""
    assert cluster.run("up").code == 0
    cluster.world.machines["gpu01"].listening = listening
    ran = cluster.run("serve", "--backend", "mp", "--model", "org/m", "--port", "8001", "--no-wait")

    assert ran.code == code, ran.err
    assert ("port 8001 (vLLM API) is already in use" in ran.err) == (code == 1)
    assert "6379" not in ran.err


@pytest.mark.parametrize(
    ("secrets", "bind", "warned"),
    [
        ("", "0.0.0.0", True),
        ("secrets: {VLLM_API_KEY: {env: HF_TOKEN}}", "0.0.0.0", False),
        ("", "127.0.0.1", False),
    ],
)
def test_an_open_endpoint_is_reported(
    cluster: Cluster, secrets: str, bind: str, warned: bool
) -> None:
    """An API without a key, on a reachable address, is the user's deliberate choice."""
    cluster.write(f"{INVENTORY.replace('secrets: {HF_TOKEN: {env: HF_TOKEN}}', secrets)}\n")
    assert cluster.run("up").code == 0
    ran = cluster.run("serve", "--backend", "mp", "--model", "org/m", "--bind", bind, "--no-wait")

    assert ran.code == 0, ran.err
    assert ("the API on port 8000 needs no key" in ran.err) is warned


def test_every_endpoint_is_reported(cluster: Cluster) -> None:
    """A line per API; an impossible mode is rejected before any query."""
    assert cluster.run("up").code == 0
    cluster.commands.clear()
    args = ("serve", "--model", "org/m", "--dp", "2", "--skip-network-check", "--no-wait")
    refused = cluster.run(*args, "--", "--data-parallel-hybrid-lb")
    assert (refused.code, cluster.commands) == (2, [])
    assert "hint: use `--backend mp`" in refused.err
    ran = cluster.run(*args, "--backend", "mp", "--", "--data-parallel-hybrid-lb")

    assert ran.code == 0, ran.err
    assert ran.out == "http://10.0.0.11:8000/v1\nhttp://10.0.0.12:8000/v1\n"
    assert "port 8000 on gpu[01-02]" in ran.err
    assert "2 replicas (1 on gpu01, 1 on gpu02) with one endpoint per node" in ran.err


def test_a_cluster_without_ray(cluster: Cluster) -> None:
    """Its servers use this backend by default and GPUs by their numbers; Ray is not queried."""
    cluster.write(f"ray: none\n{INVENTORY}")
    assert cluster.run("up").code == 0
    cluster.commands.clear()
    args = (
        "serve",
        "--skip-network-check",
        "--no-wait",
        "--model",
        "org/m",
        "--gpus",
        "4",
        "--pp",
        "1",
    )
    first = cluster.run(*args, "--nodes", "gpu02")
    second = cluster.run(*args, "--nodes", "gpu02", "--name", "chat", "--port", "8001")
    third = cluster.run(*args, "--nodes", "gpu02", "--name", "more", "--port", "8002")

    assert (first.code, second.code, third.code) == (0, 0, 1), second.err
    assert [server["desired"]["processes"][0]["gpus"] for server in cluster.world.servers()] == [
        [4, 5, 6, 7],
        [0, 1, 2, 3],
    ]
    assert [server["desired"]["ray"] for server in cluster.world.servers()] == [None, None]
    assert (
        "gpu02: 0 of 8 GPUs are free, the server needs 4: server `chat` uses 4, server `default`"
        " uses 4" in third.err
    )
    assert first.out == "http://10.0.0.12:8000/v1\n"
    assert not [command for command in cluster.commands if query(command.argv) == "jobs"]
