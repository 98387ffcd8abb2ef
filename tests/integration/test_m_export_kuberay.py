"""`vlaunch export kubernetes --kind kuberay` on two practice hosts: podman plays the head's and the
worker's pod in the hosts' network, with an image that has Ray.

No operator is here: `practice_pods.py` does to the pods what it does, and the test submits the job.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from launcher.lab.layout import Host
from tests import debian13
from tests.integration import practice_pods
from tests.integration.batches import running, until
from tests.integration.conftest import Practice
from tests.integration.exported import START, Answer, Group, ask, exported, on_all
from tests.integration.servers import answers

pytestmark = [pytest.mark.lab, pytest.mark.long]
HEALTH = 52365  # port of Ray's agent on each node, which the operator's probes ask


@pytest.fixture(scope="module")
def group(practice: Practice, answer_of_serve: Answer) -> Iterator[Group]:
    """The server's pods, on hosts with nothing on them but podman and the image that `up` makes."""
    if debian13.program("podman") is None:
        pytest.skip(f"podman {debian13.MISSING}")
    practice.bring_up_anew()
    name = practice.docker("node1", "inspect", "--format", "{{.Config.Image}}", "vlaunch-lab-node1")
    head = practice.lab.hosts[0]
    archive = head.root / "srv" / "ray.tar"
    practice.on("node1", "docker", "save", "-o", "/srv/ray.tar", name.strip(), timeout=600)
    assert practice.vlaunch("down", "--yes", "--purge").code == 0
    practice_pods.load(head, archive, name.strip())
    archive.unlink()
    yield exported(practice, "--kind", "kuberay", "--image", name.strip())
    on_all(practice, practice_pods.end)
    practice_pods.forget(practice.lab)


def ready(host: Host) -> bool:
    """Run the probe that the operator adds to the pods."""
    try:
        with urllib.request.urlopen(f"http://{host.ip}:{HEALTH}/api/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def submit(group: Group) -> None:
    """Submit the job, as the operator does over HTTP once all pods are ready."""
    body = json.dumps({"entrypoint": group.workload["spec"]["entrypoint"]}).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {practice_pods.TOKEN}",
    }
    address = f"http://{group.practice.lab.hosts[0].ip}:8265/api/jobs/"
    request = urllib.request.Request(address, body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "submission_id" in json.load(answer)


def test_rays_pods_answer(group: Group, answer_of_serve: Answer) -> None:
    """The check passes in both; Ray has both nodes, and runs the server with the words of
    `vlaunch serve`.
    """
    one, two = group.practice.lab.hosts
    group.play()
    until(lambda: ready(one) and ready(two), "Ray runs in both pods", START)
    for host in (one, two):
        until(
            lambda host=host: "PASS every link between the 2 pods" in group.log(host),
            "the check has passed",
            60,
        )
    status = practice_pods.podman(one, "exec", group.container(one), "ray", "status").stdout
    active = status.partition("Active:")[2].partition("Pending:")[0]
    assert active.count("1 node_") == 2, status
    assert "no failures" in status

    submit(group)
    until(lambda: answers(group.practice).ok, "the server answers", START)
    assert ask(group.practice).words == answer_of_serve.words
    status = practice_pods.podman(one, "exec", group.container(one), "ray", "status").stdout
    assert "2.0/2.0 GPU" in status, status


def test_nothing_is_left_of_deleted_pods(group: Group) -> None:
    """No container, volume, secret or process on any host."""
    group.end()

    for host in group.practice.lab.hosts:
        assert list(practice_pods.left(host)) == []
    assert [line for _, line in running(group.practice, "ray")] == []
