"""`scripts/run_cluster.sh` on two lab hosts: Ray, `vllm serve` by hand, restarts, removal.

Each test depends on the one before.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.faults import host_faults
from benchmarks.faults.traffic import send_request
from launcher.lab.host_configs import MODEL
from launcher.lab.layout import HF_HOME, Host
from tests.integration.batches import find_processes, wait_until
from tests.integration.conftest import API_KEY, HF_TOKEN, LabCluster
from tests.integration.servers import url

pytestmark = [pytest.mark.lab, pytest.mark.long]

_SCRIPT = Path(__file__).parents[2] / "scripts" / "run_cluster.sh"
_FOLDER = "/srv/run_cluster"
_SECRETS = {"HF_TOKEN": HF_TOKEN, "VLLM_API_KEY": API_KEY, "RAY_AUTH_TOKEN": "ab" * 32 + "\n"}
_INSIDE = MODEL.replace(HF_HOME, "/root/.cache/huggingface")
_ENV = ("HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind")
_SERVE = (
    "VLLM_API_KEY=$(cat /run/secrets/VLLM_API_KEY) exec vllm serve"
    f" {_INSIDE} --distributed-executor-backend ray --pipeline-parallel-size 2 --dtype float32"
    " --max-model-len 512 --max-num-seqs 8 --kv-cache-memory-bytes 67108864"
    """ --compilation-config '{"mode": 2, "backend": "eager"}' >/tmp/serve.log 2>&1"""
)


@dataclass(frozen=True)
class Cluster:
    """Two hosts with the script, its secrets and an image that contains Ray."""

    lab_cluster: LabCluster
    image: str

    def run(self, host: Host, *arguments: str) -> CompletedProcess[str]:
        """Run the script on a host; it may fail."""
        script = f"{_FOLDER}/run_cluster.sh"
        return host_faults.enter(host, "bash", script, *arguments, timeout=400)

    def start(self, host: Host) -> CompletedProcess[str]:
        """Start a host's node; the first host is the head."""
        head = self.lab_cluster.lab.hosts[0]
        role = "--head" if host == head else "--worker"
        options = ("--accelerator=cpu", "--secrets", f"{_FOLDER}/secrets", "--wait", "300")
        env = [option for variable in _ENV for option in ("-e", variable)]
        return self.run(host, *options, self.image, head.ip, role, HF_HOME, *env)

    def on_all(self, *arguments: str) -> list[CompletedProcess[str]]:
        """Run the script with the same arguments on each host."""
        return [self.run(host, *arguments) for host in self.lab_cluster.lab.hosts]

    def nodes(self) -> int:
        """Count the nodes that Ray lists."""
        status = ("exec", "vllm-ray", "timeout", "60", "ray", "status")
        return self.lab_cluster.docker("node1", *status).partition("Pending")[0].count(" node_")

    def restarts(self, host: Host) -> str:
        """Return how often Docker has restarted a host's container."""
        count = "{{.State.Status}} {{.RestartCount}}"
        return self.lab_cluster.docker(host.name, "inspect", "--format", count, "vllm-ray").strip()


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> Iterator[Cluster]:
    """Two hosts without containers; `up` has built the image."""
    lab_cluster.recreate()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    label = "label=vlaunch.image.content"
    listing = lab_cluster.docker(
        "node1", "images", "--filter", label, "--format", "{{.Repository}}:{{.Tag}}"
    )
    for host in lab_cluster.lab.hosts:
        folder = host.root / _FOLDER.lstrip("/")
        (folder / "secrets").mkdir(parents=True)
        shutil.copy(_SCRIPT, folder)
        for name, value in _SECRETS.items():
            (folder / "secrets" / name).write_text(value)
            (folder / "secrets" / name).chmod(0o600)
    nodes = Cluster(lab_cluster, listing.split()[0])
    yield nodes
    nodes.on_all("--stop")
    for host in lab_cluster.lab.hosts:
        shutil.rmtree(host.root / _FOLDER.lstrip("/"))


