"""What goes wrong on real clusters, made to happen: one clear error each, and nothing that the next
`up` does not put right.
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
from tests.integration.conftest import Practice, Ran, ended, kill

pytestmark = pytest.mark.lab


def refused(ran: Ran, *words: str, code: int = 1) -> None:
    """Check the form of an error: its exit code, what it names, a hint, and no traceback."""
    assert ran.code == code, ran.said
    assert "Traceback" not in ran.said
    assert ran.err.count("error: ") == 1
    assert "hint: " in ran.err
    for word in words:
        assert word in ran.err, ran.err


def nothing_started(practice: Practice) -> None:
    """Check that no container was made anywhere."""
    assert practice.containers() == {}


# -- The inventory: nothing is touched -------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "word"),
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
def test_broken_inventory(practice: Practice, content: str, word: str) -> None:
    """An inventory that cannot be used is refused with exit code 2 before any node is asked
    anything.
    """
    path = practice.folder / "broken.yaml"
    path.write_text(content)

    ran = practice.vlaunch("up", str(path))

    assert ran.code == 2, ran.said
    assert "Traceback" not in ran.said
    assert "Connect" not in ran.err
    assert word in ran.err


def test_inventory_that_is_a_directory(practice: Practice) -> None:
    """A directory is not an inventory."""
    ran = practice.vlaunch("up", str(practice.folder))

    assert ran.code == 2, ran.said
    assert "directory" in ran.err


# -- Reaching nodes --------------------------------------------------------------------------------


def _ssh(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["ssh"] |= values

    return change


def test_wrong_key(practice: Practice, down: Practice, tmp_path: Path) -> None:
    """A key that no node knows: the error names the nodes, the user and the key."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    ran = practice.vlaunch(
        "up", str(practice.write(_ssh(identity=str(tmp_path / "other")), "other.yaml"))
    )

    refused(ran, "node[1-2]", "root", "other")


def test_wrong_user(practice: Practice, down: Practice) -> None:
    """A user that the nodes do not have."""
    ran = practice.vlaunch("up", str(practice.write(_ssh(user="nobody-here"), "other.yaml")))

    refused(ran, "node[1-2]", "nobody-here")


def test_unknown_host_key(practice: Practice, down: Practice, tmp_path: Path) -> None:
    """Hosts whose keys nobody has confirmed are not trusted, unless it is said explicitly; then the
    keys are remembered.
    """
    known = tmp_path / "known"
    known.write_text("")
    path = str(practice.write(_ssh(known_hosts=str(known)), "other.yaml"))
    there = ("exec", "-i", path, "--host")

    ran = practice.vlaunch("up", path)
    untrusted = known.read_text()
    accepted = practice.vlaunch(*there, "--accept-new-host-keys", "--", "true")
    again = practice.vlaunch(*there, "--", "true")

    refused(ran, "node[1-2]", f"is not in {known}", "--accept-new-host-keys")
    assert untrusted == ""
    nothing_started(practice)
    assert accepted.code == 0, accepted.said
    assert {line.split()[0] for line in known.read_text().splitlines()} == {
        host.ip for host in practice.lab.hosts[: practice.nodes]
    }
    assert again.code == 0, again.said


def test_unreachable_node(practice: Practice, down: Practice) -> None:
    """A node without network: `up` names it; `down` cleans the others, says so, and exits with
    1.
    """
    host = practice.lab.host("node2")
    host_faults.unplug(host)
    try:
        path = str(practice.write(_ssh(connect_timeout=4), "other.yaml"))
        up = practice.vlaunch("up", path)
        down_ = practice.vlaunch("down", "--yes", path)
    finally:
        host_faults.plug(host)

    refused(up, "node2")
    refused(down_, "node2")
    assert "node1: nothing is left" in down_.err
    nothing_started(practice)


# -- Docker and images -----------------------------------------------------------------------------


def test_docker_not_installed(practice: Practice, down: Practice) -> None:
    """No docker on one node: the error names the node and says to install it."""

    def change(document: dict[str, Any]) -> None:
        document["nodes"][1]["docker"] = ["docker-is-not-here"]

    ran = practice.vlaunch("up", str(practice.write(change, "other.yaml")))

    refused(ran, "node2", "not installed")
    nothing_started(practice)


