"""From hosts to inventories: whole ones, kept as files, and the choices that make them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.discovery.discover import discover, names
from launcher.discovery.local_assets import Home, LocalAssets
from launcher.discovery.shape import Probed, Wishes
from launcher.discovery.written import write
from launcher.errors import RequestError
from launcher.inventory.load import loads
from launcher.model import Inventory
from tests import golden
from tests.discovery.hosts import (
    CASES,
    gpus,
    h100_pair,
    host,
    nic,
    practice,
    roce_four,
    sparks,
    unequal,
)

GOLDEN = Path(__file__).parent / "golden"


def inventory(hosts: list[Probed], wishes: Wishes | None = None) -> Inventory:
    """What the written file says when it is read."""
    return loads(write(discover(hosts, wishes or Wishes())), Path("inventory.yaml"))


@pytest.mark.parametrize("case", CASES)
def test_the_inventory_of_hosts_is_as_kept(case: str) -> None:
    """Word for word, and the loader takes it."""
    text = write(discover(CASES[case](), Wishes(cluster=case)))

    golden.check(GOLDEN / f"{case}.yaml", text)
    assert loads(text, Path("inventory.yaml")).cluster == case


def test_infiniband_takes_the_compute_ports_alone() -> None:
    """Not the slower storage port, the dead port and the Ethernet one."""
    found = inventory(h100_pair())

    assert found.fabric == "infiniband"
    assert {node.hca for node in found.nodes} == {
        tuple(f"mlx5_{index}" for index in (0, 3, 4, 5, 6, 9, 10, 11))
    }
    assert [(node.ip, node.interface, node.gpus) for node in found.nodes] == [
        ("10.0.0.11", "eno1", 8),
        ("10.0.0.12", "eno1", 8),
    ]


def test_roce_says_on_each_node_what_differs_there() -> None:
    """Device names, the interface and the GID index; the management port is not among the
    devices.
    """
    found = inventory(roce_four())

    assert found.fabric == "roce"
    assert [node.hca for node in found.nodes] == [("mlx5_2", "mlx5_3")] * 3 + [("mlx5_bond_0",)]
    assert [node.interface for node in found.nodes] == ["bond0"] * 3 + ["bond1"]
    assert [node.env["NCCL_IB_GID_INDEX"] for node in found.nodes] == ["3", "3", "3", "5"]
    assert [node.ip for node in found.nodes] == [f"10.10.0.{at}" for at in (1, 2, 3, 4)]


def test_an_old_driver_gets_the_image_for_cuda_12() -> None:
    """And the file says why."""
    text = write(discover(roce_four(), Wishes()))

    assert "image: vllm/vllm-openai:v0.32.0-cu129\n" in text
    assert "because driver 550.127.08 is" in text


def test_hosts_given_by_address_are_named_by_their_own_names() -> None:
    """The first label of it; where two have the same, by number."""
    assert names(sparks()) == ["spark-1", "spark-2"]
    twins = [replace(each, facts=replace(each.facts, hostname="localhost")) for each in sparks()]
    assert names(twins) == ["node1", "node2"]


def test_a_number_never_repeats_a_name_that_is_taken() -> None:
    """Even when somebody's host is called so."""
    hosts = [host("10.0.0.1", hostname="_"), host("node1"), host("10.0.0.3", hostname="_")]

    assert names(hosts) == ["node2", "node1", "node3"]
    assert names([hosts[0], hosts[2], hosts[1]]) == ["node2", "node3", "node1"]


def test_an_image_that_all_hosts_have_is_used() -> None:
    """The newest that is the same on each and made for what the hosts have."""
    found = discover(practice(), Wishes())

    assert found.image.value == "vllm-cpu:0.32.0"


@pytest.mark.parametrize(
    "images_by_host",
    [
        [{"my/vllm:1": "a"}, {"my/vllm:1": "b"}],  # another image under the same name
        [{"my/vllm:1": "a"}, {}],  # on one host only
        [{"my/vllm-cpu:1": "a"}, {"my/vllm-cpu:1": "a"}],  # for something else
    ],
)
def test_an_image_that_is_not_the_same_everywhere_is_not_used(
    images_by_host: list[dict[str, str]],
) -> None:
    """vLLM's own is."""
    pair = [
        replace(each, assets=LocalAssets(images=images))
        for each, images in zip(h100_pair(), images_by_host, strict=True)
    ]

    assert discover(pair, Wishes()).image.value == "vllm/vllm-openai:v0.32.0"


