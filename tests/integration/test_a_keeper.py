"""A server that dies in the ways that its keeper knows, by either backend: it comes back, and
nobody types a word.

Requests stream all the while. The first start gives the time that others are compared with.
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
from tests.integration.batches import kill_one, until
from tests.integration.conftest import Practice
from tests.integration.servers import (
    AGAIN,
    LOG,
    REBOOT,
    answered_since,
    asking,
    await_state,
    comes_back,
    crash,
    lost,
    record,
    recovers,
    serve,
    status,
)

pytestmark = [pytest.mark.lab, pytest.mark.long]

_PAUSE = 5  # seconds until dockerd is started again, as systemd pauses
_KEPT = ("generation", "fault_count")


@dataclass(frozen=True)
class Served:
    """A server over both nodes: its backend, how long its first start took, and who asks it."""

    practice: Practice
    backend: str
    cold: float
    traffic: Traffic


@pytest.fixture(scope="module", params=["ray", "mp"])
def served(practice: Practice, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of each backend in turn, in a cluster of its own; requests stream while its tests
    run.
    """
    practice.bring_up_anew()
    ran = serve(practice, "--backend", request.param)
    with asking(practice) as traffic:
        yield Served(practice, request.param, ran.seconds, traffic)


def test_a_server_is_kept(served: Served) -> None:
    """`status` says so, with the ranks of both nodes and no limit to restarts."""
    ran, server = status(served.practice)

    assert ran.code == 0, ran.said
    assert (server["state"], server["backend"]) == ("answering", served.backend)
    assert (server["observed"]["state"], server["observed"]["restarts_left"]) == ("ready", None)
    assert set(server["observed"]["ranks"]) == {"node1", "node2"}
    assert server["observed"]["faults"] == []


def test_the_keeper_costs_next_to_nothing(served: Served) -> None:
    """Less than 1 % of a core and 64 MB, of which aiohttp, pydantic and prometheus_client take 25
    MB.
    """
    agent = engines.agent(served.practice.lab.hosts[0])
    assert agent is not None
    before = engines.used(agent)
    time.sleep(30)
    share, resident = (engines.used(agent) - before) / 30, engines.resident(agent)
    LOG.info("%.2f %% of a core, %.0f MB", 100 * share, resident / 1e6)

    assert share < 0.01
    assert resident < 64e6


def test_whoever_serves_the_same_watches_the_recovery(served: Served) -> None:
    """The same command is patient while the server comes back, and ends well."""
    crash(served.practice, "node1")
    ran = serve(served.practice, "--backend", served.backend)

    assert "already running as server" in ran.err
    assert "restarting" in ran.err
    # On a busy machine the engine's own words may come later than its end.
    assert record(served.practice)["faults"][-1]["what"].startswith("vLLM")


def _rank(served: Served) -> None:
    kill_one(
        served.practice, "RayWorkerProc" if served.backend == "ray" else "VLLM::Worker", "node2"
    )


def _in_containers(host: Host) -> set[int]:
    """Return this machine's process ids of all that a host's containers run."""
    return {process.pid for process in processes.host_processes(host) if len(process.pids) > 2}


def _started(practice: Practice, host: Host) -> str:
    """Return which main process a host's container has, and since when."""
    shown = "{{.State.Pid}} {{.State.StartedAt}}"
    return practice.docker(host.name, "inspect", "--format", shown, f"vlaunch-lab-{host.name}")


def _container(served: Served) -> None:
    host_faults.kill_container(served.practice.lab.hosts[1], "vlaunch-lab-node2")


@pytest.mark.parametrize("kill", [_rank, _container])
def test_it_comes_back(served: Served, kill: Callable[[Served], Any]) -> None:
    """After the death of a rank, and of a container, whose node is named; Docker brings the
    container back.
    """
    fault = recovers(
        served.practice, served.traffic, lambda: kill(served), within=AGAIN * served.cold
    )
    shown = served.practice.vlaunch("status").out

    assert fault["node"] == "node2"
    assert fault["rank"] == ("PP1" if served.backend == "ray" else "1")
    assert "ready again after" in shown
    assert fault["pause"] >= 10  # it was not the first fault


def test_the_heads_agent_dies(served: Served) -> None:
    """The engine on that node ends with it, and Ray; the next agent goes on with what is wanted."""
    before = time.time()
    host_faults.kill_container(served.practice.lab.hosts[0], "vlaunch-lab-node1")
    comes_back(served.practice, served.traffic, before, AGAIN * served.cold + REBOOT + 60)

    assert record(served.practice)["faults"][-1]["what"] == "the head's container was restarted"