def test_docker_socket_refused(practice: Practice, down: Practice) -> None:
    """A login outside the docker group: the error names the user and both ways out; one of them
    works.
    """
    ran = practice.vlaunch("up", str(practice.write(_ssh(user="ops"), "other.yaml")))

    refused(ran, "node[1-2]", "ops", "sudo, -n, docker")
    nothing_started(practice)


def test_sudo_docker(practice: Practice, down: Practice) -> None:
    """A login that may run only docker through sudo brings the cluster up and down."""

    def change(document: dict[str, Any]) -> None:
        document["ssh"]["user"] = "ops"
        document["docker"] = ["sudo", "-n", "docker"]

    path = str(practice.write(change, "ops.yaml"))
    up = practice.vlaunch("up", path)
    logs = practice.vlaunch("logs", "-i", path, "--tail", "5")
    down_ = practice.vlaunch("down", "--yes", path)

    assert up.code == 0, up.said
    assert logs.code == 0, logs.said
    assert {line.split(":")[0] for line in logs.out.splitlines()} >= {"node1", "node2"}
    assert down_.code == 0, down_.said
    nothing_started(practice)


def test_docker_daemon_is_dead(practice: Practice, down: Practice) -> None:
    """A dead Docker daemon is named with the command that starts it."""
    host = practice.lab.host("node1")
    host_faults.kill_dockerd(host)
    try:
        ran = practice.vlaunch("up")
    finally:
        host_faults.power_on(practice.lab, host)

    refused(ran, "node1", "systemctl start docker")
    nothing_started(practice)


def test_image_missing_everywhere(practice: Practice, down: Practice) -> None:
    """An image that no registry gives: every node is named once, with what to do."""

    def change(document: dict[str, Any]) -> None:
        document["image"] = "vllm-cpu:not-there"

    ran = practice.vlaunch("up", str(practice.write(change, "other.yaml")))

    refused(ran, "node[1-2]", "vllm-cpu:not-there")
    nothing_started(practice)


def test_image_missing_on_one_node(practice: Practice, down: Practice) -> None:
    """An image that is on one node only: the other one is named."""
    practice.docker(
        "node1",
        "tag",
        practice.docker("node1", "images", "-q", "vllm-cpu").split()[0],
        "vllm-cpu:one-node",
    )

    def change(document: dict[str, Any]) -> None:
        document["image"] = "vllm-cpu:one-node"

    try:
        ran = practice.vlaunch("up", str(practice.write(change, "other.yaml")))
    finally:
        practice.docker("node1", "rmi", "vllm-cpu:one-node")

    refused(ran, "node2", "vllm-cpu:one-node")
    assert "node1: pulling" not in ran.err
    nothing_started(practice)


# -- What Ray needs --------------------------------------------------------------------------------


