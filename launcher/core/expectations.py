"""What GPUs and network cards are known to do: our figures with their sources, and a user's file
over them, which `expectations_read` reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from launcher.core import decode
from launcher.core.domain import Inventory, Level, fold
from launcher.core.values import Bounds


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"should be a regular expression: {error}") from None
    return text


Words = Annotated[str, Bounds(min_length=1)]
Pattern = Annotated[Words, decode.Then(_pattern)]
Positive = Annotated[float, Bounds(gt=0)]
APART = "no GPU shares a PCIe switch with an RDMA device, so NCCL does not use GPUDirect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU model. `match` is searched in the name that `nvidia-smi` gives.

    `memory` is GB as sold (`None`: it has none of its own, or there are several), `driver` the
    oldest driver branch that knows it, `gpudirect` whether a network card may reach its memory
    (GPUDirect RDMA), `datacenter` whether it is sold for data centres, `cuda_gib` the GiB that CUDA
    reports by the GB that are sold.
    """

    model: Words
    match: Pattern
    source: Words
    memory: Positive | None = None
    driver: Annotated[int, Bounds(gt=0)] | None = None
    gpudirect: bool = True
    datacenter: bool = True
    cuda_gib: Mapping[int, Positive] = field(default_factory=dict)

    def reported(self, name: str) -> float | None:
        """Return the GiB that CUDA reports of the card of this name, such as `A100 80GB`; where the
        name says no size, of the smallest.
        """
        sizes = [size for size in self.cuda_gib if re.search(rf"\b{size} ?GB?\b", name)]
        size = sizes[0] if sizes else min(self.cuda_gib, default=None)
        return None if size is None else self.cuda_gib[size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card.

    `match` is searched in an RDMA device's model (`MT4129`) or an interface's driver
    (`virtio_net`).

    `rate` is the line rate of one port in Gbit/s (`None`: as the link says); `share` the part of it
    that send and receive should reach over RDMA, `share_tcp` over TCP; `latency` and `latency_tcp`
    are upper bounds for one small message, one way, in µs.
    """

    model: Words
    match: Pattern
    source: Words
    rate: Positive | None = None
    share: Annotated[float, Bounds(gt=0, le=1)] = 0.9
    share_tcp: Annotated[float, Bounds(gt=0, le=1)] = 0.5
    latency: Positive = 100.0
    latency_tcp: Positive = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """The figures to judge by; the first entry that matches counts."""

    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()

    def gpu(self, name: str) -> Gpu | None:
        """Return what is expected of a GPU by the name that `nvidia-smi` gives, such as `NVIDIA
        H100 80GB HBM3`.
        """
        return next((entry for entry in self.gpus if re.search(entry.match, name)), None)

    def nic(self, name: str) -> Nic | None:
        """Return what is expected of a network card by its RDMA model (`MT4129`) or its driver."""
        return next((entry for entry in self.nics if re.search(entry.match, name)), None)


def required_level(
    inventory: Inventory,
    *,
    gpus: Collection[str],
    rdma: Collection[str],
    expectations: Expectations,
    distant_nodes: Collection[str] = (),
    requested: Level | Literal["auto"] | None = None,
) -> tuple[Level, str]:
    """Return the level that every pair must reach, and in words why: as asked, as the inventory
    says, or what is possible here.

    Args:
        inventory: its `network: require` counts where nothing is asked; `auto` means what this
            hardware can do.
        gpus: the names of the GPUs.
        rdma: the nodes that have an active RDMA port.
        known: what is known of GPUs, GPUDirect among it.
        apart: the nodes on which no GPU shares a PCIe switch with an RDMA device.
        asked: the command line's `--require`.
    """
    if requested is not None and requested != "auto":
        return requested, "as asked"
    if requested is None and inventory.require != "auto":
        return inventory.require, "`network: require` in the inventory"
    if inventory.accelerator == "cpu":
        return "any", "CPUs speak Gloo, which is TCP"
    if inventory.fabric != "ethernet":
        return _on_fabric(inventory.fabric, gpus, expectations, distant_nodes)
    if any(node.name not in rdma for node in inventory.nodes):
        return "any", "`fabric: ethernet`, and not every node has an active RDMA port"
    return "rdma", "every node has an active RDMA port"


def _on_fabric(
    fabric: str,
    gpus: Collection[str],
    expectations: Expectations,
    distant_nodes: Collection[str],
) -> tuple[Level, str]:
    """Return the level on a fabric with RDMA: with GPUDirect where all GPUs are known to have it,
    and NCCL uses it.
    """
    why = f"`fabric: {fabric}`"
    names = sorted(set(gpus) - {""})
    if not names:
        return "rdma", why
    models = [expectations.gpu(name) for name in names]
    if None in models:
        return "rdma", f"{why}; GPUDirect is not known of {', '.join(names)}"
    if all(model is not None and model.gpudirect for model in models):
        if distant_nodes:
            return "rdma", f"{why}; {fold(list(distant_nodes))}: {APART}"
        return "gdrdma", f"{why}, and {', '.join(names)} can GPUDirect"
    return "rdma", f"{why}; GPUDirect is not expected of {', '.join(names)}"
