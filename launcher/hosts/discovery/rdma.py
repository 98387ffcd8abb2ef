"""Choice of the RDMA fabric, its devices on each host, and their GID index."""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from launcher.core.domain import Fabric, fold, natural_key
from launcher.hosts.discovery.host_descriptions import annotate_hosts
from launcher.hosts.discovery.shape import ScannedHost
from launcher.tools.host.survey import RdmaDevice, RdmaPort

_LAYERS: dict[str, Fabric] = {"InfiniBand": "infiniband", "Ethernet": "roce"}
# Soft RoCE and Soft iWARP (names as in rdma-core's documentation) use sockets, so are not faster
# than TCP.
_SOFTWARE = re.compile(r"rxe|siw")
# AWS EFA is neither InfiniBand nor Ethernet. It needs /dev/infiniband and an image with NCCL's
# plugin (https://github.com/aws/aws-ofi-nccl), unlike vLLM's own: never chosen automatically.
_EFA = re.compile(r"efa|rdmap\d+s\d+")
# Near to far (`nvidia-smi topo -m`).
_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
# Prefix of IPv4 addresses in the GID table, for RoCE v2 over IPv4.
_IPV4_PREFIX = "0000:0000:0000:0000:0000:ffff:"

_Pair = tuple[RdmaDevice, RdmaPort]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevices:
    """RDMA devices of a host for NCCL_IB_HCA, their interfaces, and a common RoCE v2 index."""

    hca: tuple[str, ...] = ()
    netdevs: frozenset[str] = frozenset()
    gid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricChoice:
    """The fabric and the devices of each host, in order; `why` explains the exclusions."""

    fabric: Fabric
    hosts: tuple[HostDevices, ...]
    why: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def choose_fabric(hosts: Sequence[ScannedHost]) -> FabricChoice:
    """Choose InfiniBand if all hosts have an ACTIVE port, else RoCE, else plain Ethernet."""
    for layer, fabric in _LAYERS.items():
        usable = [[pair for pair in _all_ports(host) if _is_usable(*pair, layer)] for host in hosts]
        if all(usable):
            selected = [
                _ports_near_gpus(host, _fastest_ports(pairs))
                for host, pairs in zip(hosts, usable, strict=True)
            ]
            return FabricChoice(
                fabric=fabric,
                hosts=tuple(_host_devices(pairs, fabric) for pairs in selected),
                why=(_summarize_ports(fabric, selected), *_describe_ports(hosts, fabric, selected)),
                warnings=tuple(_warnings(hosts, fabric, selected)),
            )
    return _no_common_fabric(hosts)


def plain_ethernet(
    hosts: Sequence[ScannedHost], why: Sequence[str], warnings: Sequence[str] = ()
) -> FabricChoice:
    """Return plain Ethernet without RDMA devices, and the reasons."""
    none = tuple(HostDevices() for _ in hosts)
    return FabricChoice(fabric="ethernet", hosts=none, why=tuple(why), warnings=tuple(warnings))


def _all_ports(host: ScannedHost) -> list[_Pair]:
    devices = sorted(host.survey.rdma, key=lambda device: natural_key(device.name))
    return [(device, port) for device in devices for port in device.ports]


def _is_usable(device: RdmaDevice, port: RdmaPort, layer: str) -> bool:
    if _SOFTWARE.match(device.name) or port.state != "ACTIVE" or port.link_layer != layer:
        return False
    return layer == "InfiniBand" or bool(_roce_v2_indexes(port))


def _roce_v2_indexes(port: RdmaPort, address: str = "") -> set[int]:
    """Return the RoCE v2 indexes in a port's GID table, of addresses with this prefix."""
    return {
        gid.index
        for gid in port.gids
        if gid.kind.lower() == "roce v2" and gid.value.lower().startswith(address)
    }


def _fastest_ports(pairs: Sequence[_Pair]) -> list[_Pair]:
    rate = max(port.rate for _, port in pairs)
    return [(device, port) for device, port in pairs if port.rate == rate]


