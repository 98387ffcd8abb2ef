"""`vlaunch stop`: stopped servers, waits, and removal of records."""

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
    """Several are listed, without a change."""
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
    """The other one continues; only the head is contacted."""
    ran = served.run("stop", "chat")

    assert (ran.code, names(served)) == (0, ["default"]), ran.err
    assert {command.node for command in served.world.changes} == {"gpu01"}


def test_a_server_named_with_the_option(served: Cluster) -> None:
    """As in other commands; another name beside it is a contradiction, and no job is meant."""
    differ = served.run("stop", "--server", "chat", "default")
    unknown = served.run("stop", "--server", "job")
    ran = served.run("stop", "--server", "chat", "chat")

    assert (differ.code, unknown.code) == (2, 2)
    assert "--server chat and default differ" in differ.err
    assert "no server `job` is running" in unknown.err
    assert (ran.code, names(served)) == (0, ["default"]), ran.err


def test_stop_all(served: Cluster) -> None:
    """In one go; a name beside it would be a contradiction."""
    assert served.run("stop", "--all", "chat").code == 2
    assert (served.run("stop", "--all").code, names(served)) == (0, [])
    assert "no server is running; nothing was stopped" in served.run("stop", "--all").err


def test_an_unknown_name(served: Cluster) -> None:
    """Neither a server nor a batch job: the error lists the existing ones, and none is stopped."""
    ran = served.run("stop", "chta")

    assert (ran.code, len(names(served))) == (2, 2)
    assert "no server or batch job is named `chta`" in ran.err
    assert "`chat`, `default`" in ran.err


def test_a_server_that_does_not_stop_is_no_success(served: Cluster) -> None:
    """The error names its state; the same command waits again."""
    stopping = {**served.world.servers()[0], "desired": None}
    stopping["observed"] = {
        **stopping["observed"],
        "state": "stopping",
        "doing": "its ranks have had 10 s to end",
    }
    report = {"servers": [stopping], "members": {}, "agent": 1.0}
    served.world.responses |= {"servers": report, "jobs": {"jobs": [], **report}}
    ran = served.run("stop", "chat")

    assert ran.code == 1
    assert "server `chat`: its ranks have had 10 s to end" in ran.err


@pytest.mark.parametrize(
    ("state", "message"), [("failed", "failed"), ("gave-up", "restart limit reached")]
)
def test_a_failed_servers_record_is_removed(served: Cluster, state: str, message: str) -> None:
    """Then it no longer makes `status` fail."""
    files = served.world.machines["gpu01"].files
    files["server/chat/observed.json"] = files["server/chat/history.json"] = b"{}"
    served.world.observed["chat"] = {"state": state}
    ran = served.run("stop", "chat")

    assert (ran.code, names(served)) == (0, ["default"])
    assert "server/chat/observed.json" not in files
    assert "server/chat/history.json" in files
    assert f"removed the record of server `chat` ({message})" in ran.err


def test_records_are_removed_without_the_heads_container(served: Cluster) -> None:
    """Servers would return with it; the output names processes on other nodes, and a command that
    stops them.
    """
    served.world.stop("gpu01")
    ran = served.run("stop", "chat")

    assert (ran.code, names(served)) == (0, ["default"])
    assert "the head's container is not running: server `chat` will not start with it" in ran.err
    assert "`vlaunch down` stops everything" in ran.err


def test_an_unresponsive_ray_does_not_block_stop(served: Cluster) -> None:
    """The agent lists the servers; the release of Ray's GPUs cannot be verified."""
    served.world.responses["jobs"] = {"error": "timed out", **served.world.head_report()}
    ran = served.run("stop", "chat")

    assert (ran.code, names(served)) == (1, ["default"])
    assert "cannot query Ray: timed out" in ran.err


def test_servers_in_an_unknown_state(served: Cluster) -> None:
    """A failure (exit code 1), with the known facts."""
    served.world.responses["servers"] = served.world.responses["jobs"] = {"error": "no such file"}
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
    """For example root's: the server continues."""
    served.world.fail["gpu01", "unwant"] = Answer(
        node="gpu01", code=1, err="rm: cannot remove: Permission denied"
    )
    ran = served.run("stop", "chat")

    assert (ran.code, len(names(served))) == (1, 2)
    assert "Permission denied" in ran.err


def test_a_batch_job_beside_it_continues(served: Cluster) -> None:
    """A note has the command that stops it."""
    batch = {"submission_id": "b-1", "status": "RUNNING", "metadata": {"vlaunch.batch": "b"}}
    served.world.jobs.append(batch)
    ran = served.run("stop", "chat")

    assert (ran.code, batch["status"]) == (0, "RUNNING")
    assert "batch job `b` keeps running; stop it: `vlaunch stop b`" in ran.err
