"""From hosts to inventories: complete files as goldens, and the decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.hosts.discovery.discover import choose_names, discover
from launcher.hosts.discovery.inventory_writer import format_inventory
from launcher.hosts.discovery.local_assets import LocalAssets
from launcher.hosts.discovery.shape import InitOptions, ScannedHost
from launcher.inventory.load import loads
from tests import golden
from tests.hosts.discovery.hosts import (
    CASES,
    gpus,
    h100_pair,
    host,
    inventory,
    nic,
    practice,
    roce_four,
    sparks,
)

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("case", CASES)
def test_the_inventory_of_hosts_equals_the_golden_file(case: str) -> None:
    """Byte for byte, and it loads."""
    text = format_inventory(discover(CASES[case](), InitOptions(cluster=case)))

    golden.check(GOLDEN / f"{case}.yaml", text)
    assert loads(text, Path("inventory.yaml")).cluster == case


def test_infiniband_uses_the_compute_ports_only() -> None:
    """Not the slower storage port, the dead port and the Ethernet one."""
    loaded = inventory(h100_pair())

    assert loaded.fabric == "infiniband"
    assert {node.hca for node in loaded.nodes} == {
        tuple(f"mlx5_{index}" for index in (0, 3, 4, 5, 6, 9, 10, 11))
    }
    assert [(node.ip, node.interface, node.gpus) for node in loaded.nodes] == [
        ("10.0.0.11", "eno1", 8),
        ("10.0.0.12", "eno1", 8),
    ]


def test_roce_settings_that_differ_are_written_per_node() -> None:
    """Device names, the interface and the GID index, without the management port."""
    loaded = inventory(roce_four())

    assert loaded.fabric == "roce"
    assert [node.hca for node in loaded.nodes] == [("mlx5_2", "mlx5_3")] * 3 + [("mlx5_bond_0",)]
    assert [node.interface for node in loaded.nodes] == ["bond0"] * 3 + ["bond1"]
    assert [node.env["NCCL_IB_GID_INDEX"] for node in loaded.nodes] == ["3", "3", "3", "5"]
    assert [node.ip for node in loaded.nodes] == [f"10.10.0.{at}" for at in (1, 2, 3, 4)]


def test_hosts_with_an_address_are_named_by_their_own_names() -> None:
    """By the first label; duplicates get a number."""
    assert choose_names(sparks()) == ["spark-1", "spark-2"]
    twins = [replace(spark, facts=replace(spark.facts, hostname="localhost")) for spark in sparks()]
    assert choose_names(twins) == ["node1", "node2"]


def test_a_numbered_name_is_never_a_duplicate() -> None:
    """Even if a host has such a name."""
    hosts = [host("10.0.0.1", hostname="_"), host("node1"), host("10.0.0.3", hostname="_")]

    assert choose_names(hosts) == ["node2", "node1", "node3"]
    assert choose_names([hosts[0], hosts[2], hosts[1]]) == ["node2", "node3", "node1"]


def test_options_win() -> None:
    """Over all discovered values."""
    discovery = discover(
        practice(), InitOptions(cluster="mine", image="other:1", hf_home="/models")
    )

    assert (discovery.cluster, discovery.image.value, discovery.hf_home.value) == (
        "mine",
        "other:1",
        "/models",
    )


def test_settings_of_cpu_clusters() -> None:
    """Memory for the cache, threads, a small object store, and a mode for pipeline stages."""
    loaded = inventory(practice())

    assert loaded.head.env == {"VLLM_CPU_KVCACHE_SPACE": "5", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert loaded.ray.object_store == 2**30
    assert loaded.engine_args == {
        "dtype": "float32",
        "compilation_config": {"mode": 2, "backend": "eager"},
    }


def test_numa_nodes_of_processors_are_slots() -> None:
    """vLLM's own binding expects one rank per NUMA node."""
    pair = [host(f"cpu{at}", nic("eth0", f"10.0.1.{at}/24")) for at in (1, 2)]
    loaded = inventory(pair)

    assert [node.gpus for node in loaded.nodes] == [2, 2]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in loaded.head.env


def test_docker_behind_sudo_is_written() -> None:
    """For all if most need it, else per node."""
    behind = ("sudo", "-n", "docker")
    pair = h100_pair()
    all_behind = inventory([replace(scanned, docker=behind) for scanned in pair])
    first_behind = inventory([pair[0], replace(pair[1], docker=behind)])

    assert [node.docker for node in all_behind.nodes] == [behind, behind]
    assert [node.docker for node in first_behind.nodes] == [("docker",), behind]


def test_a_memory_share_is_written_where_gpus_share_the_hosts_memory() -> None:
    """vLLM's own share leaves such a host too little; other hosts keep it."""
    assert inventory(sparks()).engine_args == {"gpu_memory_utilization": 0.7}
    assert inventory(h100_pair()).serve.args == ()


def test_an_imex_channel_of_all_hosts_is_exposed_to_the_containers() -> None:
    """As a device; if one host has none, containers could not start."""

    def trays(*channels: tuple[str, ...] | None) -> list[ScannedHost]:
        return [
            host(
                f"tray{at}",
                nic("eth0", f"10.0.6.{at}/24"),
                gpus=gpus(4, "NVIDIA GB200", 189471),
                survey={"imex": channel},
            )
            for at, channel in enumerate(channels, start=1)
        ]

    device = "/dev/nvidia-caps-imex-channels/channel0"
    assert inventory(trays(("channel0",), ("channel0", "channel1"))).devices == (device,)
    assert inventory(trays(("channel0",), ())).devices == ()
    assert inventory(trays(("channel0",), None)).devices == ()
    assert inventory(trays(("channel0",))).devices == ()
    cpus = InitOptions(accelerator="cpu")
    assert inventory(trays(("channel0",), ("channel0",)), cpus).devices == ()


def test_settings_of_amd_clusters() -> None:
    """Only on AMD GPUs."""
    hosts = [
        host(f"mi{at}", nic("eth0", f"10.0.4.{at}/24"), assets=LocalAssets(amd_gpus=8))
        for at in (1, 2)
    ]

    assert inventory(hosts).cap_add == ("SYS_PTRACE",)
    assert inventory(h100_pair()).cap_add == ()
