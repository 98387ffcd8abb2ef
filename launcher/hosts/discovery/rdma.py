"""RDMA of all hosts: the fabric, its devices on each host, and the entry of their GID tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from launcher.core.domain import Fabric, fold, natural
from launcher.hosts.discovery.described import lines
from launcher.hosts.discovery.shape import Probed
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

_Pair = tuple[RdmaDevice, RdmaPort]


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


def choose(hosts: Sequence[Probed]) -> Rdma:
    """Choose InfiniBand when all hosts have a port that is ACTIVE, else RoCE, else plain
    Ethernet.
    """
    for layer, fabric in _LAYERS.items():
        usable = [[pair for pair in _ports(host) if _fits(*pair, layer)] for host in hosts]
        if all(usable):
            selected = [
                _beside_gpus(host, _fastest(pairs))
                for host, pairs in zip(hosts, usable, strict=True)
            ]
            return Rdma(
                fabric=fabric,
                hosts=tuple(_devices(pairs, fabric) for pairs in selected),
                why=(_all_kept(fabric, selected), *_each_port(hosts, fabric, selected)),
                warnings=tuple(_warnings(hosts, fabric, selected)),
            )
    return _unusable(hosts)


def ethernet(hosts: Sequence[Probed], why: Sequence[str], warnings: Sequence[str] = ()) -> Rdma:
    """Return plain Ethernet, on which no RDMA device is used; `why` says why not."""
    none = tuple(Devices() for _ in hosts)
    return Rdma(fabric="ethernet", hosts=none, why=tuple(why), warnings=tuple(warnings))


def _ports(host: Probed) -> list[_Pair]:
    devices = sorted(host.survey.rdma, key=lambda device: natural(device.name))
    return [(device, port) for device in devices for port in device.ports]


def _fits(device: RdmaDevice, port: RdmaPort, layer: str) -> bool:
    if _SOFTWARE.match(device.name) or port.state != "ACTIVE" or port.link_layer != layer:
        return False
    return layer == "InfiniBand" or bool(_v2(port))


def _v2(port: RdmaPort, address: str = "") -> set[int]:
    """Return the indexes of RoCE v2 in a port's GID table, of addresses that begin so."""
    return {
        gid.index
        for gid in port.gids
        if gid.kind.lower() == "roce v2" and gid.value.lower().startswith(address)
    }


def _fastest(pairs: Sequence[_Pair]) -> list[_Pair]:
    rate = max(port.rate for _, port in pairs)
    return [(device, port) for device, port in pairs if port.rate == rate]


def _beside_gpus(host: Probed, pairs: Sequence[_Pair]) -> list[_Pair]:
    """Leave out ports to which every GPU has a nearer one: as fast as the others, but for storage
    or management (their PCIe distances: NVIDIA/nccl issue 1264, bytedance/flux issue 14).

    What `nvidia-smi topo -m` does not tell of is kept.
    """
    affinities = [gpu.affinity for gpu in host.survey.gpus]
    # One that is down has its place all the same.
    down = [device for device, port in _ports(host) if port.state != "ACTIVE"]
    devices = [*(device for device, _ in pairs), *down]
    nearest = [
        min((_distance(affinity, device) for device in devices), default=0)
        for affinity in affinities
    ]
    return [
        (device, port)
        for device, port in pairs
        if not any(device.name in affinity for affinity in affinities)
        or any(
            _distance(affinity, device) <= least
            for affinity, least in zip(affinities, nearest, strict=True)
        )
    ]


def _distance(affinity: Mapping[str, str], device: RdmaDevice) -> int:
    """Return how far a GPU is from a device; one that it does not know is further than all."""
    level = affinity.get(device.name, "")
    return _NEAR.index(level) if level in _NEAR else len(_NEAR)


def _devices(ports: Sequence[_Pair], fabric: Fabric) -> Devices:
    # Of a bond, the GID table has the interface's name.
    netdevs = {netdev for device, _ in ports for netdev in device.netdevs}
    netdevs |= {gid.netdev for _, port in ports for gid in port.gids if gid.netdev}
    common_indexes = set.intersection(*(_v2(port, _IPV4) for _, port in ports))
    return Devices(
        hca=tuple(_spelled(device, port) for device, port in ports),
        netdevs=frozenset(netdevs),
        gid=min(common_indexes, default=None) if fabric == "roce" else None,
    )


def _all_kept(fabric: Fabric, selected: Sequence[list[_Pair]]) -> str:
    """Say how many ports of the fabric each host has, and how fast they are."""
    kind = "InfiniBand" if fabric == "infiniband" else "RoCE v2"
    counts, rates = {len(pairs) for pairs in selected}, {_rate(pairs) for pairs in selected}
    ports = f"{kind} port" if counts == {1} else f"{kind} ports"
    return f"{fabric}: {_span(counts)} ACTIVE {ports} at {_span(rates)} Gbit/s on each host"


def _rate(ports: Sequence[_Pair]) -> float:
    """Return the rate of the ports that a host uses, which is that of each."""
    return ports[0][1].rate


