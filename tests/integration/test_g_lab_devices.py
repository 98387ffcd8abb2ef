"""RDMA cards and AMD GPUs on lab hosts, as files: the real code reads them, and vLLM's CPU build
answers.
"""

from __future__ import annotations

import os

import pytest

from launcher.inventory.load import load
from launcher.lab import gpu_image
from launcher.lab.host_configs import MODEL
from tests.integration.conftest import LabCluster
from tests.ssh import sshd

pytestmark = [pytest.mark.lab, pytest.mark.long]


def run_init(lab_cluster: LabCluster, *arguments: str) -> str:
    """Run `init` on the hosts, and return the inventory that it writes."""
    home = lab_cluster.folder
    env = sshd.make_home(
        home,
        "".join(
            f"Host {host.name}\n  HostName {host.ip}\n  User root\n  IdentityFile"
            f" {lab_cluster.lab.identity}\n  UserKnownHostsFile {lab_cluster.lab.known_hosts}\n"
            for host in lab_cluster.lab.hosts
        ),
    )
    env["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", "/root/.cache")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        path = home / "found.yaml"
        result = lab_cluster.vlaunch(
            "init", "node1", "node2", "--output", str(path), "--force", *arguments
        )
    assert result.code == 0, result.output
    return path.read_text()


def test_init_chooses_the_cards_next_to_the_gpus(with_cards: LabCluster) -> None:
    """Not the one for storage, which is as fast; the comments show the distances."""
    text = run_init(with_cards)
    inventory = load(with_cards.folder / "found.yaml")

    assert inventory.fabric == "roce"
    assert {node.hca for node in inventory.nodes} == {("mlx5_0", "mlx5_1")}
    assert {node.env["NCCL_IB_GID_INDEX"] for node in inventory.nodes} == {"3"}
    assert "# mlx5_1: 400 Gbit/s, eth0, NUMA node 0, PIX to GPU 1" in text
    assert "# not mlx5_2: SYS to GPU 0, 1 at best, and every GPU has a nearer port" in text


def test_check_accepts_the_cards(with_cards: LabCluster) -> None:
    """Names, links and GID tables, from files like the kernel's."""
    result = with_cards.vlaunch("check", "--only", "rdma-devices,hca-names,rdma-link,gid-index")

    assert (result.code, result.out.count("PASS")) == (0, 4), result.output


def test_init_detects_amd_gpus_and_containers_get_them(with_amd: LabCluster) -> None:
    """By `init`; containers get the render nodes of the inventory, and a server answers."""
    assert "accelerator: amd" in run_init(with_amd, "--image", gpu_image.NAME)
    with_amd.write(lambda document: [node.update(gpus=[1, 3]) for node in document["nodes"]])
    check = with_amd.vlaunch("check")
    assert (check.code, "FAIL" in check.out) == (0, False), check.out
    up = with_amd.vlaunch("up", timeout=600)
    assert up.code == 0, up.output

    name = next(container for container in with_amd.containers() if container.endswith("node1"))
    nodes = with_amd.docker("node1", "exec", name, "ls", "/dev/dri", "/dev/kfd").split()
    assert nodes == ["/dev/kfd", "/dev/dri:", "renderD129", "renderD131"]

    arguments = ("--model", MODEL, "--tp", "2", "--pp", "2", "--skip-network-check")
    serve = with_amd.vlaunch("serve", *arguments, timeout=600)
    assert serve.code == 0, serve.output
    assert "vllm-0.32.0-tp2-pp2" in serve.out
    down = with_amd.vlaunch("down", "--yes", timeout=300)
    assert down.code == 0, down.output
    assert with_amd.containers() == {}
