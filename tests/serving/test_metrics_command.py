"""`vlaunch metrics`: two samples in a pipe, continuous ones in a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.core.errors import ConnectError
from launcher.serving import metrics_command
from tests import supervision
from tests.command_line import Cluster
from tests.simulated import query


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples follow at once; after six of them Ctrl-C is simulated."""
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 5:
            raise KeyboardInterrupt

    monkeypatch.setitem(metrics_command._poll_metrics.__kwdefaults__, "sleep", sleep)


@pytest.fixture
def serving(up: Cluster) -> Cluster:
    """A server with counters."""
    supervision.store_server(up.world, supervision.make_spec())
    up.world.observed["default"] |= {
        "ranks": {"gpu01": ["PP0"], "gpu02": ["PP1"]},
        "alive": {"gpu01": {"PP0": True}, "gpu02": {"PP1": True}},
    }
    counting(up)
    return up


def counting(cluster: Cluster, *ports: int, running: int = 3, **extra: Any) -> None:
    """Set the APIs' counters."""
    text = f'vllm:num_requests_running{{engine="0"}} {running}\n'
    apis = {f"127.0.0.1:{port}": {"status": 200, "text": text} for port in ports or (8000,)}
    cluster.world.responses["counts"] = {"apis": apis, **cluster.world.head_report(), **extra}


def test_a_pipe_gets_a_single_sample(serving: Cluster) -> None:
    """Rates need a second one; the cluster is unchanged."""
    ran = serving.run("metrics")

    assert (ran.code, ran.err, serving.world.changes) == (0, "", [])
    assert "    requests  3 running, 0 waiting\n" in ran.out
    assert "    ranks     gpu01: PP0 up; gpu02: PP1 up\n" in ran.out
    assert "0.0 out" in ran.out


def test_json_is_an_object(serving: Cluster) -> None:
    """With the same figures."""
    ran = serving.run("metrics", "--json")
    (server,) = json.loads(ran.out)["servers"]

    assert (server["figures"]["running"], server["figures"]["tokens_per_s"]) == (3, 0.0)
    assert server["ranks"][1] == {"node": "gpu02", "rank": "PP1", "alive": True}


def test_json_continues_with_watch(serving: Cluster) -> None:
    """A line per sample, until Ctrl-C."""
    ran = serving.run("metrics", "--json", "--watch", "--every", "1")

    assert ran.code == 130
    assert len(ran.out.splitlines()) == 6


def test_it_is_drawn_until_ctrl_c(serving: Cluster) -> None:
    """In a pipe, too, with `--watch`."""
    ran = serving.run("metrics", "--watch")

    assert ran.code == 130
    assert "every 2 s" in ran.out


def test_only_the_head_and_nodes_with_apis_are_reached(serving: Cluster) -> None:
    """With one query per sample."""
    supervision.store_server(serving.world, supervision.make_spec("far", node="gpu02", port=8001))
    counting(serving, 8000, 8001)
    serving.commands.clear()
    serving.run("metrics")

    verbs = [(command.node, query(command.argv)) for command in serving.commands]
    assert verbs[0] == ("gpu01", "servers")
    assert sorted(verbs[1:3]) == [("gpu01", "counts"), ("gpu02", "counts")]
    assert len(verbs) == 5


def test_a_server_of_several(serving: Cluster) -> None:
    """Selected by name; an unknown name is an error."""
    supervision.store_server(serving.world, supervision.make_spec("embed", port=8001))
    counting(serving, 8000, 8001)

    assert "embed" in serving.run("metrics").out
    assert "embed" not in serving.run("metrics", "--server", "default").out
    ran = serving.run("metrics", "--server", "chat")
    assert (ran.code, "no server `chat` is running" in ran.err) == (2, True)


def test_no_server_at_all(up: Cluster) -> None:
    """Without servers, the command fails."""
    ran = up.run("metrics")

    assert ran.code == 2
    assert "no server is running on this cluster" in ran.err


def test_an_unreachable_node_is_reported(serving: Cluster) -> None:
    """Its figures are unknown; the head's are shown."""
    supervision.store_server(serving.world, supervision.make_spec("far", node="gpu02", port=8001))
    counting(serving)
    serving.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")
    ran = serving.run("metrics")

    assert ran.code == 0
    assert "metrics   gpu02: cannot be reached: timed out" in ran.out
    assert "3 running" in ran.out


def test_a_head_without_the_query(serving: Cluster) -> None:
    """An earlier version of the head gives a hint."""
    serving.world.responses["counts"] = {"error": "invalid choice: 'metrics'"}
    ran = serving.run("metrics")

    assert ran.code == 1
    assert "invalid choice" in ran.err
    assert "`vlaunch up`" in ran.err


def test_a_server_that_stops_meanwhile(serving: Cluster) -> None:
    """Sampling continues: another server may start."""
    serving.world.responses["counts"] = {"apis": {}, **supervision.head_report()}
    ran = serving.run("metrics")

    assert (ran.code, "server: none" in ran.out) == (0, True)
