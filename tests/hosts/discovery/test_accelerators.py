"""A host's GPUs for an inventory, and reasons against others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.inventory_writer import format_inventory
from launcher.hosts.discovery.shape import Discovery, InitOptions
from launcher.inventory.load import loads
from launcher.tools.docker import GpuAllocation
from launcher.tools.host.survey import GpuProcess, GpuState
from tests.hosts.discovery.hosts import gpus, host, nic

BUSY = GpuProcess(gpu="GPU-1", pid=7, name="python3", memory=70000, user="ada")


def discover_host(
    survey: dict[str, Any], wishes: InitOptions | None = None, **facts: Any
) -> Discovery:
    """Discover a host with four GPUs."""
    first = host("gpu01", nic("eth0", "10.0.0.1/24"), gpus=gpus(4), survey=survey, **facts)
    return discover([first], wishes or InitOptions())


def states(**of: dict[int, bool]) -> tuple[GpuState, ...]:
    """Return four GPUs; some drive a display or are split."""
    return tuple(
        GpuState(index=at, **{what: which.get(at, False) for what, which in of.items()})
        for at in range(4)
    )


@pytest.mark.parametrize(
    ("survey", "ids", "why"),
    [
        ({}, (), ()),
        ({"gpus": states(display={0: True})}, ("1", "2", "3"), ("not GPU 0: drives a display",)),
        ({"gpus": states(display={3: True})}, (), ("not GPU 3: drives a display",)),
        (
            {"gpus": states(mig={1: True, 2: True})},
            ("0", "3"),
            ("not GPU 1, 2: split into instances (MIG)",),
        ),
        ({"gpus": states(display=dict.fromkeys(range(4), True))}, (), ()),
    ],
)
def test_gpus_of_others_are_excluded(
    survey: dict[str, Any], ids: tuple[str, ...], why: tuple[str, ...]
) -> None:
    """With the reason; if none would remain, all stay."""
    evidence = discover_host(survey)
    (node,) = evidence.nodes

    assert (node.gpu_ids, evidence.gpus) == (ids, why)
    assert node.gpus == 4 - sum(line.count(",") + 1 for line in why)
    loaded = loads(format_inventory(evidence), Path("inventory.yaml")).head
    assert (loaded.gpus, loaded.gpu_ids) == (node.gpus, ids)
    assert f"gpus: [{', '.join(ids)}]" in format_inventory(evidence) or not ids


def test_gpus_in_use_are_excluded() -> None:
    """A display server's or a context's memory does not count."""
    busy = discover_host({}, gpu_processes=(BUSY,))
    idle = discover_host({}, gpu_processes=(replace(BUSY, memory=300),))

    assert (busy.nodes[0].gpu_ids, busy.gpus) == (("0", "2", "3"), ("not GPU 1: in use by ada",))
    assert (idle.nodes[0].gpu_ids, idle.gpus) == ((), ())


def test_the_gpus_of_a_running_cluster_are_excluded() -> None:
    """Unless it has the same name: its GPUs may be chosen."""
    value = GpuAllocation(container="vlaunch-other-gpu01", cluster="other", ids=("0", "GPU-1"))

    assert discover_host({}, gpu_allocations=(value,)).nodes[0].gpu_ids == ("2", "3")
    assert (
        discover_host({}, InitOptions(cluster="other"), gpu_allocations=(value,)).nodes[0].gpu_ids
        == ()
    )
