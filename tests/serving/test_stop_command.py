"""`vlaunch stop`: the servers it stops, the waits, and the removal of records."""

from __future__ import annotations

import pytest

from launcher.core.domain import Answer
from tests.command_line import Cluster

SERVE = ("serve", "--skip-network-check", "--no-wait", "--tp", "4", "--pp", "1", "--model")


@pytest.fixture
def served(cluster: Cluster) -> Cluster:
    """A cluster with two servers."""
    assert cluster.run("up").code == 0
    assert cluster.run(*SERVE, "org/a").code == 0
    assert cluster.run(*SERVE, "org/b", "--name", "chat", "--port", "8001").code == 0
    cluster.world.changes.clear()
    return cluster


def names(cluster: Cluster) -> list[str]:
    return [server["name"] for server in cluster.world.servers()]


def test_the_only_server_need_not_be_named(served: Cluster) -> None:
    """With several, they are listed, and nothing is touched."""
    both = served.run("stop")
    served.unwant("chat")
    ran = served.run("stop", "--json")

    assert both.code == 2
    assert "there are 2 servers: `chat` (org/b, starting), `default` (org/a, starting)" in both.err
    assert "`vlaunch stop --all`" in both.err
    assert (ran.code, names(served), served.world.verbs()) == (0, [], ["gpu01: unwant"])
    assert ran.events[-1]["text"] == "stopped org/a (server `default`)"
    assert ran.events[-1]["data"] == {"stopped": ["default"], "forgotten": []}


def test_a_server_of_several_is_stopped_by_its_name(served: Cluster) -> None:
    """The other one goes on; only the head is reached."""
    ran = served.run("stop", "chat")

    assert (ran.code, names(served)) == (0, ["default"]), ran.err
    assert {command.node for command in served.world.changes} == {"gpu01"}


def test_all_of_them(served: Cluster) -> None:
    """In one go; a name beside it would be a contradiction."""
    assert served.run("stop", "--all", "chat").code == 2
    assert (served.run("stop", "--all").code, names(served)) == (0, [])
    assert "no server is running; nothing was stopped" in served.run("stop", "--all").err


def test_a_name_that_nothing_has(served: Cluster) -> None:
    """It is neither a server nor a batch job; the error lists the existing ones, and nothing is
    stopped.
    """
    ran = served.run("stop", "chta")

    assert (ran.code, len(names(served))) == (2, 2)
    assert "no server or batch job is named `chta`" in ran.err
    assert "`chat`, `default`" in ran.err


def test_a_server_that_does_not_end_is_no_success(served: Cluster) -> None:
    """The error names its state; the same command waits again."""
    stopping = {**served.world.servers()[0], "desired": None}
    stopping["observed"] = {
        **stopping["observed"],
        "state": "stopping",
        "doing": "its ranks have had 10 s to end",
    }
    report = {"servers": [stopping], "members": {}, "agent": 1.0}
    served.world.said |= {"servers": report, "jobs": {"jobs": [], **report}}
    ran = served.run("stop", "chat")

    assert ran.code == 1
    assert "server `chat`: its ranks have had 10 s to end" in ran.err


@pytest.mark.parametrize(
    ("state", "message"), [("failed", "failed"), ("gave-up", "restart limit reached")]
)
def test_a_server_that_is_over_is_forgotten(served: Cluster, state: str, message: str) -> None:
    """After `stop`, a failed server no longer makes `status` fail."""
    files = served.world.machines["gpu01"].files
    files["server/chat/observed.json"] = files["server/chat/history.json"] = b"{}"
    served.world.observed["chat"] = {"state": state}
    ran = served.run("stop", "chat")

    assert (ran.code, names(served)) == (0, ["default"])
    assert "server/chat/observed.json" not in files
    assert "server/chat/history.json" in files
    assert f"removed the record of server `chat` ({message})" in ran.err


def test_servers_are_forgotten_though_the_heads_container_does_not_run(served: Cluster) -> None:
    """They would come back with it; the output names processes on other nodes, and the command that
    stops them.
    """
    served.world.stop("gpu01")
    ran = served.run("stop", "chat")

    assert (ran.code, names(served)) == (0, ["default"])
    assert "the head's container is not running: server `chat` will not start with it" in ran.err
    assert "`vlaunch down` stops everything" in ran.err


def test_an_unresponsive_ray_does_not_block_stop(served: Cluster) -> None:
    """The agent lists the servers; that Ray has their GPUs back cannot be verified."""
    served.world.said["jobs"] = {"error": "timed out", **served.world.kept()}
    ran = served.run("stop", "chat")

    assert (ran.code, names(served)) == (1, ["default"])
    assert "cannot query Ray: timed out" in ran.err


def test_servers_in_an_unknown_state(served: Cluster) -> None:
    """It failed (exit code 1), with what was seen."""
    served.world.said["servers"] = served.world.said["jobs"] = {"error": "no such file"}
    ran = served.run("stop")

    assert (ran.code, len(names(served))) == (1, 2)
    assert "gpu01: cannot list its servers" in ran.err
    assert "no such file" in ran.err


def test_a_dry_run_stops_nothing(served: Cluster) -> None:
    """It prints the script."""
    ran = served.run("stop", "chat", "--dry-run")

    assert (ran.code, len(names(served)), served.world.verbs()) == (0, 2, [])
    assert "rm -f /root/.vlaunch/c/server/chat/desired.json" in ran.out
    assert "# gate server-gone" in ran.out


def test_a_file_that_cannot_be_removed_is_no_success(served: Cluster) -> None:
    """A folder of root's, say: the server goes on."""
    served.world.fail["gpu01", "unwant"] = Answer(
        node="gpu01", code=1, err="rm: cannot remove: Permission denied"
    )
    ran = served.run("stop", "chat")

    assert (ran.code, len(names(served))) == (1, 2)
    assert "Permission denied" in ran.err


def test_a_batch_job_beside_it_goes_on(served: Cluster) -> None:
    """A note has the command that stops it."""
    batch = {"submission_id": "b-1", "status": "RUNNING", "metadata": {"vlaunch.batch": "b"}}
    served.world.jobs.append(batch)
    ran = served.run("stop", "chat")

    assert (ran.code, batch["status"]) == (0, "RUNNING")
    assert "batch job `b` keeps running; stop it: `vlaunch stop b`" in ran.err
