"""Several servers at once on three lab hosts: faults of one do not affect another.

Each test depends on the one before.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.faults import host_faults
from tests.integration.conftest import LabCluster
from tests.integration.servers import (
    REBOOT,
    await_state,
    crash_engine,
    failed_requests,
    query_model,
    query_status,
    read_record,
    serve,
    steady_traffic,
)

pytestmark = [pytest.mark.lab, pytest.mark.long]

# `apart` runs alone on node3; `both` takes the two other nodes, in Ray or outside of it.
APART = ("--name", "apart", "--backend", "mp", "--nodes", "node3", "--port", "8001")
BOTH = ("--name", "both")
_START = 200.0  # seconds for a start on two busy cores


@pytest.fixture(scope="module")
def cluster(bare: LabCluster) -> LabCluster:
    """Three nodes, no server."""
    bare.write()
    result = bare.vlaunch("up")
    assert result.code == 0, result.output
    return bare


def test_two_servers_by_two_backends(cluster: LabCluster) -> None:
    """One beside Ray, one on the rest of the GPUs; each answers at its own port, and each command
    accepts their names.
    """
    serve(cluster, *APART)
    serve(cluster, *BOTH, "--tp", "1", "--pp", "2")
    result, _ = query_status(cluster)

    assert result.code == 0, result.output
    assert query_model(cluster, "node3", 8001).ok
    assert query_model(cluster).ok
    for name in ("apart", "both"):
        chat = cluster.vlaunch("chat", "--server", name, "--max-tokens", "4", "Hi")
        assert (chat.code, bool(chat.out.strip())) == (0, True), chat.output
    unclear = cluster.vlaunch("chat", "Hi")
    assert (unclear.code, "`apart`" in unclear.err, "`both`" in unclear.err) == (2, True, True)
    assert "node3/apart: " in cluster.vlaunch("logs", "--server", "apart").out


def test_a_third_server_does_not_fit(cluster: LabCluster) -> None:
    """The error names the users of the GPUs and the port."""
    result = cluster.vlaunch(
        "serve", "--name", "third", "--backend", "mp", "--nodes", "node3", "--port", "8001"
    )

    assert result.code == 1, result.output
    assert "server `apart` uses 1" in result.err
    assert "vlaunch stop apart" in result.err
    assert "port 8001 on node3 is in use by server `apart`" in result.err


def test_a_server_dies_repeatedly(cluster: LabCluster) -> None:
    """The other loses no request, and keeps its engine."""
    before = read_record(cluster, "both")
    with steady_traffic(cluster) as traffic:
        for _ in range(2):
            crash_engine(cluster, "node3", "apart")
        await_state(cluster, "answering", name="apart", within=_START)

    assert failed_requests(traffic) == []
    assert len(traffic.samples) > 10
    assert (
        read_record(cluster, "both")["generation"],
        read_record(cluster, "both")["fault_count"],
    ) == (
        before["generation"],
        0,
    )


def test_all_hosts_reboot(cluster: LabCluster) -> None:
    """Both come back by themselves."""
    for host in cluster.lab.hosts:
        host_faults.power_off(host)
    for host in cluster.lab.hosts:
        host_faults.power_on(cluster.lab, host)
    for name in ("apart", "both"):
        await_state(cluster, "answering", name=name, within=2 * _START + REBOOT)

    assert query_model(cluster, "node3", 8001).ok
    assert query_model(cluster).ok


def test_stop_keeps_the_other_server(cluster: LabCluster) -> None:
    """Its name is required while two servers run."""
    unclear = cluster.vlaunch("stop")
    with steady_traffic(cluster, "node3", 8001) as traffic:
        stopped = cluster.vlaunch("stop", "both")
        time.sleep(3)

    assert (unclear.code, "vlaunch stop --all" in unclear.err) == (2, True), unclear.output
    assert stopped.code == 0, stopped.output
    assert failed_requests(traffic) == []
    assert query_status(cluster, "both")[1]["state"] == "none"
    assert query_status(cluster, "apart")[1]["state"] == "answering"


def test_two_servers_outside_of_ray(cluster: LabCluster) -> None:
    """On the nodes of `--nodes`; the one on two nodes dies repeatedly, the other loses no
    request.
    """
    serve(cluster, *BOTH, "--backend", "mp", "--nodes", "node[1-2]")
    with steady_traffic(cluster, "node3", 8001) as traffic:
        for _ in range(2):
            crash_engine(cluster, "node1", "both")
        await_state(cluster, "answering", name="both", within=_START)

    assert failed_requests(traffic) == []
    assert query_model(cluster).ok


def test_all_are_stopped(cluster: LabCluster) -> None:
    """With one command; `down` leaves nothing."""
    stopped = cluster.vlaunch("stop", "--all")
    result = cluster.vlaunch("down", "--yes")

    assert stopped.code == 0, stopped.output
    assert "vllm serve" not in cluster.command_lines()
    assert result.code == 0, result.output
    assert cluster.containers() == {}