def _ports_near_gpus(host: ScannedHost, pairs: Sequence[_Pair]) -> list[_Pair]:
    """Exclude ports if every GPU has a nearer one: they serve storage or management (PCIe
    distances: NVIDIA/nccl issue 1264, bytedance/flux issue 14).

    Ports unknown to `nvidia-smi topo -m` stay.
    """
    affinities = [gpu.affinity for gpu in host.survey.gpus]
    # Ports that are down count for distances.
    down = [device for device, port in _all_ports(host) if port.state != "ACTIVE"]
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
    """Return the distance of a device from a GPU; unknown devices are the farthest."""
    level = affinity.get(device.name, "")
    return _DISTANCES.index(level) if level in _DISTANCES else len(_DISTANCES)


def _host_devices(ports: Sequence[_Pair], fabric: Fabric) -> HostDevices:
    # For a bond, the GID table has the interface's name.
    netdevs = {netdev for device, _ in ports for netdev in device.netdevs}
    netdevs |= {gid.netdev for _, port in ports for gid in port.gids if gid.netdev}
    common_indexes = set.intersection(*(_roce_v2_indexes(port, _IPV4_PREFIX) for _, port in ports))
    return HostDevices(
        hca=tuple(_port_name(device, port) for device, port in ports),
        netdevs=frozenset(netdevs),
        gid=min(common_indexes, default=None) if fabric == "roce" else None,
    )


def _summarize_ports(fabric: Fabric, selected: Sequence[list[_Pair]]) -> str:
    kind = "InfiniBand" if fabric == "infiniband" else "RoCE v2"
    counts, rates = {len(pairs) for pairs in selected}, {_port_rate(pairs) for pairs in selected}
    ports = f"{kind} port" if counts == {1} else f"{kind} ports"
    return f"{fabric}: {_span(counts)} ACTIVE {ports} at {_span(rates)} Gbit/s on each host"


def _port_rate(ports: Sequence[_Pair]) -> float:
    return ports[0][1].rate


