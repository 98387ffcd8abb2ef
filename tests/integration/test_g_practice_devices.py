"""RDMA cards and AMD's GPUs on practice hosts, as far as files go: what reads them is what reads a
server's, vLLM's CPU build is what answers.
"""

from __future__ import annotations

import os

import pytest

from launcher.inventory.load import load
from launcher.lab import gpu_image
from launcher.lab.host_configs import MODEL
from tests.integration.conftest import Practice
from tests.ssh import sshd

pytestmark = [pytest.mark.lab, pytest.mark.long]


def found(practice: Practice, *words: str) -> str:
    """Let `init` look at the hosts, and return the inventory that it writes."""
    home = practice.folder
    env = sshd.make_home(
        home,
        "".join(
            f"Host {host.name}\n  HostName {host.ip}\n  User root\n  IdentityFile"
            f" {practice.lab.identity}\n  UserKnownHostsFile {practice.lab.known_hosts}\n"
            for host in practice.lab.hosts
        ),
    )
    env["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", "/root/.cache")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        path = home / "found.yaml"
        ran = practice.vlaunch("init", "node1", "node2", "--output", str(path), "--force", *words)
    assert ran.code == 0, ran.said
    return path.read_text()


def test_init_takes_the_cards_beside_the_gpus(with_cards: Practice) -> None:
    """Not the one for storage, which is as fast; and says how near each is."""
    text = found(with_cards)
    inventory = load(with_cards.folder / "found.yaml")

    assert inventory.fabric == "roce"
    assert {node.hca for node in inventory.nodes} == {("mlx5_0", "mlx5_1")}
    assert {node.env["NCCL_IB_GID_INDEX"] for node in inventory.nodes} == {"3"}
    assert "# mlx5_1: 400 Gbit/s, eth0, NUMA node 0, PIX to GPU 1" in text
    assert "# not mlx5_2: SYS to GPU 0, 1 at best, and every GPU has a nearer port" in text


def test_check_judges_the_cards(with_cards: Practice) -> None:
    """Names, links and GID tables, from the files that the kernel would have."""
    ran = with_cards.vlaunch("check", "--only", "rdma-devices,hca-names,rdma-link,gid-index")

    assert (ran.code, ran.out.count("PASS")) == (0, 4), ran.said


def test_amds_gpus_are_found_and_handed_out(with_amd: Practice) -> None:
    """By `init`; containers get the render nodes that the inventory names, and a server answers."""
    assert "accelerator: amd" in found(with_amd, "--image", gpu_image.NAME)
    with_amd.write(lambda document: [node.update(gpus=[1, 3]) for node in document["nodes"]])
    check = with_amd.vlaunch("check")
    assert (check.code, "FAIL" in check.out) == (0, False), check.out
    up = with_amd.vlaunch("up", timeout=600)
    assert up.code == 0, up.said

    name = next(each for each in with_amd.containers() if each.endswith("node1"))
    nodes = with_amd.docker("node1", "exec", name, "ls", "/dev/dri", "/dev/kfd").split()
    assert nodes == ["/dev/kfd", "/dev/dri:", "renderD129", "renderD131"]

    words = ("--model", MODEL, "--tp", "2", "--pp", "2", "--skip-network-check")
    serve = with_amd.vlaunch("serve", *words, timeout=600)
    assert serve.code == 0, serve.said
    assert "vllm-0.32.0-tp2-pp2" in serve.out
    down = with_amd.vlaunch("down", "--yes", timeout=300)
    assert down.code == 0, down.said
    assert with_amd.containers() == {}
