"""A server that dies in all ways that its supervisor handles, on either backend, and comes back by
itself.

Requests stream all the while. The first start gives the reference time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks import engines
from benchmarks.faults import host_faults
from benchmarks.faults.traffic import Traffic
from launcher.lab import processes
from launcher.lab.layout import Host
from tests.integration.batches import kill_process, wait_until
from tests.integration.conftest import LabCluster
from tests.integration.servers import (
    LOG,
    REBOOT,
    RECOVERY_FACTOR,
    await_recovery,
    await_return,
    await_state,
    crash_engine,
    failed_requests,
    is_answered_since,
    query_status,
    read_record,
    serve,
    steady_traffic,
)

pytestmark = [pytest.mark.lab, pytest.mark.long]

_PAUSE = 5  # seconds until dockerd is started again, as systemd pauses
_UNCHANGED = ("generation", "fault_count")


@dataclass(frozen=True)
class Served:
    """A server over both nodes: its backend, the seconds of its first start, and its traffic."""

    lab_cluster: LabCluster
    backend: str
    cold: float
    traffic: Traffic


@pytest.fixture(scope="module", params=["ray", "mp"])
def served(lab_cluster: LabCluster, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of each backend in turn, in a new cluster, with steady traffic."""
    lab_cluster.recreate()
    result = serve(lab_cluster, "--backend", request.param)
    with steady_traffic(lab_cluster) as traffic:
        yield Served(lab_cluster, request.param, result.seconds, traffic)


def test_a_server_is_supervised(served: Served) -> None:
    """`status` shows it, with the ranks of both nodes and no restart limit."""
    result, server = query_status(served.lab_cluster)

    assert result.code == 0, result.output
    assert (server["state"], server["backend"]) == ("answering", served.backend)
    assert (server["observed"]["state"], server["observed"]["restarts_left"]) == ("ready", None)
    assert set(server["observed"]["ranks"]) == {"node1", "node2"}
    assert server["observed"]["faults"] == []


def test_the_supervisor_uses_few_resources(served: Served) -> None:
    """Less than 1 % of a core and 64 MB, of which aiohttp, pydantic and prometheus_client take 25
    MB.
    """
    agent = engines.find_agent(served.lab_cluster.lab.hosts[0])
    assert agent is not None
    before = engines.read_cpu_seconds(agent)
    time.sleep(30)
    share, resident = (
        (engines.read_cpu_seconds(agent) - before) / 30,
        engines.read_resident_bytes(agent),
    )
    LOG.info("%.2f %% of a core, %.0f MB", 100 * share, resident / 1e6)

    assert share < 0.01
    assert resident < 64e6


def test_the_same_command_watches_the_recovery(served: Served) -> None:
    """The same command waits for the recovery and succeeds."""
    crash_engine(served.lab_cluster, "node1")
    result = serve(served.lab_cluster, "--backend", served.backend)

    assert "already running as server" in result.err
    assert "restarting" in result.err
    # On a busy machine the engine's last lines may arrive after its exit.
    assert read_record(served.lab_cluster)["faults"][-1]["what"].startswith("vLLM")


def _kill_rank(served: Served) -> None:
    kill_process(
        served.lab_cluster, "RayWorkerProc" if served.backend == "ray" else "VLLM::Worker", "node2"
    )


def _container_pids(host: Host) -> set[int]:
    """Return this machine's pids of all processes in a host's containers."""
    return {process.pid for process in processes.host_processes(host) if len(process.pids) > 2}


def _container_start(lab_cluster: LabCluster, host: Host) -> str:
    """Return the main process of a host's container, and its start time."""
    template = "{{.State.Pid}} {{.State.StartedAt}}"
    return lab_cluster.docker(
        host.name, "inspect", "--format", template, f"vlaunch-lab-{host.name}"
    )


def _kill_container(served: Served) -> None:
    host_faults.kill_container(served.lab_cluster.lab.hosts[1], "vlaunch-lab-node2")


@pytest.mark.parametrize("kill", [_kill_rank, _kill_container])
def test_it_comes_back(served: Served, kill: Callable[[Served], Any]) -> None:
    """After the death of a rank, and of a container that Docker restarts; the fault names
    the node.
    """
    fault = await_recovery(
        served.lab_cluster,
        served.traffic,
        lambda: kill(served),
        within=RECOVERY_FACTOR * served.cold,
    )
    text = served.lab_cluster.vlaunch("status").out

    assert fault["node"] == "node2"
    assert fault["rank"] == ("PP1" if served.backend == "ray" else "1")
    assert "ready again after" in text
    assert fault["pause"] >= 10  # not the first fault


def test_the_heads_agent_dies(served: Served) -> None:
    """The engine on that node dies with it, and Ray; the next agent restores the server."""
    before = time.time()
    host_faults.kill_container(served.lab_cluster.lab.hosts[0], "vlaunch-lab-node1")
    await_return(
        served.lab_cluster, served.traffic, before, RECOVERY_FACTOR * served.cold + REBOOT + 60
    )

    assert (
        read_record(served.lab_cluster)["faults"][-1]["what"]
        == "the head's container was restarted"
    )


