"""What an inventory states and hosts no longer have, each in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.discovery.discover import discover
from launcher.discovery.drift import drift
from launcher.discovery.shape import Probed, Wishes
from launcher.discovery.written import write
from launcher.inventory.load import loads
from launcher.model import Inventory
from tests.discovery.hosts import CASES, gpus, h100_pair, host, infiniband, nic, roce, roce_four

Hosts = list[Probed]


def stated(hosts: Hosts) -> Inventory:
    """The inventory that was written when the hosts were so."""
    return loads(write(discover(hosts, Wishes())), Path("inventory.yaml"))


def lines(before: Hosts, after: Hosts) -> tuple[str, ...]:
    """What is told when the hosts have changed."""
    return drift(stated(before), after, discover(after, Wishes()))


@pytest.mark.parametrize("case", CASES)
def test_what_was_just_written_has_no_drift(case: str) -> None:
    """For every kind of host."""
    hosts = CASES[case]()

    assert lines(hosts, hosts) == ()


def second(
    change: Callable[[Probed], Probed], hosts: Callable[[], Hosts] = h100_pair
) -> tuple[str, ...]:
    """What is told when the second host has changed so."""
    before, after = hosts(), hosts()
    after[1] = change(after[1])
    return lines(before, after)


def test_a_lost_gpu() -> None:
    """Eight are stated."""
    told = second(lambda one: replace(one, facts=replace(one.facts, gpus=gpus(7))))

    assert told == ("nodes[1] gpu02: gpus: 8 → 7",)


def test_another_address_and_interface() -> None:
    """Each on its own line."""
    changed = host("h2", nic("ens5", "10.0.0.32/24"), gpus=gpus(8))
    pair = [host(f"h{at}", nic("eth0", f"10.0.0.{at}/24"), gpus=gpus(8)) for at in (1, 2)]

    assert lines(pair, [pair[0], changed]) == (
        "nodes[1] h2: ip: 10.0.0.2 → 10.0.0.32",
        "nodes[1] h2: interface: eth0 → ens5",
    )


def test_a_renamed_interface() -> None:
    """The address is still there."""
    pair = [host(f"h{at}", nic("eth0", f"10.0.0.{at}/24"), gpus=gpus(8)) for at in (1, 2)]
    renamed = host("h2", nic("ens5", "10.0.0.2/24"), gpus=gpus(8))

    assert lines(pair, [pair[0], renamed]) == ("nodes[1] h2: interface: eth0 → ens5",)


def test_devices_that_went_and_came() -> None:
    """A dead port, a device that is gone, a new one."""

    def change(one: Probed) -> Probed:
        kept = [device for device in one.survey.rdma if device.name not in ("mlx5_3", "mlx5_4")]
        rdma = (*kept, infiniband("mlx5_4", state="DOWN"), infiniband("mlx5_12"))
        return replace(one, facts=replace(one.facts, survey=replace(one.survey, rdma=rdma)))

    assert second(change) == (
        "nodes[1] gpu02: hca: mlx5_3 → gone",
        "nodes[1] gpu02: hca: mlx5_4 → DOWN",
        "nodes[1] gpu02: hca: mlx5_12 is not in the inventory",
    )


def test_another_gid_index() -> None:
    """RoCE fails at the first message with the old one."""

    def change(one: Probed) -> Probed:
        rdma = tuple(
            roce(device.name, device.netdevs[0], index=7, rate=device.ports[0].rate)
            for device in one.survey.rdma
        )
        return replace(one, facts=replace(one.facts, survey=replace(one.survey, rdma=rdma)))

    assert second(change, roce_four) == ("nodes[1] node2: NCCL_IB_GID_INDEX: 3 → 7",)


def test_another_fabric() -> None:
    """One host without its devices takes it from all."""
    told = second(
        lambda one: replace(one, facts=replace(one.facts, survey=replace(one.survey, rdma=())))
    )

    assert told[0] == "network: fabric: infiniband → ethernet"
    assert "nodes[1] gpu02: hca: mlx5_0 → gone" in told


def test_a_new_host() -> None:
    """With what it would bring."""
    pair = [host(f"h{at}", nic("eth0", f"10.0.0.{at}/24"), gpus=gpus(8)) for at in (1, 2)]

    assert lines(pair[:1], pair) == ("nodes: h2 is not in the inventory: ip 10.0.0.2, 8 GPUs",)


def test_without_a_choice_each_host_is_still_compared() -> None:
    """When no network is left that all have."""
    pair = [host(f"h{at}", nic("eth0", f"10.0.0.{at}/24"), gpus=gpus(8)) for at in (1, 2)]
    moved = [pair[0], host("h2", nic("eth0", "10.9.0.2/24"), gpus=gpus(8))]

    assert drift(stated(pair), moved, None) == ("nodes[1] h2: ip: 10.0.0.2 → on no interface",)
