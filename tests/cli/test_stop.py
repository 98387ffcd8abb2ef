"""`vlaunch stop` and `vlaunch chat` where Ray's dashboard gives no answer, and of a server that does not run but is wanted."""

from __future__ import annotations

import pytest

from launcher.model import Answer
from launcher.plan import containers
from launcher.transport import Command
from tests.cli.conftest import Cluster


@pytest.fixture
def mute(cluster: Cluster) -> Cluster:
    """A cluster that is up, and whose dashboard hangs."""
    assert cluster.run("up").code == 0
    cluster.world.said["jobs"] = {"error": "timed out"}
    cluster.world.changes.clear()
    return cluster


@pytest.mark.parametrize("words", [["chat", "hello"], ["stop"]])
def test_nobody_could_say_whether_a_server_runs(mute: Cluster, words: list[str]) -> None:
    """It failed (exit code 1), with what was seen."""
    ran = mute.run(*words)

    assert ran.code == 1
    assert "Ray does not say which jobs run" in ran.err
    assert "timed out" in ran.err
    assert "no server runs" not in ran.err


def test_no_server_is_a_wrong_request(cluster: Cluster) -> None:
    """Ray was asked, and has none."""
    assert cluster.run("up").code == 0
    ran = cluster.run("chat", "hello")

    assert (ran.code, "no server runs" in ran.err) == (2, True)


def test_ranks_are_stopped_without_ray(mute: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are Docker's, so that Ray need not answer; that it did not is told."""
    inventory = mute.world.inventory
    name = containers.rank_name(inventory, inventory.head)
    own = mute.world.container("gpu01")
    labels = {**own["Config"]["Labels"], "vlaunch.role": "rank", "vlaunch.model": "m"}
    mute.world.machines["gpu01"].containers[name] = {
        **own, "Name": f"/{name}", "Config": {**own["Config"], "Labels": labels}
    }  # fmt: skip
    answer = mute.world.answer

    def stoppable(command: Command) -> Answer | None:
        there = mute.world.machines[command.node].containers
        if command.argv[:2] == ("sh", "-c") and command.argv[3] == "end":
            del there[command.argv[5]]
            return Answer(node=command.node, code=0)
        if command.argv[1:3] == ("ps", "--all"):
            return Answer(node=command.node, code=0, out="1\n" if name in there else "")
        return answer(command)

    monkeypatch.setattr(mute.world, "answer", stoppable)
    ran = mute.run("stop")

    assert (ran.code, name in mute.world.machines["gpu01"].containers) == (0, False)
    assert "only rank containers are stopped" in ran.err


def wanted(cluster: Cluster) -> bool:
    """True while the head's folder says that a server is wanted; it is read when the head's container starts."""
    return "server/wanted.json" in cluster.world.machines["gpu01"].files


def served(cluster: Cluster) -> None:
    assert cluster.run("up").code == 0
    cluster.world.machines["gpu01"].files["server/wanted.json"] = b'{"id": "0a1b2c3d"}'
    cluster.world.changes.clear()


def test_a_server_that_would_come_back_with_its_head_is_forgotten(cluster: Cluster) -> None:
    """`docker kill` of the head leaves a server that is wanted: `up` would start it again, which was to be stopped."""
    served(cluster)
    cluster.world.stop("gpu01")
    ran = cluster.run("stop")

    assert (ran.code, wanted(cluster)) == (0, False)
    assert "no server runs; the one that would have come back with the head is forgotten" in ran.err
    assert cluster.world.verbs() == ["gpu01: unwant"]
    assert "nothing was stopped" in cluster.run("stop").err


def test_a_server_whose_supervisor_was_killed_before_its_first_answer_is_forgotten(cluster: Cluster) -> None:
    """Ray has ended its job, and the next start of the head would begin with it."""
    served(cluster)
    cluster.world.jobs.append({"submission_id": "serve-0a1b2c3d-1", "status": "FAILED", "metadata": {"vlaunch.model": "m"}})
    ran = cluster.run("stop")

    assert (ran.code, wanted(cluster)) == (0, False)
    assert "is forgotten" in ran.err


def test_a_server_that_gave_up_is_forgotten(cluster: Cluster) -> None:
    """Whoever stops it has seen that it is dead: `status` is red no longer."""
    assert cluster.run("up").code == 0
    cluster.world.machines["gpu01"].files["server/server.json"] = b"{}"
    cluster.world.said["jobs"] = {"supervised": {"id": "0a1b2c3d", "state": "gave-up"}}
    ran = cluster.run("stop")

    assert (ran.code, "server/server.json" in cluster.world.machines["gpu01"].files) == (0, False)
    assert "no server runs; the one that had given up is forgotten" in ran.err


def test_a_dry_run_forgets_nothing(cluster: Cluster) -> None:
    """It says what would be sent."""
    served(cluster)
    ran = cluster.run("stop", "--dry-run")

    assert (ran.code, wanted(cluster), cluster.world.verbs()) == (0, True, [])
    assert "/root/.vlaunch/c wanted.json" in ran.out


def test_a_server_that_runs_is_forgotten_by_what_stops_it(cluster: Cluster) -> None:
    """The program in the head's container does both: nothing more is sent."""
    served(cluster)
    job = {"submission_id": "serve-0a1b2c3d-1", "status": "RUNNING", "message": "", "metadata": {"vlaunch.model": "m"}}
    cluster.world.jobs.append(job)
    ran = cluster.run("stop")

    assert ran.code == 0, ran.err
    assert cluster.world.verbs() == ["gpu01: stop"]


def test_what_is_wanted_is_forgotten_though_ray_is_silent(mute: Cluster) -> None:
    """It failed, for nobody knows what runs; but what was asked for is not undone by the next start of the head."""
    mute.world.machines["gpu01"].files["server/wanted.json"] = b"{}"
    ran = mute.run("stop")

    assert (ran.code, wanted(mute)) == (1, False)
    assert "Ray does not say which jobs run; a server that runs goes on, and does not come back any more" in ran.err


def test_a_file_that_cannot_be_removed_is_no_success(cluster: Cluster) -> None:
    """A folder of root's, say: the server would come back."""
    served(cluster)
    cluster.world.stop("gpu01")
    cluster.world.fail["gpu01", "unwant"] = Answer(node="gpu01", code=1, err="rm: cannot remove: Permission denied")
    ran = cluster.run("stop")

    assert (ran.code, wanted(cluster)) == (1, True)
    assert "Permission denied" in ran.err
