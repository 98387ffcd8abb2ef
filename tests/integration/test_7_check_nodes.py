"""The preflight checks of the nodes themselves: a fault on a node is named, and its fix repairs it.

As in `test_6_check.py`, each test runs all checks: but for the named ones, all is as on healthy
hosts.
"""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks.faults import host_faults
from launcher.lab import hosts
from tests.integration.catalogue import Document, assert_fails, assert_healthy, run_checks, run_fix
from tests.integration.conftest import LabCluster

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("fault", ["lacks a file", "has another file", "is not there"])
def test_a_model_that_differs_on_a_node(three: LabCluster, fault: str) -> None:
    """The check names node2 with the file; a copy from node1 repairs it."""
    source, target = (
        hosts.hf_home(three.lab.host(name)) / "tiny-llama" for name in ("node1", "node2")
    )
    try:
        if fault == "is not there":
            shutil.rmtree(target)
        else:
            (target / "config.json").unlink()
        if fault == "has another file":
            (target / "config.json").write_text("{}")
        finding = assert_fails(three, "model").only_finding("model")
        assert finding["node"] == "node2"
        assert fault == "is not there" or "config.json" in finding["text"]
        assert (
            "`vlaunch model copy /data/huggingface/tiny-llama --from node1 --to node2`"
            in finding["fix"]
        )
    finally:
        shutil.copytree(source, target, dirs_exist_ok=True)
    assert_healthy(three, "model")


def test_docker_is_dead(three: LabCluster) -> None:
    """On node3; checks that need Docker are skipped, not failed as well."""
    last = three.lab.host("node3")
    host_faults.kill_dockerd(last)
    try:
        report = assert_fails(three, "docker")
        finding = report.only_finding("docker")
        assert (finding["node"], finding["fix"]) == (
            "node3",
            "run `sudo systemctl start docker` on node3",
        )
        assert "node3" in [row["node"] for row in report.findings("docker-version", "skip")]
    finally:
        host_faults.power_on(three.lab, last)  # starts it as the host itself does
    assert_healthy(three, "docker")


def test_containers_may_open_few_files(three: LabCluster) -> None:
    """Docker's default on node3 is too low; the fix names its setting."""
    last = three.lab.host("node3")
    file = last.root / "etc/docker/daemon.json"
    limit = {"nofile": {"Name": "nofile", "Soft": 1024, "Hard": 1024}}
    configuration = json.loads(file.read_text())
    file.write_text(json.dumps({**configuration, "default-ulimits": limit}))
    host_faults.stop_dockerd(last)
    try:
        hosts.start_service(last, "dockerd")
        hosts.await_services(last)
        finding = assert_fails(three, "process-limits").only_finding("process-limits")
        text = "the container may open only 1024 files"
        assert (finding["node"], finding["text"]) == ("node3", text)
        assert "`default-ulimits`" in finding["fix"]
    finally:
        host_faults.stop_dockerd(last)
        host_faults.power_on(three.lab, last)  # with the host's own configuration
    assert_healthy(three, "process-limits")


def test_sshd_is_dead(three: LabCluster) -> None:
    """node3 refuses SSH; the other nodes are still checked."""
    last = three.lab.host("node3")
    host_faults.kill_sshd(last)
    try:
        report = assert_fails(three, "ssh")
        finding = report.only_finding("ssh")
        assert (finding["node"], "refused" in finding["text"]) == ("node3", True)
        assert "`ssh root@10.79.0.13 true`" in finding["fix"]
        assert {row["node"] for row in report.findings("docker", "pass")} == {"node[1-2]"}
    finally:
        host_faults.power_on(three.lab, last)
    assert_healthy(three, "ssh")


def test_a_user_without_docker_rights(three: LabCluster) -> None:
    """`ops` on node2 may use Docker only through sudo; the fix says so."""

    def ops(document: Document) -> None:
        document["nodes"][1]["ssh"] = {"user": "ops"}

    def through_sudo(document: Document) -> None:
        ops(document)
        document["nodes"][1]["docker"] = ["sudo", "-n", "docker"]

    three.write(ops)
    report = run_checks(three, code=1)
    assert (report.with_status("fail"), report.with_status("warn")) == ({"docker"}, set())
    finding = report.only_finding("docker")
    assert (finding["node"], finding["text"]) == ("node2", "`ops` may not use Docker")
    assert finding["fix"].startswith("add `docker: [sudo, -n, docker]` to the inventory")
    three.write(through_sudo)
    report = run_checks(three, code=0)
    assert (report.checks["docker"]["status"], report.checks["sudo"]["status"]) == ("pass", "pass")


def test_a_logout_that_removes_shared_memory(three: LabCluster) -> None:
    """An ordinary user on node2 without lingering, and containers that share the host's memory."""

    def change(document: Document) -> None:
        document["shm"] = "host"
        document["nodes"][1].update(ssh={"user": "ops"}, docker=["sudo", "-n", "docker"])

    three.write(change)
    root = three.lab.host("node2").root
    report = run_checks(three, code=0)
    finding = report.only_finding("remove-ipc", "warn")
    assert (finding["node"], finding["fix"]) == (
        "node2",
        "run `sudo loginctl enable-linger ops` on node2",
    )
    marker = root / "var/lib/systemd/linger/ops"
    marker.parent.mkdir(parents=True)
    marker.touch()  # what the command does where logind runs (loginctl(1))
    try:
        assert_healthy(three, "remove-ipc")
    finally:
        shutil.rmtree(root / "var/lib/systemd")


def test_too_little_shared_memory(three: LabCluster) -> None:
    """/dev/shm of node2, which the containers share, is smaller than Ray's object store of
    200 MB.
    """
    three.write(lambda document: document.update(shm="host"))
    three.on("node2", "mount", "-o", "remount,size=100m", "/dev/shm")
    finding = assert_fails(three, "shm").only_finding("shm")
    assert finding["node"] == "node2"
    run_fix(three, "node2", finding["fix"], number=1)
    assert_healthy(three, "shm")


def test_another_image_of_the_same_name(three: LabCluster) -> None:
    """A tag that moved on node3; the right image under the name repairs it."""
    name = "vllm-cpu:0.32.0"
    right = three.docker("node1", "image", "inspect", "--format", "{{.Id}}", name).strip()
    assert right == three.docker("node3", "image", "inspect", "--format", "{{.Id}}", name).strip()
    three.docker("node3", "tag", name, "kept")
    three.on("node3", "sh", "-c", f"tar -c -C /etc hostname | docker import - {name}")
    try:
        finding = assert_fails(three, "image").only_finding("image")
        assert (finding["node"], finding["text"]) == (
            "node3",
            f"{name} differs from the image on node[1-2]",
        )
        assert f"`vlaunch image copy {name} --from node1`" in finding["fix"]
    finally:
        three.docker("node3", "tag", right, name)
        three.docker("node3", "rmi", "kept")
    assert_healthy(three, "image")
