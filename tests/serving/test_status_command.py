"""`vlaunch status`: a table for people, JSON for machines, an exit code for scripts."""

from __future__ import annotations

import dataclasses
import json

import pytest

from launcher.agent.observed import Wedge
from launcher.core.errors import ConnectError
from tests import supervision
from tests.command_line import INVENTORY, Cluster
from tests.simulated import query


@pytest.fixture
def up(cluster: Cluster) -> Cluster:
    """A running cluster."""
    assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    return cluster


def test_a_healthy_cluster_is_a_table_and_exit_code_0(up: Cluster) -> None:
    """On standard output, without messages or changes."""
    ran = up.run("status")

    assert (ran.code, ran.err, up.world.changes) == (0, "", [])
    assert ran.out.splitlines()[0] == "cluster c"
    assert ["gpu02", "worker", "10.0.0.12", "running", "alive", "8/8", "-", "-"] in [
        line.split() for line in ran.out.splitlines()
    ]
    assert "server: none" in ran.out


def test_an_empty_cluster_is_exit_code_1(cluster: Cluster) -> None:
    """The state is reported without an error."""
    ran = cluster.run("status")

    assert (ran.code, ran.err) == (1, "")
    assert ran.out.count("missing") >= 2


def test_json_has_the_tables_content(up: Cluster) -> None:
    """And the health."""
    data = json.loads(up.run("status", "--json").out)

    assert data["whole"] is True
    assert [node["node"] for node in data["nodes"]] == ["gpu01", "gpu02"]
    assert (data["server"], data["servers"]) == ({"state": "none"}, [])
    assert data["endpoint"] == "http://10.0.0.11:8000/v1"


@pytest.fixture
def serving(up: Cluster) -> Cluster:
    """Two busy servers."""
    busy = {"verdict": "busy", "load": dataclasses.asdict(supervision.make_load())}
    supervision.store_server(
        up.world, supervision.make_spec("chat", backend="mp", node="gpu02", port=8001), **busy
    )
    supervision.store_server(up.world, supervision.make_spec("embed"), **busy)
    return up


def test_servers_have_their_own_lines(serving: Cluster) -> None:
    """A loaded server is green, and the cluster healthy."""
    ran = serving.run("status")

    assert (ran.code, ran.err) == (0, "")
    assert "server chat: busy  org/m (mp on gpu[01-02])  http://10.0.0.12:8001/v1" in ran.out
    assert "server embed: busy  org/m (ray on gpu[01-02])  http://10.0.0.11:8000/v1" in ran.out
    assert ran.out.count("busy: 8 running, 892 waiting, 310 tokens/s") == 2
    assert [
        server["name"] for server in json.loads(serving.run("status", "--json").out)["servers"]
    ] == ["chat", "embed"]


def test_the_head_gets_a_single_request(serving: Cluster) -> None:
    """Its agent reports all servers at once."""
    serving.commands.clear()
    serving.run("status")
    commands = serving.commands
    requests = [(command.node, query(command.argv)) for command in commands if query(command.argv)]

    assert requests == [("gpu01", "jobs")]
    assert not [
        command for command in commands if "vlaunch_agent.agent.health.chat" in command.argv
    ]


def test_servers_without_progress(serving: Cluster) -> None:
    """A quiet server is a warning; a suspect one is red, with its rank, node and frame."""
    wedge = Wedge(since=1.0, rank="PP1", node="gpu02", frame="all_reduce (x.py:1)")
    still = {"still": 95.0, "longest_step": 2.5, "reason": "no step has ended for 95 s"}
    serving.world.observed["embed"] |= {"verdict": "quiet", **still}
    ran = serving.run("status")
    assert (ran.code, "server embed: quiet" in ran.out) == (0, True)
    assert "no step has ended for 95 s; longest so far: 2.5 s" in ran.out

    suspect = {"verdict": "suspect", **still, "wedge": dataclasses.asdict(wedge)}
    serving.world.observed["embed"] |= suspect
    ran = serving.run("status")
    assert (ran.code, "server embed: suspect" in ran.out) == (1, True)
    assert "hanging: rank PP1 on gpu02 in all_reduce (x.py:1)" in ran.out


def test_an_agent_that_does_not_answer(serving: Cluster) -> None:
    """The state of its servers is unknown."""
    serving.world.responses["jobs"] = {"error": "the agent's main loop has hung for 20 s"}
    ran = serving.run("status")

    assert ran.code == 1
    assert "server: unknown  gpu01: the agent's main loop has hung for 20 s" in ran.out


def test_drift_is_reported_as_text_and_exit_code(up: Cluster) -> None:
    """After a change of the inventory."""
    up.write(INVENTORY.replace("cluster: c\n", "cluster: c\nenv: {A: '1'}\n"))
    ran = up.run("status")

    assert ran.code == 1
    assert "gpu[01-02]: drift: env A: unset → 1" in ran.out


def test_an_unreachable_node_is_in_the_table(up: Cluster) -> None:
    """The other nodes are still queried."""
    up.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")
    ran = up.run("status")

    assert ran.code == 1
    assert "gpu02: cannot be reached: timed out" in ran.out
    assert "alive" in ran.out
    assert "gpu02: gpu02" not in ran.out


def test_a_table_in_a_pipe_is_not_folded(up: Cluster) -> None:
    """`vlaunch status` piped into `grep NODE` works for long names."""
    name = "gpu02-with-a-very-long-name.rack-seven.second-hall.example"
    up.write(INVENTORY.replace("{host: gpu02,", f"{{host: gpu02, name: {name},"))
    up.missing[name] = ConnectError(name, "cannot be reached")

    assert any(line.startswith(f"{name} ") for line in up.run("status").out.splitlines())


def test_watching_as_json_repeats_until_ctrl_c(
    up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object per query."""
    naps = iter([None, KeyboardInterrupt()])

    def sleep(_: float) -> None:
        if (end := next(naps)) is not None:
            raise end

    monkeypatch.setattr("launcher.serving.status_command.time.sleep", sleep)
    ran = up.run("status", "--json", "--watch")

    assert ran.code == 130
    assert [json.loads(line)["whole"] for line in ran.out.splitlines()] == [True, True]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watching_tries_a_missing_node_again(
    flags: list[str], up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be booting."""
    up.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")
    looks = []

    def sleep(_: float) -> None:
        looks.append(
            len(
                [
                    command
                    for command in up.commands
                    if command.argv[3] == "probe" and command.node == "gpu02"
                ]
            )
        )
        up.missing.clear()
        if len(looks) == 2:
            raise KeyboardInterrupt

    up.commands.clear()
    monkeypatch.setattr("launcher.serving.status_command.time.sleep", sleep)

    assert up.run("status", "--watch", *flags).code == 130
    assert looks == [0, 1]