def test_live_restore(served: Served) -> None:
    """With live-restore, a killed and restarted dockerd disturbs nothing."""
    lab_hosts = served.lab_cluster.lab.hosts
    before, began = read_record(served.lab_cluster), time.time()
    old = [_container_start(served.lab_cluster, host) for host in lab_hosts]
    for host in lab_hosts:
        host_faults.set_live_restore(host, True)
        host_faults.kill_dockerd(host)
    time.sleep(_PAUSE)
    for host in lab_hosts:
        host_faults.start_dockerd(host)
    back = time.time()
    wait_until(lambda: is_answered_since(served.traffic, back + 10), "a request is answered", 60)
    for host in lab_hosts:
        host_faults.set_live_restore(host, False)
    after = read_record(served.lab_cluster)

    assert [sample for sample in failed_requests(served.traffic) if sample.ended > began] == []
    assert [after[key] for key in _UNCHANGED] == [before[key] for key in _UNCHANGED]
    assert [_container_start(served.lab_cluster, host) for host in lab_hosts] == old
    assert query_status(served.lab_cluster)[1]["state"] == "answering"


@pytest.mark.parametrize(
    ("end", "index"),
    [
        pytest.param(host_faults.kill_dockerd, 0, id="killed on the head"),
        pytest.param(host_faults.kill_dockerd, 1, id="killed on the worker"),
        pytest.param(host_faults.stop_dockerd, 0, id="restarted on the head"),
    ],
)
def test_dockerd_ends_and_comes_back(
    served: Served, end: Callable[[Host], None], index: int
) -> None:
    """Docker restarts its containers, no old process is left, and the server answers within two
    minutes.
    """
    host = served.lab_cluster.lab.hosts[index]
    # A new request for a server resets the pause to that of a first fault.
    assert served.lab_cluster.vlaunch("stop").code == 0
    serve(served.lab_cluster, "--backend", served.backend)
    old = _container_pids(host)
    before = time.time()
    end(host)
    time.sleep(_PAUSE)
    host_faults.start_dockerd(host)
    await_return(
        served.lab_cluster, served.traffic, before, max(120, RECOVERY_FACTOR * served.cold)
    )

    assert not old & _container_pids(host)


def test_a_stopped_server_stays_stopped(served: Served) -> None:
    """Also after a restart of the head: its spec is gone."""
    served.traffic.over.set()
    stopped = served.lab_cluster.vlaunch("stop")
    host_faults.kill_container(served.lab_cluster.lab.hosts[0], "vlaunch-lab-node1")
    wait_until(
        lambda: query_status(served.lab_cluster)[0].code == 0, "the cluster is whole", REBOOT
    )
    time.sleep(5)

    assert stopped.code == 0, stopped.output
    assert query_status(served.lab_cluster)[1]["state"] == "none"
    assert "vllm serve" not in served.lab_cluster.command_lines()


@pytest.fixture
def plain(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """A cluster without servers; its inventory may be changed."""
    lab_cluster.write()
    up = lab_cluster.vlaunch("up")
    assert up.code == 0, up.output
    yield lab_cluster
    lab_cluster.write()


def test_the_restart_limit(plain: LabCluster) -> None:
    """`status` and the agent's log show the reason; the same command starts the server again."""
    plain.write(lambda document: document["serve"].update(restarts=1))
    serve(plain, "--backend", "mp")
    for _ in range(2):
        crash_engine(plain, "node1")
    row = await_state(plain, "gave-up", within=60)
    result = plain.vlaunch("status")
    again = serve(plain, "--backend", "mp")

    assert "restart limit of 1 reached" in row["detail"]
    assert (result.code, "restart limit of 1 reached" in result.out) == (1, True)
    assert "GIVING UP" in plain.vlaunch("logs", "--tail", "2000").out
    assert "already running as server" not in again.err
    assert plain.vlaunch("stop").code == 0


def test_docker_stop_holds(plain: LabCluster) -> None:
    """A container that an operator stops stays down until `up`."""
    plain.docker("node2", "stop", "vlaunch-lab-node2")
    time.sleep(10)  # Docker would restart a crashed one in this time
    stopped = plain.docker("node2", "inspect", "--format", "{{.State.Status}}", "vlaunch-lab-node2")
    up = plain.vlaunch("up")

    assert stopped.strip() == "exited"
    assert up.code == 0, up.output


def test_unsupervised(plain: LabCluster) -> None:
    """`--no-supervise`: a dead server stays dead, with its reason; `stop` removes its record."""
    serve(plain, "--no-supervise", "--backend", "mp")
    kill_process(plain, "EngineCore", "node1")
    dead = await_state(plain, "failed", within=60)
    time.sleep(10)  # the supervisor would restart it in this time
    server = query_status(plain)[1]
    stopped = plain.vlaunch("stop")

    assert server["state"] == "failed"
    assert server["observed"]["generation"] == dead["observed"]["generation"]
    assert "vllm serve" not in plain.command_lines()
    assert stopped.code == 0, stopped.output
    assert query_status(plain)[1]["state"] == "none"


def test_down_leaves_nothing(lab_cluster: LabCluster) -> None:
    """`down` also removes the servers' folders, whose files belong to the container's root."""
    lab_cluster.write()
    result = lab_cluster.vlaunch("down", "--yes")

    assert result.code == 0, result.output
    assert lab_cluster.containers() == {}
    assert (
        lab_cluster.on("node1", "sh", "-c", "ls -d /root/.vlaunch/lab* 2>/dev/null || true") == ""
    )
