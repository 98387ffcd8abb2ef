"""`vlaunch serve` of a server that runs already, and is supervised otherwise than the command line asks for."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Cluster

SERVE = ("serve", "--skip-network-check", "--no-wait", "--model", "org/m")


@pytest.fixture
def served(cluster: Cluster) -> Cluster:
    """A cluster with a server under a supervisor."""

    def submitted(job: dict[str, object]) -> None:
        files = cluster.world.machines["gpu01"].files
        files.pop("server/wanted.json", None)
        if job["wanted"]:
            files["server/wanted.json"] = json.dumps(job["wanted"]).encode()

    cluster.world.driver = submitted
    assert cluster.run("up").code == 0
    assert cluster.run(*SERVE).code == 0
    cluster.world.changes.clear()
    return cluster


def test_the_same_command_is_watched_without_another_word(served: Cluster) -> None:
    """Nothing differs, so nothing is said of it; nor is anything replaced."""
    ran = served.run(*SERVE, "--replace")

    assert (ran.code, served.world.verbs()) == (0, [])
    assert "this server runs already as Ray job serve-" in ran.err
    assert "starts it anew" not in ran.err


def test_a_supervised_server_is_not_taken_for_one_without(served: Cluster) -> None:
    """The flag is refused; with `--replace` it is had, and then the plain command says which it is."""
    ran = served.run(*SERVE, "--no-supervise")

    assert (ran.code, served.world.verbs()) == (2, [])
    assert "org/m runs already (Ray job serve-" in ran.err
    assert "and it is supervised" in ran.err
    assert served.run(*SERVE, "--no-supervise", "--replace").code == 0
    assert served.world.verbs() == ["gpu01: stop", "gpu01: submit"]
    assert served.run(*SERVE, "--no-supervise").code == 0
    plain = served.run(*SERVE)
    assert plain.code == 0
    assert "nobody supervises it: it stays dead when a rank, a node or the engine dies; `--replace`" in plain.err


def test_an_inventory_that_asks_for_no_supervisor_is_no_flag(served: Cluster) -> None:
    """The server is watched as it is, and that is told."""
    served.write(served.path.read_text() + "serve: {supervise: false}\n")
    ran = served.run(*SERVE)

    assert (ran.code, served.world.verbs()) == (0, [])
    assert "it is supervised; `--replace` starts it anew as asked" in ran.err


def test_another_timeout_changes_nothing(served: Cluster) -> None:
    """It says how long to wait now; what answers is not started anew for it."""
    ran = served.run(*SERVE, "--timeout", "60", "--replace")

    assert (ran.code, served.world.verbs()) == (0, [])
    assert "starts it anew" not in ran.err
