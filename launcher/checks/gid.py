"""RoCE's addressing (the GID table), and whether network cards may reach GPU memory (GPUDirect
RDMA).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.checks.consistency import alike
from launcher.checks.host import cpu_has_none, no_rdma
from launcher.checks.rdma import in_use
from launcher.checks.shape import (
    Check,
    Evidence,
    Finding,
    Host,
    each,
    failed,
    passed,
    skipped,
    surveys,
    warned,
)
from launcher.model import Inventory, Node
from launcher.tools.survey import Gid, RdmaDevice, RdmaPort, Survey

_PEER = ("nvidia_peermem", "nv_peer_mem")


def _gid(evidence: Evidence) -> Sequence[Finding]:
    found, findings = surveys(evidence)
    indexes = dict[str, int]()
    for name, survey in found.items():
        node = evidence.inventory.node(name)
        ports = [
            each
            for each in in_use(node, survey)
            if each[1].link_layer == "Ethernet" and each[1].state == "ACTIVE"
        ]
        if not ports:
            findings.append(skipped(name, "no active RoCE port is there to judge"))
            continue
        given = node.env.get("NCCL_IB_GID_INDEX", "")
        bad = _wrong(name, ports, int(given)) if re.fullmatch(r"\d+", given) else _none(name, ports)
        if bad is not None:
            findings.append(bad)
        else:
            indexes[name] = int(given) if re.fullmatch(r"\d+", given) else _best(ports[0][1])

    def differs(name: str, index: int, common: int, others: str) -> Finding:
        return warned(
            name,
            f"its RoCE v2 GID has index {index}, while {others} has {common}",
            fix=(
                "leave NCCL_IB_GID_INDEX out of `env:`: NCCL 2.21 and newer choose for each port; "
                f"with an older one, give {name} its own: `env: {{NCCL_IB_GID_INDEX: {index}}}`"
            ),
        )

    return [*findings, *alike(indexes, differs, shown=lambda index: f"GID index {index}, RoCE v2")]


def _wrong(name: str, ports: Sequence[tuple[RdmaDevice, RdmaPort]], index: int) -> Finding | None:
    """Judge that the index the inventory gives is a RoCE v2 GID on every port in use."""
    for device, port in ports:
        gid = next((each for each in port.gids if each.index == index), None)
        if gid is not None and _is_roce_v2(gid, device):
            continue
        what = (
            "is empty"
            if gid is None
            else f"is {gid.kind or 'of an unknown kind'}" + (f" on {gid.netdev}" * bool(gid.netdev))
        )
        right = _best(port)
        return failed(
            name,
            f"NCCL_IB_GID_INDEX={index}, but GID {index} of {device.name}:{port.number} {what}",
            evidence=_table(port.gids),
            fix=(
                f"take NCCL_IB_GID_INDEX out of `env:`, or set it to {right} for {name}"
                if right >= 0
                else "take NCCL_IB_GID_INDEX out of `env:`"
            ),
        )
    return None


def _is_roce_v2(gid: Gid, device: RdmaDevice) -> bool:
    """True for a GID of RoCE v2 that belongs to the device's own interface."""
    own = not device.netdevs or gid.netdev in ("", *device.netdevs)
    return gid.kind == "RoCE v2" and own


def _none(name: str, ports: Sequence[tuple[RdmaDevice, RdmaPort]]) -> Finding | None:
    bare = [(device, port) for device, port in ports if _best(port) < 0]
    if not bare:
        return None
    device, port = bare[0]
    netdev = next(iter(device.netdevs), "its interface")
    return failed(
        name,
        f"{device.name}:{port.number} has no RoCE v2 GID",
        evidence=_table(port.gids),
        fix=f"give {netdev} of {name} an address: `sudo ip addr add ADDRESS/PREFIX dev {netdev}`",
    )


def _best(port: RdmaPort) -> int:
    """Return the index of the RoCE v2 GID that stands for an IPv4 address, else of the first RoCE
    v2 one, else -1.
    """
    candidates = [gid for gid in port.gids if gid.kind == "RoCE v2"]
    mapped = [
        gid for gid in candidates if re.match(r"(?:0000:){5}ffff:|::ffff:", gid.value.lower())
    ]
    return next((gid.index for gid in (*mapped, *candidates)), -1)


def _table(gids: Sequence[Gid]) -> str:
    return "\n".join(
        f"{gid.index}: {gid.value} {gid.kind} {gid.netdev}".rstrip() for gid in gids[:8]
    )


def _no_roce(inventory: Inventory) -> str:
    return (
        ""
        if inventory.fabric == "roce"
        else f"network: fabric is {inventory.fabric}; GID indexes are for RoCE"
    )


def _gpudirect(host: Host) -> Finding:
    node, survey, expected = host.node, host.survey, host.expected_gpu
    if expected is not None and not expected.gpudirect:
        return skipped(node, f"{expected.model} has no GPUDirect RDMA, and none is expected")
    if survey is None or not survey.modules:
        return skipped(node, "which kernel modules are loaded is not known")
    there = next((name for name in _PEER if name in survey.modules), None)
    if there is not None:
        return passed(node, f"`{there}` is loaded")
    return _without_module(node, survey, required=host.evidence.required == "gdrdma")


def _without_module(node: Node, survey: Survey, *, required: bool) -> Finding:
    text = "`nvidia_peermem` is not loaded"
    fix = f"run `sudo modprobe nvidia_peermem` on {node.name}, then `vlaunch check-nccl`"
    if _dma_buf(survey):
        text += "; the kernel may do it by DMA-BUF, which only `vlaunch check-nccl` can prove"
        return warned(node, text, evidence=survey.kernel, fix=fix)
    judge = failed if required else warned
    return judge(node, text, evidence=survey.kernel, fix=fix)


def _dma_buf(survey: Survey) -> bool:
    version = re.match(r"(\d+)\.(\d+)", survey.kernel)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 12)


CHECKS = (
    Check(
        id="gid-index",
        what="the RoCE GID that NCCL will use is v2, and has the same index everywhere",
        why=(
            "a GID of RoCE v1, or an empty one, cannot be routed: the connection never comes about,"
            " or falls back to TCP"
        ),
        judge=_gid,
        group="rdma",
        skip_reason=_no_roce,
        needs=("rdma-devices", "hca-names"),
    ),
    Check(
        id="gpudirect",
        what="network cards can reach GPU memory",
        why="without GPUDirect RDMA every byte between nodes goes through the host's memory",
        judge=each(_gpudirect),
        group="rdma",
        skip_reason=lambda inventory: (
            no_rdma(inventory) or cpu_has_none(inventory) or _amd(inventory)
        ),
        needs=("rdma-devices",),
    ),
)


def _amd(inventory: Inventory) -> str:
    return (
        "ROCm brings its own; `vlaunch check-nccl` proves it"
        if inventory.accelerator == "amd"
        else ""
    )