def _span(numbers: Set[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _each_port(
    hosts: Sequence[Probed], fabric: Fabric, selected: Sequence[list[_Pair]]
) -> tuple[str, ...]:
    """Say what is known of each port that is used, then why the others are not."""
    included, excluded = list[tuple[str, str]](), list[tuple[str, str]]()
    for host, pairs in zip(hosts, selected, strict=True):
        for device, port in _ports(host):
            if (device, port) in pairs:
                included.append((_about(host, device, port), host.name))
            else:
                reason = _reason(host, device, port, fabric, _rate(pairs))
                excluded.append((f"not {_spelled(device, port)}: {reason}", host.name))
    return lines([*included, *excluded], hosts)


def _warnings(
    hosts: Sequence[Probed], fabric: Fabric, selected: Sequence[list[_Pair]]
) -> Iterator[str]:
    without_devices = [host.name for host in hosts if not host.facts.infiniband]
    if without_devices:
        yield (
            f"{fold(without_devices)}: RDMA ports are ACTIVE, but /dev/infiniband is not there:"
            " `sudo modprobe ib_uverbs`"
        )
    with_infiniband = [
        host.name for host in hosts if any(_fits(*pair, "InfiniBand") for pair in _ports(host))
    ]
    if fabric == "roce" and with_infiniband:
        without = [host.name for host in hosts if host.name not in with_infiniband]
        yield (
            f"{fold(without)}: no ACTIVE InfiniBand port, which {fold(with_infiniband)} has: RoCE"
            " is all that they share"
        )
    rates = {_rate(pairs) for pairs in selected}
    if len(rates) > 1 or len({len(pairs) for pairs in selected}) > 1:
        counts = [
            f"{host.name} {len(pairs)}" + f" at {_rate(pairs):g} Gbit/s" * (len(rates) > 1)
            for host, pairs in zip(hosts, selected, strict=True)
        ]
        yield (
            f"the hosts have different numbers or rates of RDMA ports ({'; '.join(counts)}): the"
            " slowest sets the pace"
        )


def _about(host: Probed, device: RdmaDevice, port: RdmaPort) -> str:
    """Say where a device is: its interface, its NUMA node, and the GPUs that it is nearest to."""
    parts = [f"{port.rate:g} Gbit/s", *sorted(device.netdevs)]
    parts += [f"NUMA node {device.numa}"] if device.numa is not None else []
    parts += filter(None, [_nearest(host, device)])
    return f"{_spelled(device, port)}: {', '.join(parts)}"


def _nearest(host: Probed, device: RdmaDevice) -> str:
    """Return `PIX to GPU 0, 1`: how near it is to a GPU at best, and to which ones; empty when that
    is not known.
    """
    gpus_by_level: dict[str, list[int]] = {}
    for gpu in host.survey.gpus:
        if device.name in gpu.affinity:
            gpus_by_level.setdefault(gpu.affinity[device.name], []).append(gpu.index)
    nearest = next((level for level in _NEAR if level in gpus_by_level), None)
    return f"{nearest} to GPU {', '.join(map(str, gpus_by_level[nearest]))}" if nearest else ""


def _spelled(device: RdmaDevice, port: RdmaPort) -> str:
    return device.name if len(device.ports) == 1 else f"{device.name}:{port.number}"


def _reason(
    host: Probed, device: RdmaDevice, port: RdmaPort, fabric: Fabric, fabric_rate: float
) -> str:
    if _SOFTWARE.match(device.name):
        return "RDMA made of software, over the same network as TCP"
    if port.state != "ACTIVE":
        return f"its port is {port.state}"
    if _LAYERS.get(port.link_layer) != fabric:
        return f"its link is {port.link_layer} ({port.rate:g} Gbit/s), not the compute fabric"
    if port.rate != fabric_rate:
        return f"{port.rate:g} Gbit/s, and the compute fabric has {fabric_rate:g}"
    if fabric == "roce" and not _v2(port):
        return "it has no RoCE v2 address"
    return f"{_nearest(host, device)} at best, and every GPU has a nearer port"


def _unusable(hosts: Sequence[Probed]) -> Rdma:
    """Say why there is no RDMA; a fabric that only some hosts have is worth a warning."""
    hardware = [
        [pair for pair in _ports(host) if not _SOFTWARE.match(pair[0].name)] for host in hosts
    ]
    if not any(hardware):
        has_software = any(host.survey.rdma for host in hosts)
        suffix = " but those made of software (rxe, siw)" if has_software else ""
        return ethernet(hosts, [f"ethernet: no host has an RDMA device{suffix}"])
    active = [[pair for pair in pairs if pair[1].state == "ACTIVE"] for pairs in hardware]
    if all(any(_is_efa(*pair) for pair in pairs) for pairs in active):
        text = (
            "the hosts' RDMA is AWS EFA, which NCCL uses through a plugin that vLLM's own image"
            " does not have"
        )
        fix = (
            "the network is left to TCP; with an image that has aws-ofi-nccl, set `network:"
            " {fabric: infiniband}`, which hands out the devices"
        )
        return ethernet(hosts, [f"ethernet: {text}"], [f"{text}: {fix}"])
    with_ports = [host.name for host, pairs in zip(hosts, active, strict=True) if pairs]
    without = [host.name for host in hosts if host.name not in with_ports]
    text = "the hosts' RDMA ports are not of one fabric"
    if without:
        which = f", which {fold(with_ports)} has" if with_ports else ""
        text = f"no ACTIVE RDMA port on {fold(without)}{which}"
    states = dict.fromkeys(
        f"{_spelled(device, port)}: {port.state} {port.link_layer}"
        + ("" if _v2(port) else ", no RoCE v2 address")
        for host in hosts
        for device, port in _ports(host)
    )
    consequence = "the network is left to TCP, which is many times slower; see `ibv_devinfo` there"
    return ethernet(hosts, [f"ethernet: {text}", *states], [f"{text}: {consequence}"])


def _is_efa(device: RdmaDevice, port: RdmaPort) -> bool:
    named = _EFA.match(device.name) is not None or device.model.lower().startswith("efa")
    return named and port.link_layer not in _LAYERS
