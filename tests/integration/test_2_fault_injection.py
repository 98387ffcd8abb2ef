"""Faults of real clusters, injected: one clear error each, and the next `up` repairs the
cluster.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import host_faults
from tests.integration.conftest import (
    CommandResult,
    LabCluster,
    assert_error,
    kill_session,
    wait_for_output,
)

pytestmark = pytest.mark.lab


def assert_no_containers(lab_cluster: LabCluster) -> None:
    """Check that no container exists anywhere."""
    assert lab_cluster.containers() == {}


# -- The inventory: nothing is touched -------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param("", "empty", id="empty"),
        pytest.param("nodes: [", "YAML", id="not YAML"),
        pytest.param(
            "a0: &a0 [x, x]\n"
            + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 200)),
            "more than 20000 values",
            id="aliases without end",
        ),
        pytest.param("# " + "x" * 1_000_000, "KiB", id="1 MB"),
        pytest.param(
            "cluster: lab\nnodes: [{host: 10.78.0.11, gpu: 1}]\n",
            "did you mean `gpus`",
            id="near miss",
        ),
    ],
)
def test_broken_inventory(lab_cluster: LabCluster, content: str, text: str) -> None:
    """An unusable inventory is refused with exit code 2 before any node is contacted."""
    path = lab_cluster.folder / "broken.yaml"
    path.write_text(content)

    result = lab_cluster.vlaunch("up", str(path))

    assert result.code == 2, result.output
    assert "Traceback" not in result.output
    assert "Connect" not in result.err
    assert text in result.err


def test_inventory_that_is_a_directory(lab_cluster: LabCluster) -> None:
    """A directory is not an inventory."""
    result = lab_cluster.vlaunch("up", str(lab_cluster.folder))

    assert result.code == 2, result.output
    assert "directory" in result.err


# -- Reaching nodes --------------------------------------------------------------------------------


def _ssh(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["ssh"] |= values

    return change


def test_wrong_key(lab_cluster: LabCluster, down: LabCluster, tmp_path: Path) -> None:
    """A key that no node accepts: the error names the nodes, the user and the key."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    result = lab_cluster.vlaunch(
        "up", str(lab_cluster.write(_ssh(identity=str(tmp_path / "other")), "other.yaml"))
    )

    assert_error(result, "node[1-2]", "root", "other")


def test_wrong_user(lab_cluster: LabCluster, down: LabCluster) -> None:
    """A user that the nodes do not have."""
    result = lab_cluster.vlaunch(
        "up", str(lab_cluster.write(_ssh(user="nobody-here"), "other.yaml"))
    )

    assert_error(result, "node[1-2]", "nobody-here")


def test_unknown_host_key(lab_cluster: LabCluster, down: LabCluster, tmp_path: Path) -> None:
    """Unknown host keys are not trusted without the flag; with it they are remembered."""
    known_hosts = tmp_path / "known"
    known_hosts.write_text("")
    path = str(lab_cluster.write(_ssh(known_hosts=str(known_hosts)), "other.yaml"))
    command = ("exec", "-i", path, "--host")

    result = lab_cluster.vlaunch("up", path)
    untrusted = known_hosts.read_text()
    accepted = lab_cluster.vlaunch(*command, "--accept-new-host-keys", "--", "true")
    again = lab_cluster.vlaunch(*command, "--", "true")

    assert_error(result, "node[1-2]", f"is not in {known_hosts}", "--accept-new-host-keys")
    assert untrusted == ""
    assert_no_containers(lab_cluster)
    assert accepted.code == 0, accepted.output
    assert {line.split()[0] for line in known_hosts.read_text().splitlines()} == {
        host.ip for host in lab_cluster.lab.hosts[: lab_cluster.nodes]
    }
    assert again.code == 0, again.output


def test_unreachable_node(lab_cluster: LabCluster, down: LabCluster) -> None:
    """A node without network: `up` names it; `down` cleans the others, reports it, and exits with
    1.
    """
    host = lab_cluster.lab.host("node2")
    host_faults.unplug(host)
    try:
        path = str(lab_cluster.write(_ssh(connect_timeout=4), "other.yaml"))
        up = lab_cluster.vlaunch("up", path)
        removal = lab_cluster.vlaunch("down", "--yes", "-i", path)
    finally:
        host_faults.plug(host)

    assert_error(up, "node2")
    assert_error(removal, "node2")
    assert "node1: nothing is left" in removal.err
    assert_no_containers(lab_cluster)


# -- Docker and images -----------------------------------------------------------------------------


def test_docker_not_installed(lab_cluster: LabCluster, down: LabCluster) -> None:
    """No docker on one node: the error names the node, and suggests to install it."""

    def change(document: dict[str, Any]) -> None:
        document["nodes"][1]["docker"] = ["docker-is-not-here"]

    result = lab_cluster.vlaunch("up", str(lab_cluster.write(change, "other.yaml")))

    assert_error(result, "node2", "not installed")
    assert_no_containers(lab_cluster)


