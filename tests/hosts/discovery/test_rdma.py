"""The fabric, the hosts' devices, and their GID index."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.hosts.discovery.rdma import FabricChoice, choose_fabric
from launcher.hosts.discovery.shape import ScannedHost
from launcher.tools.host.survey import GpuState, RdmaDevice
from tests.hosts.discovery.hosts import host, infiniband, roce


def chosen(*devices: tuple[RdmaDevice, ...]) -> FabricChoice:
    """Return the fabric chosen for hosts with these devices."""
    hosts: list[ScannedHost] = [
        host(f"h{at}", rdma=device) for at, device in enumerate(devices, start=1)
    ]
    return choose_fabric(hosts)


def beside(devices: tuple[RdmaDevice, ...], *near: dict[str, str]) -> FabricChoice:
    """Return the fabric chosen for a host with these GPU distances."""
    states = tuple(GpuState(index=at, affinity=affinity) for at, affinity in enumerate(near))
    return choose_fabric([host("h1", rdma=devices, survey={"gpus": states})])


def test_infiniband_wins_over_roce() -> None:
    """If servers have both, RoCE is their management network."""
    both = (infiniband("mlx5_0"), roce("mlx5_1", "eno1"))

    assert chosen(both, both).fabric == "infiniband"


def test_a_port_that_is_down_is_excluded_on_its_host() -> None:
    """With a warning that the hosts differ."""
    good = (infiniband("mlx5_0"), infiniband("mlx5_1"))
    choice = chosen(good, (infiniband("mlx5_0"), infiniband("mlx5_1", state="DOWN")))

    assert [devices.hca for devices in choice.hosts] == [("mlx5_0", "mlx5_1"), ("mlx5_0",)]
    assert "not mlx5_1: its port is DOWN (on h2)" in choice.why
    assert "h1 2; h2 1" in choice.warnings[0]


def test_ports_are_named_for_devices_with_several() -> None:
    """Only the connected one is used."""
    (port,) = infiniband("mlx4_0").ports
    two = RdmaDevice(name="mlx4_0", ports=(replace(port, state="DOWN"), replace(port, number=2)))

    assert chosen((two,)).hosts[0].hca == ("mlx4_0:2",)


def test_infiniband_on_some_hosts_only_is_a_warning() -> None:
    """Even if they share RoCE, which is their slow network."""
    choice = chosen(
        (infiniband("mlx5_0"), roce("mlx5_1", "eno1")),
        (infiniband("mlx5_0", state="INIT"), roce("mlx5_1", "eno1")),
    )

    assert choice.fabric == "roce"
    assert (
        choice.warnings[0]
        == "h2: no ACTIVE InfiniBand port, which h1 has: all hosts share only RoCE"
    )


def test_rdma_on_some_hosts_only_is_ethernet_with_a_warning() -> None:
    """The loss of performance must not be silent."""
    choice = chosen((roce("mlx5_0", "eth0"),), ())

    assert (choice.fabric, choice.hosts[0].hca) == ("ethernet", ())
    assert choice.warnings[0].startswith(
        "no ACTIVE RDMA port on h2, which h1 has: the cluster will use TCP"
    )


def test_efa_is_named() -> None:
    """It is neither InfiniBand nor RoCE, and vLLM's own image cannot use it."""
    (port,) = infiniband("x").ports
    for layer in ("Unknown", "Unspecified"):
        efa = RdmaDevice(name="rdmap16s27", ports=(replace(port, link_layer=layer, rate=100.0),))
        choice = chosen((efa,), (efa,))

        assert (choice.fabric, choice.hosts[0].hca) == ("ethernet", ())
        assert "AWS EFA" in choice.why[0]
        assert "aws-ofi-nccl" in choice.warnings[0]


def test_a_port_of_an_unknown_link_layer_is_not_efa() -> None:
    """Omni-Path, for example, has its own name."""
    (port,) = infiniband("x").ports
    other = RdmaDevice(name="hfi1_0", ports=(replace(port, link_layer="Unspecified"),))
    choice = chosen((other,), (other,))

    assert choice.fabric == "ethernet"
    assert "AWS EFA" not in " ".join((*choice.why, *choice.warnings))


def test_software_rdma_is_never_chosen() -> None:
    """It is no faster than TCP, beside a card or alone."""
    soft = (roce("rxe0", "eth0", rate=100.0), roce("siw0", "eth0", rate=100.0))
    mixed = chosen((*soft, roce("mlx5_0", "eth0")), (*soft, roce("mlx5_0", "eth0")))
    alone = chosen(soft, soft)

    assert [devices.hca for devices in mixed.hosts] == [("mlx5_0",), ("mlx5_0",)]
    assert "not rxe0: software RDMA, over the same network as TCP" in mixed.why
    assert (alone.fabric, alone.warnings) == ("ethernet", ())
    assert alone.why == ("ethernet: no host has an RDMA device except software ones (rxe, siw)",)