def _span(numbers: Set[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _describe_ports(
    hosts: Sequence[ScannedHost], fabric: Fabric, selected: Sequence[list[_Pair]]
) -> tuple[str, ...]:
    included, excluded = list[tuple[str, str]](), list[tuple[str, str]]()
    for host, pairs in zip(hosts, selected, strict=True):
        for device, port in _all_ports(host):
            if (device, port) in pairs:
                included.append((_describe_port(host, device, port), host.name))
            else:
                reason = _exclusion_reason(host, device, port, fabric, _port_rate(pairs))
                excluded.append((f"not {_port_name(device, port)}: {reason}", host.name))
    return annotate_hosts([*included, *excluded], hosts)


def _warnings(
    hosts: Sequence[ScannedHost], fabric: Fabric, selected: Sequence[list[_Pair]]
) -> Iterator[str]:
    without_devices = [host.name for host in hosts if not host.facts.infiniband]
    if without_devices:
        yield (
            f"{fold(without_devices)}: RDMA ports are ACTIVE, but /dev/infiniband is missing: `sudo"
            " modprobe ib_uverbs`"
        )
    with_infiniband = [
        host.name
        for host in hosts
        if any(_is_usable(*pair, "InfiniBand") for pair in _all_ports(host))
    ]
    if fabric == "roce" and with_infiniband:
        without = [host.name for host in hosts if host.name not in with_infiniband]
        yield (
            f"{fold(without)}: no ACTIVE InfiniBand port, which {fold(with_infiniband)} has: all"
            " hosts share only RoCE"
        )
    rates = {_port_rate(pairs) for pairs in selected}
    if len(rates) > 1 or len({len(pairs) for pairs in selected}) > 1:
        counts = [
            f"{host.name} {len(pairs)}" + f" at {_port_rate(pairs):g} Gbit/s" * (len(rates) > 1)
            for host, pairs in zip(hosts, selected, strict=True)
        ]
        yield (
            f"the hosts have different numbers or rates of RDMA ports ({'; '.join(counts)}): the"
            " slowest limits all others"
        )


def _describe_port(host: ScannedHost, device: RdmaDevice, port: RdmaPort) -> str:
    parts = [f"{port.rate:g} Gbit/s", *sorted(device.netdevs)]
    parts += [f"NUMA node {device.numa}"] if device.numa is not None else []
    parts += filter(None, [_nearest_gpus(host, device)])
    return f"{_port_name(device, port)}: {', '.join(parts)}"


def _nearest_gpus(host: ScannedHost, device: RdmaDevice) -> str:
    """Return `PIX to GPU 0, 1`, the shortest distance and its GPUs; empty if unknown."""
    gpus_by_level: dict[str, list[int]] = {}
    for gpu in host.survey.gpus:
        if device.name in gpu.affinity:
            gpus_by_level.setdefault(gpu.affinity[device.name], []).append(gpu.index)
    nearest = next((level for level in _DISTANCES if level in gpus_by_level), None)
    return f"{nearest} to GPU {', '.join(map(str, gpus_by_level[nearest]))}" if nearest else ""


def _port_name(device: RdmaDevice, port: RdmaPort) -> str:
    return device.name if len(device.ports) == 1 else f"{device.name}:{port.number}"


def _exclusion_reason(
    host: ScannedHost, device: RdmaDevice, port: RdmaPort, fabric: Fabric, fabric_rate: float
) -> str:
    if _SOFTWARE.match(device.name):
        return "software RDMA, over the same network as TCP"
    if port.state != "ACTIVE":
        return f"its port is {port.state}"
    if _LAYERS.get(port.link_layer) != fabric:
        return f"its link is {port.link_layer} ({port.rate:g} Gbit/s), not the compute fabric"
    if port.rate != fabric_rate:
        return f"{port.rate:g} Gbit/s, and the compute fabric has {fabric_rate:g}"
    if fabric == "roce" and not _roce_v2_indexes(port):
        return "it has no RoCE v2 address"
    return f"{_nearest_gpus(host, device)} at best, and every GPU has a nearer port"


def _no_common_fabric(hosts: Sequence[ScannedHost]) -> FabricChoice:
    """Explain the choice of Ethernet; a fabric on only some hosts is a warning."""
    hardware = [
        [pair for pair in _all_ports(host) if not _SOFTWARE.match(pair[0].name)] for host in hosts
    ]
    if not any(hardware):
        has_software = any(host.survey.rdma for host in hosts)
        suffix = " except software ones (rxe, siw)" if has_software else ""
        return plain_ethernet(hosts, [f"ethernet: no host has an RDMA device{suffix}"])
    active = [[pair for pair in pairs if pair[1].state == "ACTIVE"] for pairs in hardware]
    if all(any(_is_efa(*pair) for pair in pairs) for pairs in active):
        text = (
            "the hosts' RDMA is AWS EFA, which NCCL uses through a plugin that vLLM's own image"
            " does not have"
        )
        fix = (
            "the cluster will use TCP; with an image that has aws-ofi-nccl, set `network:"
            " {fabric: infiniband}`, which exposes the devices"
        )
        return plain_ethernet(hosts, [f"ethernet: {text}"], [f"{text}: {fix}"])
    return _different_fabrics(hosts, active)


def _different_fabrics(
    hosts: Sequence[ScannedHost], active: Sequence[Sequence[tuple[RdmaDevice, RdmaPort]]]
) -> FabricChoice:
    """Explain the choice of Ethernet by the `active` ports of each host, and their states."""
    with_ports = [host.name for host, pairs in zip(hosts, active, strict=True) if pairs]
    without = [host.name for host in hosts if host.name not in with_ports]
    text = "the hosts have RDMA ports of different fabrics"
    if without:
        owners = f", which {fold(with_ports)} has" if with_ports else ""
        text = f"no ACTIVE RDMA port on {fold(without)}{owners}"
    states = dict.fromkeys(
        f"{_port_name(device, port)}: {port.state} {port.link_layer}"
        + ("" if _roce_v2_indexes(port) else ", no RoCE v2 address")
        for host in hosts
        for device, port in _all_ports(host)
    )
    consequence = (
        "the cluster will use TCP, which is many times slower; run `ibv_devinfo` on the hosts"
    )
    return plain_ethernet(hosts, [f"ethernet: {text}", *states], [f"{text}: {consequence}"])


def _is_efa(device: RdmaDevice, port: RdmaPort) -> bool:
    named = _EFA.match(device.name) is not None or device.model.lower().startswith("efa")
    return named and port.link_layer not in _LAYERS