@pytest.fixture
def listener(practice: Practice) -> Iterator[None]:
    """Something else holds Ray's port on the head."""
    from launcher.lab import hosts

    program = (
        "import socket, time; s = socket.create_server(('0.0.0.0', 6379)); print('ready',"
        " flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        hosts.enter_argv(practice.lab.host("node1"), "python3", "-c", program),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield
    practice.on("node1", "pkill", "-f", "create_server")
    process.wait(timeout=20)
    process.stdout.close()


def test_port_taken(practice: Practice, down: Practice, listener: None) -> None:
    """A taken Ray port is named with what it is for, before anything is started."""
    ran = practice.vlaunch("up")

    refused(ran, "node1", "6379 (Ray head)", "ss -ltnp")
    nothing_started(practice)


def test_declared_gpus_are_not_there(practice: Practice, down: Practice) -> None:
    """An NVIDIA cluster without GPUs: the nodes and what to check are named."""

    def change(document: dict[str, Any]) -> None:
        document["accelerator"] = "nvidia"

    ran = practice.vlaunch("up", str(practice.write(change, "other.yaml")))

    refused(ran, "node[1-2]", "no NVIDIA GPU visible")
    nothing_started(practice)


def test_worker_cannot_reach_the_head(practice: Practice, down: Practice) -> None:
    """Packets between worker and head are dropped: the worker is named, with its own words; healed,
    `up` succeeds.
    """
    worker, head = practice.lab.host("node2"), practice.lab.host("node1")
    host_faults.cut(worker, head, port=6379)
    try:
        ran = practice.vlaunch("up", "--join-timeout", "25")
    finally:
        host_faults.heal(worker)
    healed = practice.vlaunch("up")

    refused(ran, "node2", f"{head.ip}:6379")
    assert healed.code == 0, healed.said


def test_head_dies_while_workers_join(practice: Practice, down: Practice) -> None:
    """The head's container is removed under the launcher: it is named; the next `up` succeeds."""
    process = practice.start("up")
    deadline = time.monotonic() + 90
    while "vlaunch-lab-node2" not in practice.containers():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    practice.docker("node1", "rm", "-f", "vlaunch-lab-node1")
    out, err = ended(process, 240)
    again = practice.vlaunch("up")

    refused(Ran(code=process.returncode, out=out, err=err, seconds=0), "node1", "container is gone")
    assert again.code == 0, again.said


def test_killed_at_random_moments(practice: Practice, down: Practice) -> None:
    """The launcher is killed at random moments of `up`; the next `up` succeeds each time. The fault
    campaign has many more.
    """
    seed = random.SystemRandom().randrange(1 << 30)
    moments = random.Random(seed)
    for _ in range(2):
        process = practice.start("up")
        time.sleep(moments.uniform(0.2, 12))  # the random moment itself: there is nothing to await
        kill(process)
        ran = practice.vlaunch("up")
        assert ran.code == 0, f"seed {seed}: {ran.said}"
        assert practice.vlaunch("down", "--yes").code == 0


# -- Serving ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def up(practice: Practice) -> Iterator[Practice]:
    """A cluster that is up."""
    practice.write()
    ran = practice.vlaunch("up")
    assert ran.code == 0, ran.said
    yield practice
    practice.vlaunch("down", "--yes")


def test_model_missing_on_one_node(up: Practice) -> None:
    """A model path that one node lacks is refused before anything is started, with that node
    named.
    """
    home = up.lab.host("node1").root / "data/huggingface"
    shutil.copytree(home / "tiny-llama", home / "only-here")
    try:
        ran = up.vlaunch("serve", "--model", "/data/huggingface/only-here")
    finally:
        shutil.rmtree(home / "only-here")

    refused(ran, "node2", "only-here", code=1)


def test_heads_that_do_not_divide(up: Practice) -> None:
    """A TP that the model's attention heads cannot be split into is refused; the nodes' config.json
    says how many there are.
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
        ran = up.vlaunch(
            "serve", "--model", "/data/huggingface/three-heads", "--tp", "2", "--pp", "1"
        )
    finally:
        for home in homes:
            shutil.rmtree(home / "three-heads")

    refused(
        ran,
        "TP 2 × PP 1 cannot run: the model's 3 attention heads cannot be divided by TP 2",
        "GPUs: node1 1, node2 1",
        "these work: `--tp 1 --pp 2`",
        code=2,
    )


def test_model_that_does_not_load(up: Practice) -> None:
    """A model whose weights are broken: vLLM's reason is shown as soon as it is printed, and `stop`
    cleans up.

    No node is named, for the weights are broken on both. The network check is skipped, which is
    said loudly, and nothing is measured.
    """
    homes = [host.root / "data/huggingface" for host in up.lab.hosts]
    for home in homes:
        shutil.copytree(home / "tiny-llama", home / "broken")
        for weights in (home / "broken").glob("*.safetensors"):
            weights.write_bytes(b"not weights")
    try:
        ran = up.vlaunch(
            "serve", "--model", "/data/huggingface/broken", "--skip-network-check", timeout=400
        )
        stop = up.vlaunch("stop")
    finally:
        for home in homes:
            shutil.rmtree(home / "broken")

    refused(ran)
    assert re.search(
        r"^error: the server .*SafetensorError: Error while deserializing header",
        ran.err,
        re.MULTILINE,
    ), ran.err
    assert "NETWORK CHECK SKIPPED" in ran.err
    assert "Check the network" not in ran.err
    assert stop.code == 0, stop.said
    assert "0.0/2.0 GPU" in up.docker("node1", "exec", "vlaunch-lab-node1", "ray", "status")
