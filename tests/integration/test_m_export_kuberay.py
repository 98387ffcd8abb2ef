"""`vlaunch export kubernetes --kind kuberay` on two lab hosts: podman runs the head's and the
worker's pod in the hosts' network, with an image that has Ray.

No operator runs: `lab_pods.py` does its part on the pods, and the test submits the job.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from launcher.lab.layout import Host
from tests import debian13
from tests.integration import lab_pods
from tests.integration.batches import find_processes, wait_until
from tests.integration.conftest import LabCluster
from tests.integration.exported import START, Answer, Group, export_group, query_server, run_on_all
from tests.integration.servers import query_model

pytestmark = [pytest.mark.lab, pytest.mark.long]
HEALTH = 52365  # port of Ray's agent on each node, for the operator's probes


@pytest.fixture(scope="module")
def group(lab_cluster: LabCluster, answer_of_serve: Answer) -> Iterator[Group]:
    """The server's pods, on hosts with only podman and the image of `up`."""
    if debian13.program("podman") is None:
        pytest.skip(f"podman {debian13.MISSING}")
    lab_cluster.recreate()
    name = lab_cluster.docker(
        "node1", "inspect", "--format", "{{.Config.Image}}", "vlaunch-lab-node1"
    )
    head = lab_cluster.lab.hosts[0]
    archive = head.root / "srv" / "ray.tar"
    lab_cluster.on("node1", "docker", "save", "-o", "/srv/ray.tar", name.strip(), timeout=600)
    assert lab_cluster.vlaunch("down", "--yes", "--purge").code == 0
    lab_pods.load_image(head, archive, name.strip())
    archive.unlink()
    yield export_group(lab_cluster, "--kind", "kuberay", "--image", name.strip())
    run_on_all(lab_cluster, lab_pods.remove_pods)
    lab_pods.remove_storage(lab_cluster.lab)


def is_ready(host: Host) -> bool:
    """Run the probe that the operator adds to the pods."""
    try:
        with urllib.request.urlopen(f"http://{host.ip}:{HEALTH}/api/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def submit_job(group: Group) -> None:
    """Submit the job, as the operator does over HTTP when all pods are ready."""
    body = json.dumps({"entrypoint": group.workload["spec"]["entrypoint"]}).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {lab_pods.TOKEN}",
    }
    address = f"http://{group.lab_cluster.lab.hosts[0].ip}:8265/api/jobs/"
    request = urllib.request.Request(address, body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "submission_id" in json.load(answer)


def test_rays_pods_answer(group: Group, answer_of_serve: Answer) -> None:
    """The check passes in both; Ray has both nodes, and runs the server with the arguments of
    `vlaunch serve`.
    """
    first, second = group.lab_cluster.lab.hosts
    group.start()
    wait_until(lambda: is_ready(first) and is_ready(second), "Ray runs in both pods", START)
    for host in (first, second):
        wait_until(
            lambda host=host: "PASS every link between the 2 pods" in group.log(host),
            "the check has passed",
            60,
        )
    status = lab_pods.podman(first, "exec", group.container(first), "ray", "status").stdout
    active = status.partition("Active:")[2].partition("Pending:")[0]
    assert active.count("1 node_") == 2, status
    assert "no failures" in status

    submit_job(group)
    wait_until(lambda: query_model(group.lab_cluster).ok, "the server answers", START)
    assert query_server(group.lab_cluster).text == answer_of_serve.text
    status = lab_pods.podman(first, "exec", group.container(first), "ray", "status").stdout
    assert "2.0/2.0 GPU" in status, status


def test_deleted_pods_leave_nothing(group: Group) -> None:
    """No container, volume, secret or process on any host."""
    group.stop()

    for host in group.lab_cluster.lab.hosts:
        assert list(lab_pods.list_leftovers(host)) == []
    assert [line for _, line in find_processes(group.lab_cluster, "ray")] == []
