"""What the RDMA devices of all hosts amount to: the fabric, its devices on each host, and the entry
of their GID tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.discovery.shape import Probed
from launcher.model import Fabric, fold, natural
from launcher.tools.survey import RdmaDevice, RdmaPort

_LAYERS: dict[str, Fabric] = {"InfiniBand": "infiniband", "Ethernet": "roce"}
# Soft RoCE and Soft iWARP, by the names that rdma-core's documentation gives them: sockets
# underneath, so no gain over TCP.
_SOFTWARE = re.compile(r"rxe|siw")
# AWS's EFA is neither InfiniBand nor Ethernet. It needs /dev/infiniband in the containers as those
# do, and besides an image with NCCL's plugin for it (https://github.com/aws/aws-ofi-nccl), which
# vLLM's own does not have: nothing to choose unasked.
_EFA = re.compile(r"efa|rdmap\d+s\d+")
# From near to far (`nvidia-smi topo -m`).
_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
# An IPv4 address in the GID table: RoCE v2 carries it in UDP over IPv4.
_IPV4 = "0000:0000:0000:0000:0000:ffff:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of one host for NCCL_IB_HCA, their interfaces, and their common RoCE v2 index
    (`None`: there is none).
    """

    hca: tuple[str, ...] = ()
    netdevs: frozenset[str] = frozenset()
    gid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """The fabric and each host's devices, in the order of the hosts; `why` tells what was left
    out.
    """

    fabric: Fabric
    hosts: tuple[Devices, ...]
    why: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def choose(hosts: Sequence[Probed], order: Sequence[str]) -> Rdma:
    """Choose InfiniBand when all hosts have a port that is ACTIVE, else RoCE, else plain
    Ethernet.
    """
    for layer, fabric in _LAYERS.items():
        usable = [[pair for pair in _ports(host) if _fits(*pair, layer)] for host in hosts]
        have = [name for name, pairs in zip(order, usable, strict=True) if pairs]
        if len(have) == len(hosts):
            return _chosen(hosts, order, fabric, usable)
    return Rdma(fabric="ethernet", hosts=tuple(Devices() for _ in hosts), **_ethernet(hosts, order))


def _ports(host: Probed) -> Iterator[tuple[RdmaDevice, RdmaPort]]:
    for device in sorted(host.survey.rdma, key=lambda each: natural(each.name)):
        for port in device.ports:
            yield device, port


def _fits(device: RdmaDevice, port: RdmaPort, layer: str) -> bool:
    if _SOFTWARE.match(device.name) or port.state != "ACTIVE" or port.link_layer != layer:
        return False
    return layer == "InfiniBand" or bool(_v2(port))


def _is_efa(device: RdmaDevice, port: RdmaPort) -> bool:
    return (
        port.link_layer not in _LAYERS
        and (_EFA.match(device.name) or device.model.lower().startswith("efa")) is not None
    )


def _v2(port: RdmaPort) -> list[int]:
    return [gid.index for gid in port.gids if gid.kind.lower() == "roce v2"]


def _chosen(
    hosts: Sequence[Probed],
    order: Sequence[str],
    fabric: Fabric,
    usable: Sequence[list[tuple[RdmaDevice, RdmaPort]]],
) -> Rdma:
    left_out: dict[str, list[str]] = {}
    taken: dict[str, list[str]] = {}
    found = []
    for host, name, pairs in zip(hosts, order, usable, strict=True):
        own = max(port.rate for _, port in pairs)
        kept = [(device, port) for device, port in pairs if port.rate == own]
        for device, port in _ports(host):
            if (device, port) in kept:
                taken.setdefault(_about(host, device, port), []).append(name)
            else:
                left_out.setdefault(
                    f"not {_spelled(device, port)}: {_reason(device, port, fabric, own)}", []
                ).append(name)
        found.append(
            Devices(
                hca=tuple(_spelled(device, port) for device, port in kept),
                netdevs=_interfaces(kept),
                gid=_gid([port for _, port in kept]) if fabric == "roce" else None,
            )
        )
    kind = "InfiniBand" if fabric == "infiniband" else "RoCE v2"
    counts = sorted({len(each.hca) for each in found})
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    rates = sorted({max(port.rate for _, port in pairs) for pairs in usable})
    fast = f"{rates[0]:g} Gbit/s" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g} Gbit/s"
    why = [
        f"{fabric}: {many} ACTIVE {kind} port{'s' if counts != [1] else ''} at {fast} on each host"
    ]
    for text, names in (*taken.items(), *left_out.items()):
        why.append(text + ("" if len(names) == len(hosts) else f" (on {fold(names)})"))
    bare = [name for host, name in zip(hosts, order, strict=True) if not host.facts.infiniband]
    warnings = (
        [
            f"{fold(bare)}: RDMA ports are ACTIVE, but /dev/infiniband is not there: `sudo modprobe"
            " ib_uverbs`"
        ]
        if bare
        else []
    )
    mixed = [
        name
        for host, name in zip(hosts, order, strict=True)
        if any(_fits(*pair, "InfiniBand") for pair in _ports(host))
    ]
    if fabric == "roce" and mixed:
        lacking = [name for name in order if name not in mixed]
        warnings.append(
            f"{fold(lacking)}: no ACTIVE InfiniBand port, which {fold(mixed)} has: RoCE is all that"
            " they share"
        )
    if len(counts) > 1 or len(rates) > 1:
        told = "; ".join(
            f"{name} {len(each.hca)}"
            + (f" at {max(port.rate for _, port in pairs):g} Gbit/s" if len(rates) > 1 else "")
            for name, each, pairs in zip(order, found, usable, strict=True)
        )
        warnings.append(
            f"the hosts have different numbers or rates of RDMA ports ({told}): the slowest sets"
            " the pace"
        )
    return Rdma(fabric=fabric, hosts=tuple(found), why=tuple(why), warnings=tuple(warnings))


