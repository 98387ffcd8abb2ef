"""Choice of the cluster's network: one that all hosts share, on the best interface."""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from launcher.core.domain import fold
from launcher.core.errors import RequestError
from launcher.hosts.discovery.host_descriptions import annotate_hosts, group_names
from launcher.hosts.discovery.shape import ScannedHost
from launcher.tools.host.survey import Nic

# Interfaces created by software; their addresses are often equal on all hosts.
_SOFTWARE_INTERFACES = (
    (re.compile(r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}"), "docker's own bridge"),
    (
        re.compile(r"virbr\d+.*|vnet\d+|lxcbr\d+|lxdbr\d+|podman\d+|cni-podman\d+"),
        "a bridge for virtual machines or containers",
    ),
    (
        re.compile(
            r"cni\d*|flannel.*|cali.*|cilium.*|vxlan.*|kube-.*|nodelocaldns|tunl\d+|weave.*"
        ),
        "Kubernetes' own network",
    ),
    (re.compile(r"tun\d+|tap\d+|wg\d+|tailscale\d+|zt\w+|ppp\d+"), "a tunnel"),
)
# Interfaces stacked on a card, with its speed, or their own without a card.
_STACKED = re.compile(r"(?:v?m?br|vlan|macvlan|ipvlan).*|.+\.\d+")
_BOND = re.compile(r"bond|team")
_SINGLE_ADDRESS = "a single address without a network"


class Merit(NamedTuple):
    """Ranking of an interface, most important first: belongs to an RDMA device, is backed by a
    card, speed in Mbit/s, is a card itself, has the default route.
    """

    rdma: bool
    physical: bool
    speed: int
    card: bool
    default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAddress:
    """An address on an interface of a host; `unfit_reason` excludes it."""

    host: str
    interface: str
    ip: str
    network: ipaddress.IPv4Network
    mtu: int
    merit: Merit
    unfit_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNetwork:
    """The chosen network: the hosts' addresses on it, in order, and the reasons against others."""

    network: ipaddress.IPv4Network
    addresses: tuple[HostAddress, ...]
    why: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def choose_network(hosts: Sequence[ScannedHost], netdevs: Sequence[Set[str]]) -> SharedNetwork:
    """Choose the network; `netdevs` are the interfaces of each host's compute devices.

    Raises RequestError with all networks of each host if they share none.
    """
    candidates = [
        candidate
        for host, rdma in zip(hosts, netdevs, strict=True)
        for candidate in _host_addresses(host, rdma)
    ]
    networks = _group_by_network(candidates)
    common = {
        network: members
        for network, members in networks.items()
        if len(members) == len(hosts) and _duplicate_ip(members) is None
    }
    if not common:
        return _routed_addresses(hosts, candidates)
    best = max(common, key=lambda net: (_common_merit(common[net]), -int(net.network_address)))
    others = [
        f"not {', '.join(dict.fromkeys(candidate.interface for candidate in members))} {network}:"
        f" {_rejection_reason(members, common[best])}"
        for network, members in sorted(networks.items())
        if network != best
    ]
    unfit = [
        (f"not {candidate.interface} {candidate.network}: {candidate.unfit_reason}", candidate.host)
        for candidate in candidates
        if candidate.unfit_reason
    ]
    return SharedNetwork(
        network=best,
        addresses=tuple(common[best]),
        why=(f"{best}: {_describe_network(common[best])}", *others, *annotate_hosts(unfit, hosts)),
        warnings=_mtu_warnings(common[best]),
    )


def _group_by_network(
    addresses: Sequence[HostAddress],
) -> dict[ipaddress.IPv4Network, list[HostAddress]]:
    """Return the best address of each host on each network, in host order."""
    networks: dict[ipaddress.IPv4Network, dict[str, HostAddress]] = {}
    for address in addresses:
        if not address.unfit_reason:
            best = networks.setdefault(address.network, {}).setdefault(address.host, address)
            if address.merit > best.merit:
                networks[address.network][address.host] = address
    return {network: list(by_host.values()) for network, by_host in networks.items()}


def _host_addresses(host: ScannedHost, rdma: Set[str]) -> Iterator[HostAddress]:
    nics = host.survey.nics
    if nics is None:  # without a survey, use the probe
        nics = tuple(
            Nic(name=item.interface, up=item.up, mtu=0, addresses=(f"{item.ip}/{item.prefix}",))
            for item in host.facts.addresses or ()
        )
    for nic in nics:
        merit = Merit(
            rdma=nic.name in rdma,
            physical=_is_backed_by_card(nic, nics),
            speed=max(0, nic.speed or 0),
            card=_is_card(nic),
            default=nic.name == host.survey.default_nic,
        )
        for address in _ipv4_addresses(nic):
            yield HostAddress(
                host=host.name,
                interface=nic.name,
                ip=str(address.ip),
                network=address.network,
                mtu=nic.mtu,
                merit=merit,
                unfit_reason=_unfit_reason(nic, address),
            )


def _ipv4_addresses(nic: Nic) -> Iterator[ipaddress.IPv4Interface]:
    """Yield the IPv4 addresses of an interface, without loopback."""
    for text in nic.addresses if nic.name != "lo" else ():
        try:
            address = ipaddress.ip_interface(text)
        except ValueError:
            continue
        if isinstance(address, ipaddress.IPv4Interface) and not address.is_loopback:
            yield address


def _is_card(nic: Nic) -> bool:
    return nic.physical or _BOND.match(nic.name) is not None


def _is_backed_by_card(nic: Nic, nics: Sequence[Nic]) -> bool:
    """Return whether an interface is a card or on top of one: by name (`ens1.100`) or speed."""
    if _is_card(nic):
        return True
    cards = [card for card in nics if _is_card(card) and card.up]
    named = any(card.name == nic.name.rpartition(".")[0] for card in cards)
    return named or (
        _STACKED.fullmatch(nic.name) is not None
        and any(card.speed == nic.speed for card in cards if card.speed)
    )


def _unfit_reason(nic: Nic, address: ipaddress.IPv4Interface) -> str:
    origin = next(
        (text for pattern, text in _SOFTWARE_INTERFACES if pattern.fullmatch(nic.name)), ""
    )
    if origin:
        return origin
    if not nic.up:
        return "the link is down"
    if address.is_link_local:
        return "link-local, so its address may change at every boot"
    if address.is_unspecified or address.is_multicast or address.network.prefixlen == 0:
        return "not a host address"
    return _SINGLE_ADDRESS if address.network.prefixlen == 32 else ""


def _routed_addresses(
    hosts: Sequence[ScannedHost], candidates: Sequence[HostAddress]
) -> SharedNetwork:
    """Return the default route's addresses if each is alone (/32), as on Google Cloud, where a
    router joins them. Raises RequestError for hosts without one.
    """
    routed: dict[str, HostAddress] = {}
    for candidate in candidates:
        if candidate.merit.default and candidate.unfit_reason == _SINGLE_ADDRESS:
            routed.setdefault(candidate.host, candidate)
    addresses = tuple(routed.values())
    if len(hosts) < 2 or len(addresses) < len(hosts) or _duplicate_ip(addresses) is not None:
        raise _no_network_error(hosts, candidates)
    network = addresses[0].network
    while not all(candidate.network.subnet_of(network) for candidate in addresses):
        network = network.supernet()
    text = (
        "the hosts share no subnet: each has its own address (/32) on the default route, with a"
        " router in between"
    )
    warning = (
        "the hosts' addresses are in no common subnet (/32): `vlaunch check` tests whether they"
        " reach each other"
    )
    return SharedNetwork(
        network=network,
        addresses=addresses,
        why=(text,),
        warnings=(warning, *_mtu_warnings(addresses)),
    )


def _duplicate_ip(addresses: Iterable[HostAddress]) -> str | None:
    counts = Counter(address.ip for address in addresses)
    return next((ip for ip, count in counts.items() if count > 1), None)


def _common_merit(addresses: Iterable[HostAddress]) -> Merit:
    """Return the merit that all addresses have."""
    return Merit(*map(min, zip(*(address.merit for address in addresses), strict=True)))


def _describe_network(addresses: Sequence[HostAddress]) -> str:
    merit = _common_merit(addresses)
    parts = ["on all hosts" if len(addresses) > 1 else "an address of this host"]
    parts += ["on an interface of the RDMA devices"] if merit.rdma else []
    parts += [f"{merit.speed / 1000:g} Gbit/s"] if merit.speed else []
    mtus = {address.mtu for address in addresses}
    parts += [f"MTU {mtus.pop()}"] if len(mtus) == 1 and 0 not in mtus else []
    parts += ["the default route"] if merit.default else []
    return ", ".join(parts)


def _rejection_reason(addresses: Sequence[HostAddress], chosen: Sequence[HostAddress]) -> str:
    if len(addresses) < len(chosen):
        return f"only on {fold([address.host for address in addresses])}"
    duplicate = _duplicate_ip(addresses)
    if duplicate is not None:
        return f"{duplicate} is on more than one host, so these are different networks"
    merit = _common_merit(addresses)
    slower = f"slower ({merit.speed / 1000:g} Gbit/s)" if merit.speed else "of unknown speed"
    drawbacks = (
        "no interface of the RDMA devices",
        "not on physical interfaces",
        slower,
        "on top of another interface",
        "without the default route",
    )
    pairs = zip(_common_merit(chosen), merit, drawbacks, strict=True)
    return "also on all hosts, but " + next(
        (text for best, value, text in pairs if best != value), "one is enough"
    )


def _mtu_warnings(addresses: Iterable[HostAddress]) -> tuple[str, ...]:
    sizes = group_names((address.mtu, address.host) for address in addresses)
    if len(sizes) == 1:
        return ()
    listing = "; ".join(f"{mtu} on {fold(names)}" for mtu, names in sorted(sizes.items()))
    return (f"the MTU differs ({listing}): large packets may be dropped silently",)


def _no_network_error(
    hosts: Sequence[ScannedHost], candidates: Sequence[HostAddress]
) -> RequestError:
    listings = group_names(
        (
            candidate.host,
            f"{candidate.interface} {candidate.ip}/{candidate.network.prefixlen}"
            + f" ({candidate.unfit_reason})" * bool(candidate.unfit_reason),
        )
        for candidate in candidates
    )
    return RequestError(
        "the hosts share no network",
        evidence=[
            f"{host.name}: "
            + (", ".join(listings.get(host.name, ())) or "no IPv4 address besides loopback")
            for host in hosts
        ],
        hint=(
            "give the hosts addresses in one subnet (`ip -br addr` shows their addresses), or write"
            " the inventory by hand"
        ),
    )