def test_live_restore(served: Served) -> None:
    """With live-restore a dockerd that is killed and comes back disturbs nothing."""
    lab_hosts = served.practice.lab.hosts
    before, began = record(served.practice), time.time()
    old = [_started(served.practice, host) for host in lab_hosts]
    for host in lab_hosts:
        host_faults.set_live_restore(host, True)
        host_faults.kill_dockerd(host)
    time.sleep(_PAUSE)
    for host in lab_hosts:
        host_faults.start_dockerd(host)
    back = time.time()
    until(lambda: answered_since(served.traffic, back + 10), "a request is answered", 60)
    for host in lab_hosts:
        host_faults.set_live_restore(host, False)
    after = record(served.practice)

    assert [sample for sample in lost(served.traffic) if sample.ended > began] == []
    assert [after[key] for key in _KEPT] == [before[key] for key in _KEPT]
    assert [_started(served.practice, host) for host in lab_hosts] == old
    assert status(served.practice)[1]["state"] == "answering"


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
    """Docker starts its containers again, no process of the old ones is left, and the server
    answers within two minutes.
    """
    host = served.practice.lab.hosts[index]
    # A server that is asked for again pauses as after its first fault.
    assert served.practice.vlaunch("stop").code == 0
    serve(served.practice, "--backend", served.backend)
    old = _in_containers(host)
    before = time.time()
    end(host)
    time.sleep(_PAUSE)
    host_faults.start_dockerd(host)
    comes_back(served.practice, served.traffic, before, max(120, AGAIN * served.cold))

    assert not old & _in_containers(host)


def test_what_was_stopped_stays_stopped(served: Served) -> None:
    """Also when the head restarts: nobody wants it any more."""
    served.traffic.over.set()
    stopped = served.practice.vlaunch("stop")
    host_faults.kill_container(served.practice.lab.hosts[0], "vlaunch-lab-node1")
    until(lambda: status(served.practice)[0].code == 0, "the cluster is whole", REBOOT)
    time.sleep(5)

    assert stopped.code == 0, stopped.said
    assert status(served.practice)[1]["state"] == "none"
    assert "vllm serve" not in served.practice.command_lines()


@pytest.fixture
def plain(practice: Practice) -> Iterator[Practice]:
    """A cluster that is up and serves nothing; its inventory may be changed."""
    practice.write()
    up = practice.vlaunch("up")
    assert up.code == 0, up.said
    yield practice
    practice.write()


def test_it_gives_up_loudly(plain: Practice) -> None:
    """With the reason, in `status` and in the agent's log, when restarts are limited; the same
    command starts it again.
    """
    plain.write(lambda document: document["serve"].update(restarts=1))
    serve(plain, "--backend", "mp")
    for _ in range(2):
        crash(plain, "node1")
    found = await_state(plain, "gave-up", within=60)
    shown = plain.vlaunch("status")
    again = serve(plain, "--backend", "mp")

    assert "restart limit of 1 reached" in found["detail"]
    assert (shown.code, "restart limit of 1 reached" in shown.out) == (1, True)
    assert "GIVING UP" in plain.vlaunch("logs", "--tail", "2000").out
    assert "already running as server" not in again.err
    assert plain.vlaunch("stop").code == 0


def test_docker_stop_holds(plain: Practice) -> None:
    """A container that an operator stops stays down until `up`."""
    plain.docker("node2", "stop", "vlaunch-lab-node2")
    time.sleep(10)  # in which Docker would start a crashed one again
    stopped = plain.docker("node2", "inspect", "--format", "{{.State.Status}}", "vlaunch-lab-node2")
    up = plain.vlaunch("up")

    assert stopped.strip() == "exited"
    assert up.code == 0, up.said


def test_unsupervised(plain: Practice) -> None:
    """`--no-supervise`: what is dead stays dead, and says why; `stop` forgets it."""
    serve(plain, "--no-supervise", "--backend", "mp")
    kill_one(plain, "EngineCore", "node1")
    dead = await_state(plain, "failed", within=60)
    time.sleep(10)  # in which the keeper would start it again
    server = status(plain)[1]
    stopped = plain.vlaunch("stop")

    assert server["state"] == "failed"
    assert server["observed"]["generation"] == dead["observed"]["generation"]
    assert "vllm serve" not in plain.command_lines()
    assert stopped.code == 0, stopped.said
    assert status(plain)[1]["state"] == "none"


def test_nothing_is_left(practice: Practice) -> None:
    """`down` removes the servers' folders too, whose files belong to the container's root."""
    practice.write()
    ran = practice.vlaunch("down", "--yes")

    assert ran.code == 0, ran.said
    assert practice.containers() == {}
    assert practice.on("node1", "sh", "-c", "ls -d /root/.vlaunch/lab* 2>/dev/null || true") == ""