def test_different_rates_are_reported_as_a_range() -> None:
    """Each host's own, with a warning."""
    choice = chosen((infiniband("mlx5_0", rate=400.0),), (infiniband("mlx5_0", rate=200.0),))

    assert choice.why[0] == "infiniband: 1 ACTIVE InfiniBand port at 200 to 400 Gbit/s on each host"
    assert "(h1 1 at 400 Gbit/s; h2 1 at 200 Gbit/s)" in choice.warnings[0]


def test_a_port_far_from_every_gpu_is_excluded() -> None:
    """It serves storage or management, although equally fast; the distance is reported."""
    two = (infiniband("mlx5_0"), infiniband("mlx5_1"), infiniband("mlx5_2"))
    choice = beside(two, {"mlx5_0": "PXB", "mlx5_1": "NODE", "mlx5_2": "SYS"}, {"mlx5_2": "PIX"})

    assert choice.hosts[0].hca == ("mlx5_0", "mlx5_2")
    assert choice.why[1:] == (
        "mlx5_0: 400 Gbit/s, PXB to GPU 0",
        "mlx5_2: 400 Gbit/s, PIX to GPU 1",
        "not mlx5_1: NODE to GPU 0 at best, and every GPU has a nearer port",
    )


def test_a_compute_port_that_is_down_is_not_replaced() -> None:
    """A storage port would be shared with another GPU."""
    devices = (infiniband("mlx5_0"), infiniband("mlx5_1", state="DOWN"), infiniband("mlx5_2"))
    near = {"mlx5_0": "NODE", "mlx5_1": "PIX", "mlx5_2": "NODE"}
    choice = beside(devices, {**near, "mlx5_0": "PIX", "mlx5_1": "NODE"}, near)

    assert choice.hosts[0].hca == ("mlx5_0",)


@pytest.mark.parametrize(
    "near",
    [
        (),
        ({},),
        ({"mlx5_0": "PIX"},),
        ({"mlx5_0": "NODE", "mlx5_1": "NODE"},),
        ({"mlx5_0": "PIX", "mlx5_1": "SYS"}, {}),
        ({"mlx5_0": "PIX", "mlx5_1": "SYS"}, {"mlx5_0": "SYS", "mlx5_1": "SYS"}),
    ],
)
def test_a_port_that_may_be_the_nearest_of_a_gpu_stays(near: tuple[dict[str, str], ...]) -> None:
    """With unknown or equal distances, or a GPU without a near port."""
    choice = beside((infiniband("mlx5_0"), infiniband("mlx5_1")), *near)

    assert choice.hosts[0].hca == ("mlx5_0", "mlx5_1")


def test_a_port_without_roce_v2_is_not_roce() -> None:
    """Version 1 is limited to a network segment, and NCCL does not use it by default."""
    choice = chosen((roce("mlx5_0", "eth0", v2=False),))

    assert choice.fabric == "ethernet"
    assert "mlx5_0: ACTIVE Ethernet, no RoCE v2 address" in choice.why


def test_the_gid_index_is_common_to_all_devices_of_a_host() -> None:
    """Without a common index, NCCL chooses."""
    same = (roce("mlx5_0", "eth0", index=3), roce("mlx5_1", "eth1", index=3))
    other = (roce("mlx5_0", "eth0", index=3), roce("mlx5_1", "eth1", index=5))

    assert [devices.gid for devices in chosen(same, other).hosts] == [3, None]


def test_the_interface_of_a_bond_is_in_the_gid_table() -> None:
    """The device itself has only the bond's members."""
    bonded = replace(roce("mlx5_bond_0", "bond0"), netdevs=("ens1f0np0", "ens1f1np1"))

    assert chosen((bonded,)).hosts[0].netdevs == {"bond0", "ens1f0np0", "ens1f1np1"}


def test_without_devices_the_reason_is_short() -> None:
    """Without a warning: such machines are common."""
    choice = chosen((), ())

    assert (choice.fabric, choice.why, choice.warnings) == (
        "ethernet",
        ("ethernet: no host has an RDMA device",),
        (),
    )


def test_ports_without_their_device_files_are_a_warning_with_the_fix() -> None:
    """Containers need /dev/infiniband."""
    bare = host("h1", rdma=(infiniband("mlx5_0"),), infiniband=())

    assert (
        "h1: RDMA ports are ACTIVE, but /dev/infiniband is missing"
        in choose_fabric([bare]).warnings[0]
    )