def test_nodes_that_start_at_once_form_a_cluster(cluster: Cluster) -> None:
    """The script ends when Ray lists the node; a worker may start before the head."""
    with ThreadPoolExecutor() as pool:
        started = list(pool.map(cluster.start, reversed(cluster.lab_cluster.lab.hosts)))

    assert [result.returncode for result in started] == [0, 0], started
    head, worker = cluster.lab_cluster.lab.hosts
    assert f"Ray lists {head.ip} {worker.ip}\n" in started[0].stdout
    assert cluster.nodes() == 2


def test_secrets_are_in_no_command_line_and_no_inspection(cluster: Cluster) -> None:
    """Ray and its workers read them from files."""
    lab_cluster = cluster.lab_cluster
    shown = lab_cluster.command_lines() + lab_cluster.docker("node1", "inspect", "vllm-ray")

    assert "ray start" in shown
    assert "/run/secrets/RAY_AUTH_TOKEN" in shown
    assert [name for name, value in _SECRETS.items() if value.strip() in shown] == []
    without = ("exec", "-e", "RAY_AUTH_MODE=disabled", "-e", "RAY_AUTH_TOKEN_PATH=", "vllm-ray")
    refused = host_faults.enter(
        lab_cluster.lab.hosts[0], "docker", *without, "timeout", "60", "ray", "status", timeout=90
    )
    assert refused.returncode != 0, refused.stdout


def test_serve_by_hand_answers(cluster: Cluster) -> None:
    """Two pipeline stages, one per node; without the API key there is no answer."""
    lab_cluster = cluster.lab_cluster
    lab_cluster.docker("node1", "exec", "--detach", "vllm-ray", "bash", "-c", _SERVE)

    try:
        wait_until(
            lambda: send_request(url(lab_cluster), API_KEY, _INSIDE, 60).ok, "an answer", 600
        )
    except AssertionError:
        pytest.fail(
            lab_cluster.docker("node1", "exec", "vllm-ray", "tail", "-50", "/tmp/serve.log")
        )
    assert not send_request(url(lab_cluster), "wrong", _INSIDE, 60).ok
    ranks = [
        list(find_processes(lab_cluster, "RayWorker", host.name)) for host in lab_cluster.lab.hosts
    ]
    assert all(ranks), ranks


@pytest.mark.parametrize("index", [1, 0], ids=["worker", "head"])
def test_a_killed_container_restarts(cluster: Cluster, index: int) -> None:
    """Ray lists both nodes again, also after the head was killed."""
    host = cluster.lab_cluster.lab.hosts[index]
    assert cluster.restarts(host) == "running 0"
    host_faults.kill_container(host, "vllm-ray")

    wait_until(lambda: cluster.restarts(host) == "running 1", "the container restarts", 60)
    wait_until(lambda: cluster.nodes() == 2, "Ray lists both nodes", 180)


def test_containers_return_after_dockerd_was_killed(cluster: Cluster) -> None:
    """`--restart always` does this; `unless-stopped` does not."""
    worker = cluster.lab_cluster.lab.hosts[1]
    host_faults.kill_dockerd(worker)
    host_faults.start_dockerd(worker)

    wait_until(lambda: cluster.restarts(worker).startswith("running"), "the container runs", 120)
    wait_until(lambda: cluster.nodes() == 2, "Ray lists both nodes", 180)


def test_stop_leaves_nothing(cluster: Cluster) -> None:
    """No container, volume, process or file on any host; a second `--stop` succeeds, too."""
    lab_cluster = cluster.lab_cluster
    stopped = cluster.on_all("--stop") + cluster.on_all("--stop")

    assert [result.returncode for result in stopped] == [0] * 4, stopped
    for host in lab_cluster.lab.hosts:
        assert lab_cluster.docker(host.name, "ps", "--all", "--quiet") == ""
        assert lab_cluster.docker(host.name, "volume", "ls", "--quiet") == ""
        assert list(find_processes(lab_cluster, "ray", host.name)) == []
        assert sorted(path.name for path in (host.root / "srv/run_cluster").iterdir()) == [
            "run_cluster.sh",
            "secrets",
        ]
        assert not (host.root / "root/.vlaunch/vllm").exists()
