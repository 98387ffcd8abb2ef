"""The preflight's checks of the nodes themselves: what is broken on one of them is named, and its
fix makes it green again.

As in `test_6_check.py`, the whole catalogue is run each time: but for the named checks all is as on
healthy hosts.
"""

from __future__ import annotations

import shutil

import pytest

from benchmarks.faults import host_faults
from launcher.lab import hosts
from tests.integration.catalogue import Document, broken, check, do, healthy
from tests.integration.conftest import Practice

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("how", ["lacks a file", "has another file", "is not there"])
def test_a_model_that_is_not_the_same_everywhere(three: Practice, how: str) -> None:
    """node2 is named with the file, and a copy of node1's makes it well."""
    one, two = (hosts.hf_home(three.lab.host(name)) / "tiny-llama" for name in ("node1", "node2"))
    try:
        if how == "is not there":
            shutil.rmtree(two)
        else:
            (two / "config.json").unlink()
        if how == "has another file":
            (two / "config.json").write_text("{}")
        found = broken(three, "model").one("model")
        assert found["node"] == "node2"
        assert how == "is not there" or "config.json" in found["text"]
        assert (
            "`vlaunch model copy /data/huggingface/tiny-llama --from node1 --to node2`"
            in found["fix"]
        )
    finally:
        shutil.copytree(one, two, dirs_exist_ok=True)
    healthy(three, "model")


def test_docker_is_dead(three: Practice) -> None:
    """On node3; what needs Docker there is skipped, not failed as well."""
    last = three.lab.host("node3")
    host_faults.kill_dockerd(last)
    try:
        seen = broken(three, "docker")
        found = seen.one("docker")
        assert (found["node"], found["fix"]) == (
            "node3",
            "run `sudo systemctl start docker` on node3",
        )
        assert "node3" in [f["node"] for f in seen.findings("docker-version", "skip")]
    finally:
        host_faults.power_on(three.lab, last)  # the host's own way to start it
    healthy(three, "docker")


def test_sshd_is_dead(three: Practice) -> None:
    """node3 cannot be logged in to; the others are judged all the same."""
    last = three.lab.host("node3")
    host_faults.kill_sshd(last)
    try:
        seen = broken(three, "ssh")
        found = seen.one("ssh")
        assert (found["node"], "refused" in found["text"]) == ("node3", True)
        assert "`ssh root@10.79.0.13 true`" in found["fix"]
        assert {f["node"] for f in seen.findings("docker", "pass")} == {"node[1-2]"}
    finally:
        host_faults.power_on(three.lab, last)
    healthy(three, "ssh")


def test_a_login_without_rights_on_docker(three: Practice) -> None:
    """`ops` on node2 may use Docker through sudo only, and the fix says so."""

    def ops(document: Document) -> None:
        document["nodes"][1]["ssh"] = {"user": "ops"}

    def through_sudo(document: Document) -> None:
        ops(document)
        document["nodes"][1]["docker"] = ["sudo", "-n", "docker"]

    three.write(ops)
    seen = check(three, code=1)
    assert (seen.of("fail"), seen.of("warn")) == ({"docker"}, set())
    found = seen.one("docker")
    assert (found["node"], found["text"]) == ("node2", "`ops` may not use Docker")
    assert found["fix"].startswith("add `docker: [sudo, -n, docker]` to the inventory")
    three.write(through_sudo)
    seen = check(three, code=0)
    assert (seen.checks["docker"]["status"], seen.checks["sudo"]["status"]) == ("pass", "pass")


def test_a_logout_that_removes_shared_memory(three: Practice) -> None:
    """A plain login on node2 that does not linger, and containers that share the host's."""

    def change(document: Document) -> None:
        document["shm"] = "host"
        document["nodes"][1].update(ssh={"user": "ops"}, docker=["sudo", "-n", "docker"])

    three.write(change)
    root = three.lab.host("node2").root
    seen = check(three, code=0)
    found = seen.one("remove-ipc", "warn")
    assert (found["node"], found["fix"]) == (
        "node2",
        "run `sudo loginctl enable-linger ops` on node2",
    )
    marker = root / "var/lib/systemd/linger/ops"
    marker.parent.mkdir(parents=True)
    marker.touch()  # what the command does where logind runs (loginctl(1))
    try:
        healthy(three, "remove-ipc")
    finally:
        shutil.rmtree(root / "var/lib/systemd")


def test_too_little_shared_memory(three: Practice) -> None:
    """/dev/shm of node2, which the containers share, is smaller than Ray's object store of 200
    MB.
    """
    three.write(lambda document: document.update(shm="host"))
    three.on("node2", "mount", "-o", "remount,size=100m", "/dev/shm")
    found = broken(three, "shm").one("shm")
    assert found["node"] == "node2"
    do(three, "node2", found["fix"], number=1)
    healthy(three, "shm")


def test_another_image_of_the_same_name(three: Practice) -> None:
    """A tag that moved on node3; the right image under the name again makes it well."""
    name = "vllm-cpu:0.32.0"
    right = three.docker("node1", "image", "inspect", "--format", "{{.Id}}", name).strip()
    assert right == three.docker("node3", "image", "inspect", "--format", "{{.Id}}", name).strip()
    three.docker("node3", "tag", name, "kept")
    three.on("node3", "sh", "-c", f"tar -c -C /etc hostname | docker import - {name}")
    try:
        found = broken(three, "image").one("image")
        assert (found["node"], found["text"]) == (
            "node3",
            f"{name} differs from the image on node[1-2]",
        )
        assert f"`vlaunch image copy {name} --from node1`" in found["fix"]
    finally:
        three.docker("node3", "tag", right, name)
        three.docker("node3", "rmi", "kept")
    healthy(three, "image")