def test_docker_socket_refused(lab_cluster: LabCluster, down: LabCluster) -> None:
    """An SSH user outside the docker group: the error names the user and both fixes."""
    result = lab_cluster.vlaunch("up", str(lab_cluster.write(_ssh(user="ops"), "other.yaml")))

    assert_error(result, "node[1-2]", "ops", "sudo, -n, docker")
    assert_no_containers(lab_cluster)


@pytest.mark.long
def test_sudo_docker(lab_cluster: LabCluster, down: LabCluster) -> None:
    """An SSH user that may run only docker through sudo starts and removes the cluster."""

    def change(document: dict[str, Any]) -> None:
        document["ssh"]["user"] = "ops"
        document["docker"] = ["sudo", "-n", "docker"]

    path = str(lab_cluster.write(change, "ops.yaml"))
    up = lab_cluster.vlaunch("up", path)
    logs = lab_cluster.vlaunch("logs", "-i", path, "--tail", "5")
    removal = lab_cluster.vlaunch("down", "--yes", "-i", path)

    assert up.code == 0, up.output
    assert logs.code == 0, logs.output
    assert {line.split(":")[0] for line in logs.out.splitlines()} >= {"node1", "node2"}
    assert removal.code == 0, removal.output
    assert_no_containers(lab_cluster)


def test_docker_daemon_is_dead(lab_cluster: LabCluster, down: LabCluster) -> None:
    """The error names a dead Docker daemon with the command that starts it."""
    host = lab_cluster.lab.host("node1")
    host_faults.kill_dockerd(host)
    try:
        result = lab_cluster.vlaunch("up")
    finally:
        host_faults.power_on(lab_cluster.lab, host)

    assert_error(result, "node1", "systemctl start docker")
    assert_no_containers(lab_cluster)


def test_image_missing_everywhere(lab_cluster: LabCluster, down: LabCluster) -> None:
    """An image in no registry: every node is named once, with a fix."""

    def change(document: dict[str, Any]) -> None:
        document["image"] = "vllm-cpu:not-there"

    result = lab_cluster.vlaunch("up", str(lab_cluster.write(change, "other.yaml")))

    assert_error(result, "node[1-2]", "vllm-cpu:not-there")
    assert_no_containers(lab_cluster)


def test_image_missing_on_one_node(lab_cluster: LabCluster, down: LabCluster) -> None:
    """An image on one node only: the other one is named."""
    lab_cluster.docker(
        "node1",
        "tag",
        lab_cluster.docker("node1", "images", "-q", "vllm-cpu").split()[0],
        "vllm-cpu:one-node",
    )

    def change(document: dict[str, Any]) -> None:
        document["image"] = "vllm-cpu:one-node"

    try:
        result = lab_cluster.vlaunch("up", str(lab_cluster.write(change, "other.yaml")))
    finally:
        lab_cluster.docker("node1", "rmi", "vllm-cpu:one-node")

    assert_error(result, "node2", "vllm-cpu:one-node")
    assert "node1: pulling" not in result.err
    assert_no_containers(lab_cluster)


# -- What Ray needs --------------------------------------------------------------------------------


