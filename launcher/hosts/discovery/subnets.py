"""Network of the cluster: the one that all hosts have, on the best interface, and what is passed
over.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from launcher.core.domain import fold
from launcher.core.errors import RequestError
from launcher.hosts.discovery.described import grouped, lines
from launcher.hosts.discovery.shape import Probed
from launcher.tools.survey import Nic

# Interfaces that software on a host makes for itself. Their addresses are often the same on every
# host.
_OWN = (
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
# What an administrator puts on top of a card; it has the card's speed, or says one of its own when
# nothing is below it.
_ON_TOP = re.compile(r"(?:v?m?br|vlan|macvlan|ipvlan).*|.+\.\d+")
_BOND = re.compile(r"bond|team")
_ALONE = "one address and no network around it"


class Merit(NamedTuple):
    """Reasons for an interface, the first counts most: it belongs to an RDMA device, a card is it
    or is below it, its speed (Mbit/s), it is a card itself, it has the default route.
    """

    rdma: bool
    physical: bool
    speed: int
    card: bool
    default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An address of a host on one of its interfaces; `unfit` says why it cannot be meant."""

    host: str
    interface: str
    ip: str
    network: ipaddress.IPv4Network
    mtu: int
    merit: Merit
    unfit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The network that was chosen: the places on it in the order of the hosts, and the lines about
    the others.
    """

    network: ipaddress.IPv4Network
    places: tuple[Place, ...]
    why: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def choose(hosts: Sequence[Probed], netdevs: Sequence[Set[str]]) -> Shared:
    """Choose the network; `netdevs` are the interfaces of each host's compute devices.

    Raises RequestError, with every host's networks, when there is none that all have.
    """
    candidates = [
        candidate
        for host, rdma in zip(hosts, netdevs, strict=True)
        for candidate in _places(host, rdma)
    ]
    networks = _by_network(candidates)
    common = {
        network: members
        for network, members in networks.items()
        if len(members) == len(hosts) and _twice(members) is None
    }
    if not common:
        return _lone(hosts, candidates)
    best = max(common, key=lambda net: (_common(common[net]), -int(net.network_address)))
    others = [
        f"not {', '.join(dict.fromkeys(candidate.interface for candidate in members))} {network}:"
        f" {_why_not(members, common[best])}"
        for network, members in sorted(networks.items())
        if network != best
    ]
    unfit = [
        (f"not {candidate.interface} {candidate.network}: {candidate.unfit}", candidate.host)
        for candidate in candidates
        if candidate.unfit
    ]
    return Shared(
        network=best,
        places=tuple(common[best]),
        why=(f"{best}: {_about(common[best])}", *others, *lines(unfit, hosts)),
        warnings=_mtus(common[best]),
    )


def _by_network(addresses: Sequence[Place]) -> dict[ipaddress.IPv4Network, list[Place]]:
    """Return the best place of each host on each network, in the order of the hosts."""
    networks: dict[ipaddress.IPv4Network, dict[str, Place]] = {}
    for address in addresses:
        if not address.unfit:
            best = networks.setdefault(address.network, {}).setdefault(address.host, address)
            if address.merit > best.merit:
                networks[address.network][address.host] = address
    return {network: list(by_host.values()) for network, by_host in networks.items()}


def _places(host: Probed, rdma: Set[str]) -> Iterator[Place]:
    """Yield the IPv4 addresses of a host."""
    nics = host.survey.nics
    if nics is None:  # of a host that was not surveyed, what the probe knows
        nics = tuple(
            Nic(name=item.interface, up=item.up, mtu=0, addresses=(f"{item.ip}/{item.prefix}",))
            for item in host.facts.addresses or ()
        )
    for nic in nics:
        merit = Merit(
            rdma=nic.name in rdma,
            physical=_backed(nic, nics),
            speed=max(0, nic.speed or 0),
            card=_is_card(nic),
            default=nic.name == host.survey.default_nic,
        )
        for address in _ipv4(nic):
            yield Place(
                host=host.name,
                interface=nic.name,
                ip=str(address.ip),
                network=address.network,
                mtu=nic.mtu,
                merit=merit,
                unfit=_unfit(nic, address),
            )


def _ipv4(nic: Nic) -> Iterator[ipaddress.IPv4Interface]:
    """Yield the IPv4 addresses of an interface that are not the host's alone."""
    for text in nic.addresses if nic.name != "lo" else ():
        try:
            address = ipaddress.ip_interface(text)
        except ValueError:
            continue
        if isinstance(address, ipaddress.IPv4Interface) and not address.is_loopback:
            yield address


def _is_card(nic: Nic) -> bool:
    return nic.physical or _BOND.match(nic.name) is not None


