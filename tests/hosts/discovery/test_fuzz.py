"""Any answers of hosts: an inventory that loads, or one of our errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import RequestError
from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.inventory_writer import format_inventory
from launcher.hosts.discovery.local_assets import Home, LocalAssets
from launcher.hosts.discovery.shape import InitOptions, ScannedHost
from launcher.inventory.load import loads
from launcher.tools.host.survey import Nic, RdmaDevice
from tests.hosts.discovery.hosts import gpus, host, infiniband, roce

ADDRESSES = st.sampled_from(
    [
        "10.0.0.1/24",
        "10.0.0.2/24",
        "10.0.0.3/8",
        "10.1.0.1/24",
        "10.1.0.2/24",
        "169.254.3.4/16",
        "172.17.0.1/16",
        "10.0.0.9/32",
        "127.0.0.1/8",
        "fe80::1/64",
        "0.0.0.0/0",
        "nonsense",
    ]
)
NICS = st.builds(
    Nic,
    name=st.sampled_from(["eth0", "eth1", "docker0", "bond0", "lo", "ib0", "br-0123456789ab"]),
    up=st.booleans(),
    mtu=st.sampled_from([1500, 9000]),
    speed=st.sampled_from([None, 0, 1000, 400_000]),
    physical=st.booleans(),
    addresses=st.lists(ADDRESSES, max_size=2).map(tuple),
)
DEVICES: st.SearchStrategy[RdmaDevice] = st.one_of(
    st.builds(
        infiniband,
        st.sampled_from(["mlx5_0", "mlx5_1"]),
        state=st.sampled_from(["ACTIVE", "DOWN", ""]),
    ),
    st.builds(
        roce,
        st.sampled_from(["mlx5_2", "mlx5_3"]),
        st.sampled_from(["eth0", "eth1"]),
        index=st.integers(1, 5),
        v2=st.booleans(),
    ),
)
TEXTS = st.text(max_size=12)


@st.composite
def clusters(draw: st.DrawFn) -> list[ScannedHost]:
    """One to three arbitrary hosts."""
    hosts = []
    for at in range(draw(st.integers(1, 3))):
        nics = draw(st.lists(NICS, max_size=3, unique_by=lambda item: item.name))
        devices = tuple(draw(st.lists(DEVICES, max_size=3, unique_by=lambda item: item.name)))
        assets = LocalAssets(
            homes=(
                Home(
                    path=draw(st.sampled_from(["/data/huggingface", "/a b", "/x/../y"])),
                    models=(draw(TEXTS),),
                ),
            ),
            images={
                draw(
                    st.sampled_from(["vllm:1", "registry:5000/vllm-cpu:2", "not a vllm name"])
                ): draw(TEXTS)
            },
        )
        scanned = host(
            draw(st.sampled_from([f"gpu{at}", f"10.7.0.{at + 1}"])),
            *nics,
            rdma=devices,
            gpus=gpus(draw(st.integers(0, 2))),
            hostname=draw(TEXTS),
            assets=assets,
            survey={"system": draw(TEXTS), "memory": draw(st.sampled_from([None, 2**20, 2**36]))},
        )
        hosts.append(
            replace(
                scanned,
                facts=replace(scanned.facts, docker_version=draw(st.sampled_from([None, "28"]))),
            )
        )
    return hosts


@given(clusters())
def test_an_inventory_that_loads_or_an_error_of_our_own(hosts: list[ScannedHost]) -> None:
    """With the chosen addresses."""
    try:
        discovery = discover(hosts, InitOptions())
    except RequestError as error:
        assert error.evidence
        return
    read = loads(format_inventory(discovery), Path("inventory.yaml"))

    assert [node.ip for node in read.nodes] == [node.ip for node in discovery.nodes]
