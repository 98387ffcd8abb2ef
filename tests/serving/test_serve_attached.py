"""`vlaunch serve` beside a running server: the same one, or another, with any name."""

from __future__ import annotations

import pytest

from tests.command_line import INVENTORY, Cluster

SERVE = ("serve", "--skip-network-check", "--no-wait", "--model", "org/m")


@pytest.fixture
def served(cluster: Cluster) -> Cluster:
    """A cluster with a server."""
    assert cluster.run("up").code == 0
    assert cluster.run(*SERVE, "--tp", "4", "--pp", "2").code == 0
    cluster.world.changes.clear()
    return cluster


def test_the_same_command_attaches_silently(served: Cluster) -> None:
    """Without a note or a replacement. Another timeout is no difference."""
    ran = served.run(*SERVE, "--tp", "4", "--pp", "2", "--replace", "--timeout", "60")

    assert (ran.code, served.world.verbs()) == (0, [])
    assert "already running as server `default`; watching it" in ran.err
    assert "restarts it" not in ran.err


def test_a_supervised_server_is_not_mistaken_for_an_unsupervised(served: Cluster) -> None:
    """The flag is rejected; with `--replace` it applies, and the plain command then has a note."""
    ran = served.run(*SERVE, "--tp", "4", "--pp", "2", "--no-supervise")

    assert (ran.code, served.world.verbs()) == (2, [])
    assert "org/m is already running (server `default`), and it is supervised" in ran.err
    assert served.run(*SERVE, "--tp", "4", "--pp", "2", "--no-supervise", "--replace").code == 0
    assert served.world.verbs() == ["gpu01: want"]
    assert served.run(*SERVE, "--tp", "4", "--pp", "2", "--no-supervise").code == 0
    plain = served.run(*SERVE, "--tp", "4", "--pp", "2")
    assert plain.code == 0
    assert "supervision is off: it will not restart after a failure; `--replace`" in plain.err


def test_supervision_disabled_in_the_inventory_is_no_flag(served: Cluster) -> None:
    """The command attaches to the server, with a note."""
    served.write(served.path.read_text() + "serve: {supervise: false}\n")
    ran = served.run(*SERVE, "--tp", "4", "--pp", "2")

    assert (ran.code, served.world.verbs()) == (0, [])
    assert "it is supervised; `--replace` restarts it with the new settings" in ran.err


def test_another_server_needs_its_own_name(served: Cluster) -> None:
    """And its own port; the error names the user of the port."""
    other = (*SERVE[:-1], "org/other", "--tp", "4", "--pp", "1")
    refused = served.run(*other)
    second = served.run(*other, "--name", "chat")
    beside = served.run(*other, "--name", "chat", "--port", "8001")

    assert (refused.code, "server `default` is already running org/m" in refused.err) == (2, True)
    assert (second.code, "port 8000 on gpu01 is in use by server `default`" in second.err) == (
        1,
        True,
    )
    assert "`--port 8001`" in second.err
    assert (beside.code, served.world.verbs()) == (0, ["gpu01: want"])
    assert [server["name"] for server in served.world.servers()] == ["chat", "default"]


def test_a_failed_server_is_replaced(served: Cluster) -> None:
    """Without `--replace`."""
    served.world.observed["default"] = {"state": "failed"}

    assert served.run(*SERVE[:-1], "org/other").code == 0
    assert [server["desired"]["model"] for server in served.world.servers()] == ["org/other"]


def test_a_cluster_that_is_not_up(cluster: Cluster) -> None:
    """`up` creates its containers, for any backend."""
    for backend in ("ray", "mp"):
        ran = cluster.run(*SERVE, "--backend", backend)

        assert (ran.code, cluster.world.changes) == (1, [])
        assert "gpu[01-02]: has no container of this cluster" in ran.err
        assert "hint: run `vlaunch up` first" in ran.err


def test_unsupported_options_of_ray_are_rejected(served: Cluster) -> None:
    """Before any change: it chooses the GPUs itself, and not all clusters have it."""
    some = served.run(*SERVE, "--nodes", "gpu02")
    fewer = served.run(*SERVE, "--gpus", "4")
    served.write(f"ray: none\n{INVENTORY}")
    none = served.run(*SERVE, "--backend", "ray")

    assert [ran.code for ran in (some, fewer, none)] == [2, 2, 2]
    assert "--nodes has no effect with Ray" in some.err
    assert "`--backend mp`" in some.err
    assert "`--tp` and `--pp`" in fewer.err
    assert "the cluster has no Ray (`ray: none` in the inventory)" in none.err
    assert served.world.verbs() == []
