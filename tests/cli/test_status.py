"""`vlaunch status`: a table for people, JSON for machines, an exit code for scripts."""

from __future__ import annotations

import dataclasses
import json

import pytest

from launcher.errors import ConnectError
from launcher.model import Answer
from launcher.transport import Command
from tests import kept
from tests.cli.conftest import INVENTORY, Cluster
from tests.simulated import query


@pytest.fixture
def up(cluster: Cluster) -> Cluster:
    """A cluster that is up."""
    assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    return cluster


def test_a_whole_cluster_is_a_table_and_exit_code_0(up: Cluster) -> None:
    """On standard output, without talk; nothing is changed."""
    ran = up.run("status")

    assert (ran.code, ran.err, up.world.changes) == (0, "", [])
    assert ran.out.splitlines()[0] == "cluster c"
    assert ["gpu02", "worker", "10.0.0.12", "running", "alive", "8/8", "-", "-"] in [
        line.split() for line in ran.out.splitlines()
    ]
    assert "server: none" in ran.out


def test_nothing_there_is_exit_code_1(cluster: Cluster) -> None:
    """Told, not an error."""
    ran = cluster.run("status")

    assert (ran.code, ran.err) == (1, "")
    assert ran.out.count("absent") >= 2


def test_json_says_all_that_the_table_does(up: Cluster) -> None:
    """And whether it is whole."""
    said = json.loads(up.run("status", "--json").out)

    assert said["whole"] is True
    assert [node["node"] for node in said["nodes"]] == ["gpu01", "gpu02"]
    assert (said["server"], said["servers"]) == ({"state": "none"}, [])
    assert said["endpoint"] == "http://10.0.0.11:8000/v1"


@pytest.fixture
def serving(up: Cluster) -> Cluster:
    """Two servers: one answers, the other has too much to do."""
    kept.keep(up.world, kept.wanted("chat", backend="mp", node="gpu02", port=8001))
    kept.keep(up.world, kept.wanted("embed"))
    up.world.said["complete"] = {
        "status": 0,
        "error": "timed out",
        "moved": True,
        "load": dataclasses.asdict(kept.load()),
    }
    return up


def test_servers_have_lines_of_their_own(serving: Cluster) -> None:
    """A loaded server is green, and the cluster whole."""
    ran = serving.run("status")

    assert (ran.code, ran.err) == (0, "")
    assert "server chat: busy  org/m (mp on gpu[01-02])  http://10.0.0.12:8001/v1" in ran.out
    assert "server embed: busy  org/m (ray on gpu[01-02])  http://10.0.0.11:8000/v1" in ran.out
    assert ran.out.count("busy: 8 running, 892 waiting, 310 tokens/s") == 2
    assert [
        each["name"] for each in json.loads(serving.run("status", "--json").out)["servers"]
    ] == ["chat", "embed"]


def test_each_server_is_asked_on_its_node_and_its_keeper_again_when_it_is_late(
    serving: Cluster,
) -> None:
    """What moves meanwhile is what tells a busy server from a dead one; who answers costs no such
    question.
    """
    serving.commands.clear()
    serving.run("status")
    verbs = [
        (each.node, query(each.argv) or each.argv[each.argv.index("/opt/vlaunch/head.py") + 1])
        for each in head_asked(serving)
    ]

    assert verbs[0] == ("gpu01", "jobs")
    assert sorted(verbs[1:5]) == [
        ("gpu01", "about"),
        ("gpu01", "complete"),
        ("gpu02", "about"),
        ("gpu02", "complete"),
    ]
    assert verbs[5:] == [("gpu01", "servers")]
    serving.world.said["complete"] = {"status": 200, "model": "m", "seconds": 0.1}
    serving.commands.clear()
    serving.run("status")
    assert len(head_asked(serving)) == 5


def head_asked(cluster: Cluster) -> list[Command]:
    """Return the questions to agents, and to the program in the containers."""
    return [
        each for each in cluster.commands if query(each.argv) or "/opt/vlaunch/head.py" in each.argv
    ]


def test_what_the_keeper_saw_last_counts(serving: Cluster) -> None:
    """It looked again while the completion was waited for."""
    serving.world.said["complete"] = {"status": 0, "error": "timed out", "moved": False}
    answer = serving.world.answer

    def later(command: Command) -> Answer | None:
        if query(command.argv) == "servers":
            serving.world.observed["chat"] |= {"still": 12.0, "asking": 12.0}
            serving.world.observed["embed"] |= {"still": 2.0, "asking": 12.0}
        return answer(command)

    serving.world.answer = later  # type: ignore[method-assign]
    ran = serving.run("status")

    assert ran.code == 1
    assert (
        "server chat: silent  org/m (mp on gpu[01-02])  no completion: timed out; nothing has moved"
        " for 12 s" in ran.out
    )
    assert "server embed: busy" in ran.out


def test_drift_is_told_in_words_and_by_the_exit_code(up: Cluster) -> None:
    """The inventory was changed since."""
    up.write(INVENTORY.replace("cluster: c\n", "cluster: c\nenv: {A: '1'}\n"))
    ran = up.run("status")

    assert ran.code == 1
    assert "gpu[01-02]: differs from the inventory: env A: unset → 1" in ran.out


def test_a_node_that_cannot_be_reached_is_in_the_table(up: Cluster) -> None:
    """The others are looked at all the same."""
    up.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")
    ran = up.run("status")

    assert ran.code == 1
    assert "gpu02: cannot be reached: timed out" in ran.out
    assert "alive" in ran.out
    assert "gpu02: gpu02" not in ran.out


def test_a_table_in_a_pipe_is_not_folded(up: Cluster) -> None:
    """`vlaunch status | grep NODE` finds the node, however long its name is."""
    name = "gpu02-with-a-very-long-name.rack-seven.second-hall.example"
    up.write(INVENTORY.replace("{host: gpu02,", f"{{host: gpu02, name: {name},"))
    up.missing[name] = ConnectError(name, "cannot be reached")

    assert any(line.startswith(f"{name} ") for line in up.run("status").out.splitlines())


def test_watching_as_json_looks_again_until_ctrl_c(
    up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object a look."""
    naps = iter([None, KeyboardInterrupt()])

    def sleep(_: float) -> None:
        if (end := next(naps)) is not None:
            raise end

    monkeypatch.setattr("launcher.cli.status.time.sleep", sleep)
    ran = up.run("status", "--json", "--watch")

    assert ran.code == 130
    assert [json.loads(line)["whole"] for line in ran.out.splitlines()] == [True, True]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watching_tries_a_missing_node_again(
    flags: list[str], up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on its way up."""
    up.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")
    looks = []

    def sleep(_: float) -> None:
        looks.append(
            len([each for each in up.commands if each.argv[3] == "probe" and each.node == "gpu02"])
        )
        up.missing.clear()
        if len(looks) == 2:
            raise KeyboardInterrupt

    up.commands.clear()
    monkeypatch.setattr("launcher.cli.status.time.sleep", sleep)

    assert up.run("status", "--watch", *flags).code == 130
    assert looks == [0, 1]
