"""`vlaunch tunnel`: the API on this machine, through the existing connection."""

from __future__ import annotations

import pytest

from launcher.core.errors import ConnectError
from tests import supervision
from tests.command_line import INVENTORY, Cluster


@pytest.mark.parametrize(
    ("inventory", "args", "forward"),
    [
        ("", [], ("gpu01", "127.0.0.1", 8000, 8000)),
        ("", ["--local-port", "0"], ("gpu01", "127.0.0.1", 8000, 0)),
        ("", ["--dashboard", "--local-port", "9999"], ("gpu01", "127.0.0.1", 8265, 9999)),
        ("serve: {bind: 10.0.0.11}", [], ("gpu01", "10.0.0.11", 8000, 8000)),
        ("ports: {api: 8080}", [], ("gpu01", "127.0.0.1", 8080, 8080)),
    ],
)
def test_the_port_of_the_head_is_forwarded(
    inventory: str, args: list[str], forward: tuple[object, ...], cluster: Cluster
) -> None:
    """The tunnel leads to the API's address; its local URL is the only line of standard output."""
    cluster.write(f"{INVENTORY}{inventory}\n")
    ran = cluster.run("tunnel", *args)

    assert (ran.code, cluster.forwards) == (0, [forward])
    assert ran.out == f"http://127.0.0.1:{forward[3] or 45678}\n"
    assert "Ctrl-C" in ran.err


def test_the_running_server_is_used(cluster: Cluster) -> None:
    """It may listen elsewhere than in the inventory, unlike the dashboard."""
    assert cluster.run("up").code == 0
    supervision.store_server(cluster.world, supervision.make_spec(host="10.0.0.11", port=9000))
    # A tunnel needs the head alone.
    cluster.missing["gpu02"] = ConnectError("gpu02", "cannot be reached")
    ran = cluster.run("tunnel")
    cluster.run("tunnel", "--dashboard")

    assert ran.out == "http://127.0.0.1:9000\n"
    assert cluster.forwards == [
        ("gpu01", "10.0.0.11", 9000, 9000),
        ("gpu01", "127.0.0.1", 8265, 8265),
    ]


def test_every_server_has_its_own_tunnel(cluster: Cluster) -> None:
    """To its API's node; without a name it must be the only one."""
    assert cluster.run("up").code == 0
    supervision.store_server(cluster.world, supervision.make_spec("chat"))
    supervision.store_server(cluster.world, supervision.make_spec("embed", node="gpu02", port=8001))
    ran = cluster.run("tunnel")

    assert cluster.run("tunnel", "--server", "embed").out == "http://127.0.0.1:8001\n"
    assert cluster.forwards == [("gpu02", "127.0.0.1", 8001, 8001)]
    assert (ran.code, "2 servers are running: `chat`, `embed`" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("inventory", "args"),
    [("", ["--dashboard", "--server", "chat"]), ("ray: none", ["--dashboard"])],
    ids=["both", "no Ray"],
)
def test_a_missing_dashboard_is_a_usage_error(
    inventory: str, args: list[str], cluster: Cluster
) -> None:
    """No node is contacted."""
    cluster.write(f"{INVENTORY}{inventory}\n")

    assert (cluster.run("tunnel", *args).code, cluster.fleet_options) == (2, [])


def test_an_invalid_port_is_a_usage_error(cluster: Cluster) -> None:
    """No node is contacted."""
    assert (cluster.run("tunnel", "--local-port", "70000").code, cluster.fleet_options) == (2, [])