@pytest.fixture
def listener(lab_cluster: LabCluster) -> Iterator[None]:
    """A listener on Ray's port on the head."""
    from launcher.lab import hosts

    program = (
        "import socket, time; s = socket.create_server(('0.0.0.0', 6379)); print('ready',"
        " flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        hosts.enter_argv(lab_cluster.lab.host("node1"), "python3", "-c", program),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield
    lab_cluster.on("node1", "pkill", "-f", "create_server")
    process.wait(timeout=20)
    process.stdout.close()


def test_port_in_use(lab_cluster: LabCluster, down: LabCluster, listener: None) -> None:
    """A port of Ray in use is named with its purpose, before anything starts."""
    result = lab_cluster.vlaunch("up")

    assert_error(result, "node1", "6379 (Ray head)", "ss -ltnp")
    assert_no_containers(lab_cluster)


def test_declared_gpus_are_missing(lab_cluster: LabCluster, down: LabCluster) -> None:
    """An NVIDIA cluster without GPUs: the error names the nodes and a check."""

    def change(document: dict[str, Any]) -> None:
        document["accelerator"] = "nvidia"

    result = lab_cluster.vlaunch("up", str(lab_cluster.write(change, "other.yaml")))

    assert_error(result, "node[1-2]", "no NVIDIA GPU visible")
    assert_no_containers(lab_cluster)


def test_worker_cannot_reach_the_head(lab_cluster: LabCluster, down: LabCluster) -> None:
    """Packets between worker and head are dropped: the error names the worker with its evidence;
    after the repair `up` succeeds.
    """
    worker, head = lab_cluster.lab.host("node2"), lab_cluster.lab.host("node1")
    host_faults.cut(worker, head, port=6379)
    try:
        result = lab_cluster.vlaunch("up", "--join-timeout", "25")
    finally:
        host_faults.heal(worker)
    healed = lab_cluster.vlaunch("up")

    assert_error(result, "node2", f"{head.ip}:6379")
    assert healed.code == 0, healed.output


def test_head_dies_while_workers_join(lab_cluster: LabCluster, down: LabCluster) -> None:
    """The head's container is removed during `up`: the error names it; the next `up` succeeds."""
    process = lab_cluster.start("up")
    deadline = time.monotonic() + 90
    while "vlaunch-lab-node2" not in lab_cluster.containers():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    lab_cluster.docker("node1", "rm", "-f", "vlaunch-lab-node1")
    out, err = wait_for_output(process, 240)
    again = lab_cluster.vlaunch("up")

    assert_error(
        CommandResult(code=process.returncode, out=out, err=err, seconds=0),
        "node1",
        "container is gone",
    )
    assert again.code == 0, again.output


@pytest.mark.long
def test_killed_at_random_moments(lab_cluster: LabCluster, down: LabCluster) -> None:
    """The launcher is killed at random moments of `up`; the next `up` succeeds each time. The fault
    campaign has many more.
    """
    seed = random.SystemRandom().randrange(1 << 30)
    moments = random.Random(seed)
    for _ in range(2):
        process = lab_cluster.start("up")
        time.sleep(moments.uniform(0.2, 12))  # the random moment itself: no condition to await
        kill_session(process)
        result = lab_cluster.vlaunch("up")
        assert result.code == 0, f"seed {seed}: {result.output}"
        assert lab_cluster.vlaunch("down", "--yes").code == 0


# -- Serving ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def up(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """A cluster that is up."""
    lab_cluster.write()
    result = lab_cluster.vlaunch("up")
    assert result.code == 0, result.output
    yield lab_cluster
    lab_cluster.vlaunch("down", "--yes")


def test_model_missing_on_one_node(up: LabCluster) -> None:
    """A model path that is missing on one node is refused before anything starts; the error names
    the node.
    """
    home = up.lab.host("node1").root / "data/huggingface"
    shutil.copytree(home / "tiny-llama", home / "only-here")
    try:
        result = up.vlaunch("serve", "--model", "/data/huggingface/only-here")
    finally:
        shutil.rmtree(home / "only-here")

    assert_error(result, "node2", "only-here")


def test_heads_that_do_not_divide(up: LabCluster) -> None:
    """A TP that does not divide the model's attention heads is refused; the nodes' config.json has
    their number.
    """
    homes = [host.root / "data/huggingface" for host in up.lab.hosts]
    for home in homes:
        shutil.copytree(home / "tiny-llama", home / "three-heads")
        config = json.loads((home / "tiny-llama/config.json").read_text())
        config |= {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "hidden_size": 96,
        }
        (home / "three-heads/config.json").write_text(json.dumps(config))
    try:
        result = up.vlaunch(
            "serve", "--model", "/data/huggingface/three-heads", "--tp", "2", "--pp", "1"
        )
    finally:
        for home in homes:
            shutil.rmtree(home / "three-heads")

    assert_error(
        result,
        "TP 2 × PP 1 cannot run: the model's 3 attention heads cannot be divided by TP 2",
        "GPUs: node1 1, node2 1",
        "these work: `--tp 1 --pp 2`",
        codes=(2,),
    )


def test_model_that_does_not_load(up: LabCluster) -> None:
    """A model with broken weights: the error names the cause, with vLLM's reason as evidence, and
    `stop` cleans up. The network check is skipped with a warning.
    """
    homes = [host.root / "data/huggingface" for host in up.lab.hosts]
    for home in homes:
        shutil.copytree(home / "tiny-llama", home / "broken")
        for weights in (home / "broken").glob("*.safetensors"):
            weights.write_bytes(b"not weights")
    try:
        result = up.vlaunch(
            "serve", "--model", "/data/huggingface/broken", "--skip-network-check", timeout=400
        )
        stop = up.vlaunch("stop")
    finally:
        for home in homes:
            shutil.rmtree(home / "broken")

    assert_error(result)
    assert re.search(
        r"^error: the server .*: a weight file is no safetensors file.*\n"
        r".*SafetensorError: Error while deserializing header",
        result.err,
        re.MULTILINE,
    ), result.err
    assert "NETWORK CHECK SKIPPED" in result.err
    assert "Check the network" not in result.err
    assert stop.code == 0, stop.output
    assert "0.0/2.0 GPU" in up.docker("node1", "exec", "vlaunch-lab-node1", "ray", "status")