def test_wishes_win() -> None:
    """Over everything that was found."""
    found = discover(practice(), Wishes(cluster="mine", image="other:1", hf_home="/models"))

    assert (found.cluster, found.image.value, found.hf_home.value) == ("mine", "other:1", "/models")


def test_a_cache_with_models_on_all_hosts_is_the_home() -> None:
    """Where only some have it, the default is, and the file tells who has what."""
    cache = Home(path="/home/ops/.cache/huggingface", models=("Qwen/Qwen3-8B",), free=2**40)
    both = [replace(each, assets=LocalAssets(homes=(cache,))) for each in h100_pair()]

    assert discover(both, Wishes()).hf_home.value == cache.path
    one = [both[0], replace(both[1], assets=LocalAssets())]
    left = discover(one, Wishes()).hf_home
    assert left.value == "/data/huggingface"
    assert "in /home/ops/.cache/huggingface: Qwen/Qwen3-8B (on gpu01)" in left.why


def test_amd_gpus_are_found_by_their_driver() -> None:
    """With the image that vLLM makes for them."""
    pair = [
        host(f"mi{at}", nic("eth0", f"10.0.4.{at}/24"), assets=LocalAssets(amd_gpus=8))
        for at in (1, 2)
    ]
    found = inventory(pair)

    assert (found.accelerator, found.gpus, found.image) == (
        "amd",
        16,
        "vllm/vllm-openai-rocm:v0.32.0",
    )


def test_a_host_without_gpus_among_others_is_an_error_that_names_it() -> None:
    """Not a cluster of processors."""
    broken = host(
        "gpu02", nic("eth0", "10.0.0.2/24"), said={"gpus": "NVIDIA-SMI has failed because …"}
    )
    pair = [host("gpu01", nic("eth0", "10.0.0.1/24"), gpus=gpus(8)), broken]

    with pytest.raises(RequestError) as raised:
        discover(pair, Wishes())
    assert raised.value.message == "gpu02: no NVIDIA GPU found, while gpu01 has some"
    assert "NVIDIA-SMI has failed" in raised.value.evidence
    assert inventory(pair, Wishes(accelerator="cpu")).accelerator == "cpu"


def test_a_host_that_says_nothing_of_gpus_has_none() -> None:
    """Also where the answer is empty."""
    silent = host("gpu02", nic("eth0", "10.0.0.2/24"), said={"gpus": "\n"})

    with pytest.raises(RequestError) as raised:
        discover([host("gpu01", nic("eth0", "10.0.0.1/24"), gpus=gpus(8)), silent], Wishes())
    assert raised.value.evidence == "gpu02: none found"


def test_processors_get_what_a_server_on_them_needs() -> None:
    """Memory for the cache, threads, a small object store, and a mode in which stages work."""
    found = inventory(practice())

    assert found.head.env == {"VLLM_CPU_KVCACHE_SPACE": "5", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert found.ray.object_store == 2**30
    assert found.serve.args == ("--dtype", "float32", "-cc.mode=2", "-cc.backend=eager")


def test_numa_nodes_of_processors_are_slots() -> None:
    """One rank a NUMA node is what vLLM's own binding wants, so it is left to it."""
    pair = [host(f"cpu{at}", nic("eth0", f"10.0.1.{at}/24")) for at in (1, 2)]
    found = inventory(pair)

    assert [node.gpus for node in found.nodes] == [2, 2]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found.head.env


def test_differences_are_told_folded() -> None:
    """What most are once, what differs on its own line."""
    found = discover(unequal(), Wishes())

    assert found.summary[0].startswith(
        "gpu[01-02]: 8 × NVIDIA H100 80GB HBM3, 80 GiB, driver 580.95.05"
    )
    assert found.summary[1] == "gpu03: differs: 7 × NVIDIA H100 80GB HBM3, 80 GiB"
    assert found.summary[2] == "gpu04: differs: no Docker"
    assert any(
        "gpu04: Docker does not answer: sh: docker: not found" in each for each in found.warnings
    )
    assert any(
        "different numbers of GPUs (gpu01 8, gpu02 8, gpu03 7, gpu04 8)" in each
        for each in found.warnings
    )


def test_docker_behind_sudo_is_written() -> None:
    """For all when most need it, else for the one that does."""
    behind = ("sudo", "-n", "docker")
    pair = h100_pair()
    all_behind = inventory([replace(each, docker=behind) for each in pair])
    one_behind = inventory([pair[0], replace(pair[1], docker=behind)])

    assert [node.docker for node in all_behind.nodes] == [behind, behind]
    assert [node.docker for node in one_behind.nodes] == [("docker",), behind]