def _backed(nic: Nic, nics: Sequence[Nic]) -> bool:
    """Return whether a card is an interface, or is below it: of its name (`ens1.100`), or as fast
    as it is.
    """
    if _is_card(nic):
        return True
    cards = [card for card in nics if _is_card(card) and card.up]
    named = any(card.name == nic.name.rpartition(".")[0] for card in cards)
    return named or (
        _ON_TOP.fullmatch(nic.name) is not None
        and any(card.speed == nic.speed for card in cards if card.speed)
    )


def _unfit(nic: Nic, address: ipaddress.IPv4Interface) -> str:
    origin = next((text for pattern, text in _OWN if pattern.fullmatch(nic.name)), "")
    if origin:
        return origin
    if not nic.up:
        return "the link is down"
    if address.is_link_local:
        return "link-local, an address that may change at every start"
    if address.is_unspecified or address.is_multicast or address.network.prefixlen == 0:
        return "no address of a host"
    return _ALONE if address.network.prefixlen == 32 else ""


def _lone(hosts: Sequence[Probed], candidates: Sequence[Place]) -> Shared:
    """Take the addresses of the default route where each stands alone (/32), as on Google Cloud:
    its router joins them. Raises RequestError where hosts have none.
    """
    routed: dict[str, Place] = {}
    for candidate in candidates:
        if candidate.merit.default and candidate.unfit == _ALONE:
            routed.setdefault(candidate.host, candidate)
    addresses = tuple(routed.values())
    if len(hosts) < 2 or len(addresses) < len(hosts) or _twice(addresses) is not None:
        raise _none(hosts, candidates)
    network = addresses[0].network
    while not all(candidate.network.subnet_of(network) for candidate in addresses):
        network = network.supernet()
    text = (
        "the hosts share no subnet: each has an address of its own (/32) on the default route, and"
        " a router between them"
    )
    warning = (
        "the hosts' addresses are in no common subnet (/32): `vlaunch check` tries whether they"
        " reach each other"
    )
    return Shared(
        network=network, places=addresses, why=(text,), warnings=(warning, *_mtus(addresses))
    )


def _twice(addresses: Iterable[Place]) -> str | None:
    """Return an address that more than one host says it has."""
    counts = Counter(address.ip for address in addresses)
    return next((ip for ip, count in counts.items() if count > 1), None)


def _common(addresses: Iterable[Place]) -> Merit:
    """Return the merit that all places have."""
    return Merit(*map(min, zip(*(address.merit for address in addresses), strict=True)))


def _about(addresses: Sequence[Place]) -> str:
    merit = _common(addresses)
    parts = ["on all hosts" if len(addresses) > 1 else "an address of this host"]
    parts += ["on an interface of the RDMA devices"] if merit.rdma else []
    parts += [f"{merit.speed / 1000:g} Gbit/s"] if merit.speed else []
    mtus = {address.mtu for address in addresses}
    parts += [f"MTU {mtus.pop()}"] if len(mtus) == 1 and 0 not in mtus else []
    parts += ["the default route"] if merit.default else []
    return ", ".join(parts)


def _why_not(addresses: Sequence[Place], chosen: Sequence[Place]) -> str:
    """Say why a network was not chosen, by the places of the hosts on it."""
    if len(addresses) < len(chosen):
        return f"only on {fold([address.host for address in addresses])}"
    duplicate = _twice(addresses)
    if duplicate is not None:
        return f"{duplicate} is on more than one host, so it is not one network"
    merit = _common(addresses)
    slower = f"slower ({merit.speed / 1000:g} Gbit/s)" if merit.speed else "of unknown speed"
    drawbacks = (
        "no interface of the RDMA devices",
        "not on physical interfaces",
        slower,
        "on top of another interface",
        "without the default route",
    )
    pairs = zip(_common(chosen), merit, drawbacks, strict=True)
    return "also on all hosts, but " + next(
        (text for best, value, text in pairs if best != value), "one is enough"
    )


def _mtus(addresses: Iterable[Place]) -> tuple[str, ...]:
    sizes = grouped((address.mtu, address.host) for address in addresses)
    if len(sizes) == 1:
        return ()
    listing = "; ".join(f"{mtu} on {fold(names)}" for mtu, names in sorted(sizes.items()))
    return (f"the MTU differs ({listing}): large packets may be dropped without a word",)


def _none(hosts: Sequence[Probed], candidates: Sequence[Place]) -> RequestError:
    listings = grouped(
        (
            candidate.host,
            f"{candidate.interface} {candidate.ip}/{candidate.network.prefixlen}"
            + f" ({candidate.unfit})" * bool(candidate.unfit),
        )
        for candidate in candidates
    )
    return RequestError(
        "the hosts share no network, so they cannot be one cluster",
        evidence=[
            f"{host.name}: "
            + (", ".join(listings.get(host.name, ())) or "no IPv4 address besides loopback")
            for host in hosts
        ],
        hint=(
            "give the hosts addresses in one subnet (`ip -br addr` shows what they have), or write"
            " the inventory by hand"
        ),
    )
