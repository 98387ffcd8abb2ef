"""`vlaunch export kubernetes` on two lab hosts: podman runs the pods of its LeaderWorkerSet in the
hosts' network. The network check, an answer, and a group whose rank dies.

Each test depends on the one before. No controller runs: `lab_pods.py` does its part on the
pods.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from benchmarks.faults import host_faults
from launcher.lab import image
from tests import debian13
from tests.integration import lab_pods
from tests.integration.batches import find_processes, kill_process, wait_until
from tests.integration.conftest import LabCluster
from tests.integration.exported import START, Answer, Group, export_group, query_server, run_on_all
from tests.integration.servers import failed_requests, query_model, steady_traffic, url

pytestmark = [pytest.mark.lab, pytest.mark.long]
REPLICAS = ("--tp", "1", "--pp", "1", "--dp", "2")


@pytest.fixture(scope="module")
def hosts(lab_cluster: LabCluster, answer_of_serve: Answer) -> Iterator[LabCluster]:
    """Hosts with only podman and the image."""
    if debian13.program("podman") is None:
        pytest.skip(f"podman {debian13.MISSING}")
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes", "--purge").code == 0
    archive = debian13.ROOT.parent / f"image-{image.cache_key()}.tar"
    lab_pods.load_image(lab_cluster.lab.hosts[0], archive, image.NAME)
    yield lab_cluster
    run_on_all(lab_cluster, lab_pods.remove_pods)
    lab_pods.remove_storage(lab_cluster.lab)


@pytest.fixture(scope="module")
def group(hosts: LabCluster) -> Group:
    """The server of the inventory."""
    run_on_all(hosts, lab_pods.remove_pods)
    return export_group(hosts)


def find_servers(lab_cluster: LabCluster) -> list[str]:
    """Return the command lines of vLLM, without those of the network check, which name it too."""
    return [
        line for _, line in find_processes(lab_cluster, "vllm serve") if "network.pyz" not in line
    ]


def test_no_server_starts_when_the_check_fails(hosts: LabCluster) -> None:
    """The check fails in both pods with the reason, no server starts, and both containers wait with
    their logs.
    """
    group = export_group(hosts, "--timeout", "20")
    first, second = hosts.lab.hosts
    with host_faults.disconnected(first, second):
        group.start()
        for host in hosts.lab.hosts:
            wait_until(
                lambda host=host: "is not started" in group.log(host), "the check fails", 200
            )

    assert "FAIL pod1 → pod0, local rank 0: rank 1 (pod1) did not arrive" in group.log(first)
    assert "FAIL rank 1 in phase" in group.log(second)
    assert "did not open lab-0.lab-0.default:29500 within 20 s" in group.log(second)
    assert [group.state(host) for host in hosts.lab.hosts] == ["running 0", "running 0"]
    assert find_servers(hosts) == []
    group.stop()


def test_the_pods_answer(group: Group, answer_of_serve: Answer) -> None:
    """The check passes; the answer has the text, parallelism and settings of `vlaunch serve`, and
    needs the key; the probes pass.
    """
    group.start()
    wait_until(lambda: group.is_healthy("startupProbe"), "the startup probe passes", START)

    for host in group.lab_cluster.lab.hosts:
        assert "PASS every link between the 2 pods reaches `any`" in group.log(host)
    assert query_server(group.lab_cluster) == answer_of_serve
    assert group.is_healthy("livenessProbe")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url(group.lab_cluster)}/models", timeout=10)


def test_a_group_recovers_from_the_death_of_a_rank(group: Group, answer_of_serve: Answer) -> None:
    """Its container exits, so that the controller recreates all pods; all check the network and
    answer again.
    """
    first, second = group.lab_cluster.lab.hosts
    with steady_traffic(group.lab_cluster) as traffic:
        kill_process(group.lab_cluster, "VLLM::Worker", "node2")
        wait_until(
            lambda: group.state(second) != "running 0", "the rank's container has ended", 120
        )
        wait_until(lambda: failed_requests(traffic), "a request fails", 60)
    group.stop()
    group.start()
    wait_until(lambda: query_model(group.lab_cluster).ok, "it answers again", START)

    assert query_server(group.lab_cluster) == answer_of_serve
    assert [group.log(host).count("PASS every link") for host in (first, second)] == [1, 1]
    assert group.state(first) == "running 0"


def test_a_failed_check_ends_at_once_with_its_pod(hosts: LabCluster, group: Group) -> None:
    """A waiting container handles the stop signal of the kubelet."""
    group.stop()
    alone = export_group(hosts, "--timeout", "5")
    host = hosts.lab.hosts[0]
    lab_pods.play_pod(host, alone.pod(host), alone.objects, START)
    wait_until(lambda: "is not started" in alone.log(host), "the check fails", 200)

    assert lab_pods.podman(host, "stop", "--time", "30", alone.container(host)).returncode == 0
    state = lab_pods.podman(
        host, "inspect", "--format", "{{.State.ExitCode}}", alone.container(host)
    )
    assert state.stdout.strip() == "143"


def test_deleted_pods_leave_nothing(group: Group) -> None:
    """No container, volume, secret or process on any host."""
    group.stop()

    for host in group.lab_cluster.lab.hosts:
        assert list(lab_pods.list_leftovers(host)) == []
    assert [line for _, line in find_processes(group.lab_cluster, "vllm")] == []


def test_replicas_meet_at_the_name_of_the_first_pod(
    hosts: LabCluster, answer_of_serve: Answer
) -> None:
    """vLLM's engines use it to find their coordinator: pods have no address before they run."""
    group = export_group(hosts, split=REPLICAS)
    group.start()
    wait_until(lambda: query_model(hosts).ok, "the replicas answer", START)

    answer = query_server(hosts)
    assert answer.text == answer_of_serve.text
    assert "dp2" in answer.fingerprint
    group.stop()
