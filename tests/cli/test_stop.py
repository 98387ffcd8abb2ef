"""`vlaunch stop` and `vlaunch chat` where Ray's dashboard gives no answer: silence is not "no server runs"."""

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
