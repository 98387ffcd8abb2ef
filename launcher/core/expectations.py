"""Expected performance of GPU and network card models, with sources; see `expectations_file`."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from launcher.core import decode
from launcher.core.domain import Inventory, Level, fold
from launcher.core.values import Bounds


def _check_regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"should be a regular expression: {error}") from None
    return text


NonEmptyText = Annotated[str, Bounds(min_length=1)]
RegexText = Annotated[NonEmptyText, decode.Validator(_check_regex)]
Positive = Annotated[float, Bounds(gt=0)]
NO_SHARED_SWITCH = "no GPU shares a PCIe switch with an RDMA device, so NCCL does not use GPUDirect"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGpu:
    """Expected figures of a GPU model; `match` is searched in the name that `nvidia-smi` prints.

    `memory` is in GB as sold (None: shared with the host, or several sizes), `driver` the oldest
    driver branch that supports it, `gpudirect` whether network cards can access its memory
    (GPUDirect RDMA), `cuda_gib` the GiB that CUDA reports for each size in GB.
    """

    model: NonEmptyText
    match: RegexText
    source: NonEmptyText
    memory: Positive | None = None
    driver: Annotated[int, Bounds(gt=0)] | None = None
    gpudirect: bool = True
    datacenter: bool = True
    cuda_gib: Mapping[int, Positive] = field(default_factory=dict)

    def reported_gib(self, name: str) -> float | None:
        """Return CUDA's GiB for a card such as `A100 80GB`; the smallest without a size."""
        sizes = [size for size in self.cuda_gib if re.search(rf"\b{size} ?GB?\b", name)]
        size = sizes[0] if sizes else min(self.cuda_gib, default=None)
        return None if size is None else self.cuda_gib[size]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedNic:
    """Expected figures of a network card model.

    `match` is searched in an RDMA device's model (`MT4129`) or an interface's driver
    (`virtio_net`). `rate` is the line rate of one port in Gbit/s (None: the link's own); `share`
    (RDMA) and `share_tcp` are the fractions of it that transfers should reach. `latency` and
    `latency_tcp` are upper bounds for one small message, one direction, in µs.
    """

    model: NonEmptyText
    match: RegexText
    source: NonEmptyText
    rate: Positive | None = None
    share: Annotated[float, Bounds(gt=0, le=1)] = 0.9
    share_tcp: Annotated[float, Bounds(gt=0, le=1)] = 0.5
    latency: Positive = 100.0
    latency_tcp: Positive = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """Expected figures by model; the first matching entry counts."""

    gpus: tuple[ExpectedGpu, ...] = ()
    nics: tuple[ExpectedNic, ...] = ()

    def gpu(self, name: str) -> ExpectedGpu | None:
        """Return the entry for a GPU name such as `NVIDIA H100 80GB HBM3`."""
        return next((entry for entry in self.gpus if re.search(entry.match, name)), None)

    def nic(self, name: str) -> ExpectedNic | None:
        """Return the entry for an RDMA model (`MT4129`) or a driver."""
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
    """Return the network level that every pair of nodes must reach, and the reason.

    Args:
        inventory: its `network: require` applies without `requested`; `auto` means the best that
            this hardware supports.
        gpus: GPU names.
        rdma: nodes with an active RDMA port.
        expectations: GPU models, with their GPUDirect support.
        distant_nodes: nodes on which no GPU shares a PCIe switch with an RDMA device.
        requested: the command line's `--require`.
    """
    if requested is not None and requested != "auto":
        return requested, "as requested"
    if requested is None and inventory.require != "auto":
        return inventory.require, "`network: require` in the inventory"
    if inventory.accelerator == "cpu":
        return "any", "CPUs use Gloo, which is TCP"
    if inventory.fabric != "ethernet":
        return _level_on_fabric(inventory.fabric, gpus, expectations, distant_nodes)
    if any(node.name not in rdma for node in inventory.nodes):
        return "any", "`fabric: ethernet`, and not every node has an active RDMA port"
    return "rdma", "every node has an active RDMA port"


def _level_on_fabric(
    fabric: str,
    gpus: Collection[str],
    expectations: Expectations,
    distant_nodes: Collection[str],
) -> tuple[Level, str]:
    """Return the level on an RDMA fabric; GPUDirect needs support in all GPUs and NCCL."""
    why = f"`fabric: {fabric}`"
    names = sorted(set(gpus) - {""})
    if not names:
        return "rdma", why
    models = [expectations.gpu(name) for name in names]
    if None in models:
        return "rdma", f"{why}; GPUDirect support is unknown for {', '.join(names)}"
    if all(model is not None and model.gpudirect for model in models):
        if distant_nodes:
            return "rdma", f"{why}; {fold(list(distant_nodes))}: {NO_SHARED_SWITCH}"
        return "gdrdma", f"{why}, and {', '.join(names)} support GPUDirect"
    return "rdma", f"{why}; GPUDirect is not expected of {', '.join(names)}"
