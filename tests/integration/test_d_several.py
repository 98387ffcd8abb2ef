"""Several servers at once on three practice hosts: what happens to one does not touch another.

Each test stands on the one before.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.faults import host_faults
from tests.integration.conftest import Practice
from tests.integration.servers import (
    REBOOT,
    answers,
    asking,
    await_state,
    crash,
    lost,
    record,
    serve,
    status,
)

pytestmark = [pytest.mark.lab, pytest.mark.long]

# `apart` is alone on node3; `both` takes the two other nodes, in Ray or outside of it.
APART = ("--name", "apart", "--backend", "mp", "--nodes", "node3", "--port", "8001")
BOTH = ("--name", "both")
_START = 200.0  # seconds for a start on two cores that do other things, too


@pytest.fixture(scope="module")
def cluster(bare: Practice) -> Practice:
    """Three nodes, no server."""
    bare.write()
    ran = bare.vlaunch("up")
    assert ran.code == 0, ran.said
    return bare


def test_two_servers_by_two_backends(cluster: Practice) -> None:
    """One beside Ray, one in what Ray has left; each answers at its own port, and each command
    knows their names.
    """
    serve(cluster, *APART)
    serve(cluster, *BOTH, "--tp", "1", "--pp", "2")
    ran, _ = status(cluster)

    assert ran.code == 0, ran.said
    assert answers(cluster, "node3", 8001).ok
    assert answers(cluster).ok
    for name in ("apart", "both"):
        chat = cluster.vlaunch("chat", "--server", name, "--max-tokens", "4", "Hi")
        assert (chat.code, bool(chat.out.strip())) == (0, True), chat.said
    unclear = cluster.vlaunch("chat", "Hi")
    assert (unclear.code, "`apart`" in unclear.err, "`both`" in unclear.err) == (2, True, True)
    assert "node3/apart: " in cluster.vlaunch("logs", "--server", "apart").out


def test_there_is_no_room_for_a_third(cluster: Practice) -> None:
    """Who holds the GPUs and the port is said."""
    ran = cluster.vlaunch(
        "serve", "--name", "third", "--backend", "mp", "--nodes", "node3", "--port", "8001"
    )

    assert ran.code == 1, ran.said
    assert "server `apart` uses 1" in ran.err
    assert "vlaunch stop apart" in ran.err
    assert "port 8001 on node3 is in use by server `apart`" in ran.err


def test_one_dies_again_and_again(cluster: Practice) -> None:
    """The other loses no request, and its engine is the same."""
    before = record(cluster, "both")
    with asking(cluster) as traffic:
        for _ in range(2):
            crash(cluster, "node3", "apart")
        await_state(cluster, "answering", name="apart", within=_START)

    assert lost(traffic) == []
    assert len(traffic.samples) > 10
    assert (record(cluster, "both")["generation"], record(cluster, "both")["fault_count"]) == (
        before["generation"],
        0,
    )


def test_all_hosts_reboot(cluster: Practice) -> None:
    """Both are back, and nobody has typed a word."""
    for host in cluster.lab.hosts:
        host_faults.power_off(host)
    for host in cluster.lab.hosts:
        host_faults.power_on(cluster.lab, host)
    for name in ("apart", "both"):
        await_state(cluster, "answering", name=name, within=2 * _START + REBOOT)

    assert answers(cluster, "node3", 8001).ok
    assert answers(cluster).ok


def test_stop_of_one_leaves_the_other(cluster: Practice) -> None:
    """Its name is needed while there are two."""
    unclear = cluster.vlaunch("stop")
    with asking(cluster, "node3", 8001) as traffic:
        stopped = cluster.vlaunch("stop", "both")
        time.sleep(3)

    assert (unclear.code, "vlaunch stop --all" in unclear.err) == (2, True), unclear.said
    assert stopped.code == 0, stopped.said
    assert lost(traffic) == []
    assert status(cluster, "both")[1]["state"] == "none"
    assert status(cluster, "apart")[1]["state"] == "answering"


def test_two_servers_outside_of_ray(cluster: Practice) -> None:
    """On nodes that `--nodes` names; the one that spans two dies again and again, the other loses
    no request.
    """
    serve(cluster, *BOTH, "--backend", "mp", "--nodes", "node[1-2]")
    with asking(cluster, "node3", 8001) as traffic:
        for _ in range(2):
            crash(cluster, "node1", "both")
        await_state(cluster, "answering", name="both", within=_START)

    assert lost(traffic) == []
    assert answers(cluster).ok


def test_all_are_stopped(cluster: Practice) -> None:
    """In one command; `down` leaves nothing."""
    stopped = cluster.vlaunch("stop", "--all")
    ran = cluster.vlaunch("down", "--yes")

    assert stopped.code == 0, stopped.said
    assert "vllm serve" not in cluster.command_lines()
    assert ran.code == 0, ran.said
    assert cluster.containers() == {}
