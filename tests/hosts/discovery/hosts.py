"""Simulated hosts as scan results, for common kinds of machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.core.domain import Inventory
from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.inventory_writer import format_inventory
from launcher.hosts.discovery.local_assets import Home, LocalAssets
from launcher.hosts.discovery.shape import InitOptions, ScannedHost
from launcher.inventory.load import loads
from launcher.tools.host import Address, Gpu, HostFacts
from launcher.tools.host.survey import Gid, GpuState, Nic, RdmaDevice, RdmaPort, Survey

GIB = 2**30
BRIDGE = Nic(name="docker0", up=True, mtu=1500, addresses=("172.17.0.1/16",))
LOOPBACK = Nic(name="lo", up=True, mtu=65536, addresses=("127.0.0.1/8", "::1/128"))


def nic(
    name: str,
    address: str = "",
    speed: int | None = 25_000,
    *,
    physical: bool = True,
    up: bool = True,
) -> Nic:
    """Return a network card with one address."""
    return Nic(
        name=name,
        up=up,
        mtu=1500,
        speed=speed,
        physical=physical,
        addresses=(address, "fe80::1/64") if address else (),
    )


def infiniband(
    name: str, *, state: str = "ACTIVE", rate: float = 400.0, netdev: str = ""
) -> RdmaDevice:
    """Return an InfiniBand device with one port."""
    gids = (Gid(index=0, value="fe80:0000:0000:0000:946d:ae03:0011:2233"),)
    port = RdmaPort(number=1, state=state, rate=rate, link_layer="InfiniBand", gids=gids)
    return RdmaDevice(name=name, ports=(port,), model="MT4129", netdevs=(netdev,) if netdev else ())


def roce(
    name: str,
    netdev: str,
    *,
    index: int = 3,
    state: str = "ACTIVE",
    rate: float = 100.0,
    v2: bool = True,
) -> RdmaDevice:
    """Return a RoCE device with one port; `index` is the position of RoCE v2 over IPv4 in its GID
    table.
    """
    mapped = "0000:0000:0000:0000:0000:ffff:0a0a:0001"
    gids = [
        Gid(
            index=0,
            value="fe80:0000:0000:0000:0eee:0001:0002:0003",
            kind="IB/RoCE v1",
            netdev=netdev,
        )
    ]
    if v2:
        gids += [Gid(index=index - 1, value=mapped, kind="IB/RoCE v1", netdev=netdev)]
        gids += [Gid(index=index, value=mapped, kind="RoCE v2", netdev=netdev)]
    port = RdmaPort(number=1, state=state, rate=rate, link_layer="Ethernet", gids=tuple(gids))
    return RdmaDevice(name=name, ports=(port,), model="MT4125", netdevs=(netdev,))


def gpus(
    count: int, name: str = "NVIDIA H100 80GB HBM3", memory: int = 81559, driver: str = "580.95.05"
) -> tuple[Gpu, ...]:
    """Return the GPUs of a host."""
    return tuple(
        Gpu(
            index=at,
            name=name,
            memory_total=memory,
            memory_used=0,
            driver=driver,
            uuid=f"GPU-{at}",
        )
        for at in range(count)
    )


def host(
    name: str,
    *nics: Nic,
    rdma: tuple[RdmaDevice, ...] = (),
    gpus: tuple[Gpu, ...] = (),
    default: str = "",
    assets: LocalAssets | None = None,
    hostname: str = "",
    survey: dict[str, Any] | None = None,
    **facts: Any,
) -> ScannedHost:
    """Return a host with these interfaces, and Docker."""
    surveyed = Survey(
        **{
            "system": "Ubuntu 24.04.3 LTS",
            "kernel": "6.8.0-85-generic",
            "cpus": 192,
            "numa_nodes": 2,
            "memory": 2048 * GIB,
            "shm": 1024 * GIB,
            "default_nic": default or (nics[0].name if nics else ""),
            "nics": (LOOPBACK, *nics),
            "rdma": rdma,
            **(survey or {}),
        }
    )
    addresses = tuple(
        Address(
            interface=interface.name,
            ip=cidr.split("/")[0],
            prefix=int(cidr.split("/")[1]),
            up=interface.up,
        )
        for interface in surveyed.nics or ()
        for cidr in interface.addresses
        if "/" in cidr
    )
    probe_facts: dict[str, Any] = {
        "hostname": hostname or name,
        "user": "ops",
        "addresses": addresses,
        "docker_version": "28.5.1",
        "infiniband": ("uverbs0",) if rdma else (),
        "gpus": gpus or None,
        "disk_free": 3500 * GIB,
        **facts,
    }
    local_assets = assets or LocalAssets()
    return ScannedHost(
        host=name, name=name, facts=HostFacts(**probe_facts, survey=surveyed), assets=local_assets
    )


def h100_pair() -> list[ScannedHost]:
    """Return two servers with 8 × H100: 8 compute ports, two for storage, one of them as fast, a
    port without a cable and an Ethernet one.
    """

    def make_host(at: int) -> ScannedHost:
        compute = (0, 3, 4, 5, 6, 9, 10, 11)
        devices = [
            replace(infiniband(f"mlx5_{n}", netdev=f"ibp{n}"), numa=at // 4)
            for at, n in enumerate(compute)
        ]
        near = [
            {f"mlx5_{n}": "PIX" if n == own else "NODE" for n in compute} | {"mlx5_2": "SYS"}
            for own in compute
        ]
        devices += [
            infiniband("mlx5_2"),
            infiniband("mlx5_7", rate=200.0),
            infiniband("mlx5_8", state="DOWN", rate=10.0),
        ]
        devices += [roce("mlx5_1", "eno1", rate=25.0)]
        home = Home(
            path="/data/huggingface", models=("Qwen/Qwen3-235B-A22B",), free=(3500 + at) * GIB
        )
        return host(
            f"gpu0{at}",
            nic("eno1", f"10.0.0.1{at}/24"),
            BRIDGE,
            nic("ens7", f"10.9.{at}.5/24", 10_000),
            nic("ens8", up=False),
            rdma=tuple(devices),
            gpus=gpus(8),
            assets=LocalAssets(homes=(home,)),
            survey={
                "gpus": tuple(
                    GpuState(index=at, affinity=affinity) for at, affinity in enumerate(near)
                )
            },
        )

    return [make_host(1), make_host(2)]


def roce_four() -> list[ScannedHost]:
    """Return four servers on RoCE; the last has other devices, and its GID table another order."""

    def make_host(at: int) -> ScannedHost:
        last = at == 4
        names = ("mlx5_bond_0",) if last else ("mlx5_2", "mlx5_3")
        fast = "bond1" if last else "bond0"
        devices = [roce(name, fast, index=5 if last else 3, rate=200.0) for name in names]
        devices.append(roce("mlx5_0", "eno1", rate=25.0))
        return host(
            f"node{at}",
            nic("eno1", f"192.168.7.{at}/24"),
            nic(fast, f"10.10.0.{at}/16", 200_000, physical=False),
            rdma=tuple(devices),
            gpus=gpus(8, "NVIDIA A100-SXM4-80GB", 81920, "550.127.08"),
            assets=LocalAssets(
                images={
                    "vllm/vllm-openai:v0.31.0": f"{at == 1}",
                    "registry.example/vllm-rocm:1": "a",
                }
            ),
        )

    return [make_host(at) for at in range(1, 5)]


def sparks() -> list[ScannedHost]:
    """Return two DGX Spark joined by one cable, in another port on the second."""

    def make_host(at: int) -> ScannedHost:
        half = at - 1
        first, second = f"enp1s0f{half}np{half}", f"enP2p1s0f{half}np{half}"
        other = 1 - half
        devices = (
            roce(f"rocep1s0f{half}", first, rate=200.0),
            roce(f"roceP2p1s0f{half}", second, rate=200.0),
            roce(
                f"rocep1s0f{other}", f"enp1s0f{other}np{other}", state="DOWN", rate=40.0, v2=False
            ),
            roce(
                f"roceP2p1s0f{other}",
                f"enP2p1s0f{other}np{other}",
                state="DOWN",
                rate=40.0,
                v2=False,
            ),
        )
        home = Home(
            path="/home/nvidia/.cache/huggingface",
            models=("openai/gpt-oss-120b",) if at == 1 else (),
            free=900 * GIB,
        )
        return host(
            f"192.168.1.{50 + at}",
            nic("enP7s7", f"192.168.1.{50 + at}/24", 10_000),
            BRIDGE,
            nic(first, f"192.168.100.{9 + at}/24", 200_000),
            nic(second, f"192.168.101.{9 + at}/24", 200_000),
            rdma=devices,
            gpus=gpus(1, "NVIDIA GB10", 0, "580.95.05"),
            hostname=f"spark-{at}.local",
            assets=LocalAssets(homes=(home,)),
            survey={"cpus": 20, "numa_nodes": 1, "memory": 120 * GIB, "shm": 60 * GIB},
        )

    return [make_host(1), make_host(2)]


def practice() -> list[ScannedHost]:
    """Return three hosts without GPUs on one bridge, with the image, as in the lab."""
    images = {
        "vllm-cpu:0.32.0": "same",
        "vllm-cpu:0.31.0": "same",
        "vllm/vllm-openai:v0.32.0": "gpu",
    }
    assets = LocalAssets(homes=(Home(path="/data/huggingface", free=20 * GIB),), images=images)
    created = {
        "cpus": 2,
        "numa_nodes": 1,
        "memory": 23 * GIB,
        "shm": 64 * 2**20,
        "system": "Debian GNU/Linux 12",
    }
    return [
        host(
            f"node{at}",
            nic("eth0", f"10.77.0.1{at}/24", 10_000, physical=False),
            default="-",
            assets=assets,
            survey=created,
        )
        for at in (1, 2, 3)
    ]


def unequal() -> list[ScannedHost]:
    """Return four servers on Ethernet: one has lost a GPU, and one has no Docker."""
    undocked: dict[str, Any] = {
        "docker_version": None,
        "part_errors": {"docker": "sh: docker: not found"},
    }

    def make_host(at: int) -> ScannedHost:
        other = nic("eth1", f"192.168.{122 if at > 2 else 9}.1/24", 1000)
        lost = gpus(7 if at == 3 else 8)
        return host(
            f"gpu{at:02}",
            nic("eth0", f"10.1.0.{at}/24"),
            other,
            gpus=lost,
            **(undocked if at == 4 else {}),
        )

    return [make_host(at) for at in range(1, 5)]


CASES = {
    "h100-infiniband": h100_pair,
    "roce": roce_four,
    "dgx-spark": sparks,
    "cpu-practice": practice,
    "unequal": unequal,
}


def inventory(hosts: list[ScannedHost], wishes: InitOptions | None = None) -> Inventory:
    """Return the inventory loaded from the written file."""
    return loads(format_inventory(discover(hosts, wishes or InitOptions())), Path("inventory.yaml"))