def _interfaces(kept: Sequence[tuple[RdmaDevice, RdmaPort]]) -> frozenset[str]:
    """Return the devices' interfaces, and those that their addresses are on: of a bond, the GID
    table has the name.
    """
    own = {netdev for device, _ in kept for netdev in device.netdevs}
    return frozenset(own | {gid.netdev for _, port in kept for gid in port.gids if gid.netdev})


def _about(host: Probed, device: RdmaDevice, port: RdmaPort) -> str:
    """Say where a device is: its interface, its NUMA node, and the GPUs that it is nearest to
    (`nvidia-smi topo -m`).
    """
    near: dict[str, list[int]] = {}
    for gpu in host.survey.gpus:
        if device.name in gpu.affinity:
            near.setdefault(gpu.affinity[device.name], []).append(gpu.index)
    best = next((level for level in _NEAR if level in near), None)
    said = [f"{port.rate:g} Gbit/s", *sorted(device.netdevs)]
    said += [f"NUMA node {device.numa}"] if device.numa is not None else []
    said += [f"{best} to GPU {', '.join(map(str, near[best]))}"] if best else []
    return f"{_spelled(device, port)}: {', '.join(said)}"


def _spelled(device: RdmaDevice, port: RdmaPort) -> str:
    return device.name if len(device.ports) == 1 else f"{device.name}:{port.number}"


def _told(port: RdmaPort) -> str:
    """Return what is said of a port that is not used."""
    return f"{port.state} {port.link_layer}{'' if _v2(port) else ', no RoCE v2 address'}"


def _reason(device: RdmaDevice, port: RdmaPort, fabric: Fabric, own: float) -> str:
    if _SOFTWARE.match(device.name):
        return "RDMA made of software, over the same network as TCP"
    if port.state != "ACTIVE":
        return f"its port is {port.state}"
    if _LAYERS.get(port.link_layer) != fabric:
        return f"its link is {port.link_layer} ({port.rate:g} Gbit/s), not the compute fabric"
    if port.rate != own:
        return f"{port.rate:g} Gbit/s, and the compute fabric has {own:g}"
    return "it has no RoCE v2 address"


def _gid(ports: Sequence[RdmaPort]) -> int | None:
    """Return the first index that is RoCE v2 with an IPv4 address on every port."""
    tables = [
        {
            g.index
            for g in port.gids
            if g.kind.lower() == "roce v2" and g.value.lower().startswith(_IPV4)
        }
        for port in ports
    ]
    return min(set.intersection(*tables), default=None)


def _ethernet(hosts: Sequence[Probed], order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Say why there is no RDMA; a fabric that only some hosts have is worth a warning."""
    real = [[pair for pair in _ports(host) if not _SOFTWARE.match(pair[0].name)] for host in hosts]
    have = [
        name
        for pairs, name in zip(real, order, strict=True)
        if any(port.state == "ACTIVE" for _, port in pairs)
    ]
    if not any(real):
        soft = any(host.survey.rdma for host in hosts)
        return {
            "why": (
                "ethernet: no host has an RDMA device"
                + (" but those made of software (rxe, siw)" if soft else ""),
            )
        }
    if all(any(_is_efa(*pair) and pair[1].state == "ACTIVE" for pair in pairs) for pairs in real):
        text = (
            "the hosts' RDMA is AWS EFA, which NCCL uses through a plugin that vLLM's own image"
            " does not have"
        )
        fix = (
            "with an image that has aws-ofi-nccl, set `network: {fabric: infiniband}`, which hands"
            " out the devices"
        )
        return {
            "why": (f"ethernet: {text}",),
            "warnings": (f"{text}: the network is left to TCP; {fix}",),
        }
    lacking = [name for name in order if name not in have]
    states = {
        f"{_spelled(device, port)}: {_told(port)}": None
        for host in hosts
        for device, port in _ports(host)
    }
    text = (
        f"no ACTIVE RDMA port on {fold(lacking)}"
        if lacking
        else "the hosts' RDMA ports are not of one fabric"
    )
    text += f", which {fold(have)} has" if lacking and have else ""
    return {
        "why": (f"ethernet: {text}", *states),
        "warnings": (
            (
                f"{text}: the network is left to TCP, which is many times slower; see `ibv_devinfo`"
                " there"
            ),
        ),
    }
