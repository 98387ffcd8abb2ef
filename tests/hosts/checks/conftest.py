"""Inventories and facts for judges: a healthy node to modify."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.core.check import Finding
from launcher.core.domain import Inventory
from launcher.hosts.check import Evidence
from launcher.hosts.checks.catalogue import ESSENTIAL
from launcher.inventory.load import loads
from launcher.tools.host import Address, Gpu, HostFacts, StateDir

Load = Callable[..., Inventory]
Good = Callable[..., HostFacts]


@pytest.fixture
def load() -> Load:
    """Load an inventory of two nodes with further top-level keys, or other nodes."""

    def make(extra: str = "", nodes: str = "") -> Inventory:
        two = (
            "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 2}, {host: gpu02, ip: 10.0.0.12, gpus: 2}]"
        )
        return loads(
            f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\n{extra}\n{nodes or two}\n",
            Path("inventory.yaml"),
        )

    return make


@pytest.fixture
def good() -> Callable[..., HostFacts]:
    """Return the facts of a healthy node, with changes."""

    def make(ip: str = "10.0.0.11", **changed: Any) -> HostFacts:
        two = tuple(
            Gpu(
                index=at,
                name="NVIDIA H100",
                memory_total=81559,
                memory_used=0,
                driver="580.95",
                uuid=f"GPU-{at}",
            )
            for at in range(2)
        )
        facts = HostFacts(
            user="ops",
            addresses=(
                Address(interface="lo", ip="127.0.0.1", prefix=8, up=True),
                Address(interface="eth0", ip=ip, prefix=24, up=True),
            ),
            listening=frozenset({("0.0.0.0", 22)}),
            disk_free=1 << 40,
            docker_disk_free=1 << 40,
            infiniband=("uverbs0",),
            gpus=two,
            amd_renders=(128, 129),
            docker_version="28.3.0",
            runtimes=("nvidia", "runc"),
            state=StateDir(writable=True, read_only=False, free=1 << 40),
        )
        return dataclasses.replace(facts, **changed)

    return make


def judge(id_: str, inventory: Inventory, **facts: HostFacts) -> list[Finding]:
    """Run one check on these nodes."""
    check = next(candidate for candidate in ESSENTIAL if candidate.id == id_)
    return list(check.judge(Evidence(inventory=inventory, facts=facts)))


def first(id_: str, load: Load, facts: HostFacts, extra: str = "", **own: str) -> Finding:
    """Run one check on one node, and return its finding."""
    keys = {"host": "gpu01", "ip": "10.0.0.11", "gpus": "2", **own}
    nodes = "nodes: [{" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}]"
    (finding,) = judge(id_, load(extra, nodes), gpu01=facts)
    return finding
