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
    places = [
        place for host, rdma in zip(hosts, netdevs, strict=True) for place in _places(host, rdma)
    ]
    networks = _by_network(places)
    common = {
        network: on
        for network, on in networks.items()
        if len(on) == len(hosts) and _twice(on) is None
    }
    if not common:
        return _lone(hosts, places)
    best = max(common, key=lambda net: (_common(common[net]), -int(net.network_address)))
    others = [
        f"not {', '.join(dict.fromkeys(place.interface for place in on))} {network}:"
        f" {_why_not(on, common[best])}"
        for network, on in sorted(networks.items())
        if network != best
    ]
    unfit = [
        (f"not {place.interface} {place.network}: {place.unfit}", place.host)
        for place in places
        if place.unfit
    ]
    return Shared(
        network=best,
        places=tuple(common[best]),
        why=(f"{best}: {_about(common[best])}", *others, *lines(unfit, hosts)),
        warnings=_mtus(common[best]),
    )


def _by_network(places: Sequence[Place]) -> dict[ipaddress.IPv4Network, list[Place]]:
    """Return the best place of each host on each network, in the order of the hosts."""
    networks: dict[ipaddress.IPv4Network, dict[str, Place]] = {}
    for place in places:
        if not place.unfit:
            best = networks.setdefault(place.network, {}).setdefault(place.host, place)
            if place.merit > best.merit:
                networks[place.network][place.host] = place
    return {network: list(on.values()) for network, on in networks.items()}


def _places(host: Probed, rdma: Set[str]) -> Iterator[Place]:
    """Yield the IPv4 addresses of a host."""
    nics = host.survey.nics
    if nics is None:  # of a host that was not surveyed, what the probe knows
        nics = tuple(
            Nic(name=known.interface, up=known.up, mtu=0, addresses=(f"{known.ip}/{known.prefix}",))
            for known in host.facts.addresses or ()
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
    own = next((text for pattern, text in _OWN if pattern.fullmatch(nic.name)), "")
    if own:
        return own
    if not nic.up:
        return "the link is down"
    if address.is_link_local:
        return "link-local, an address that may change at every start"
    if address.is_unspecified or address.is_multicast or address.network.prefixlen == 0:
        return "no address of a host"
    return _ALONE if address.network.prefixlen == 32 else ""


def _lone(hosts: Sequence[Probed], places: Sequence[Place]) -> Shared:
    """Take the addresses of the default route where each stands alone (/32), as on Google Cloud:
    its router joins them. Raises RequestError where hosts have none.
    """
    routed: dict[str, Place] = {}
    for place in places:
        if place.merit.default and place.unfit == _ALONE:
            routed.setdefault(place.host, place)
    kept = tuple(routed.values())
    if len(hosts) < 2 or len(kept) < len(hosts) or _twice(kept) is not None:
        raise _none(hosts, places)
    around = kept[0].network
    while not all(place.network.subnet_of(around) for place in kept):
        around = around.supernet()
    text = (
        "the hosts share no subnet: each has an address of its own (/32) on the default route, and"
        " a router between them"
    )
    warning = (
        "the hosts' addresses are in no common subnet (/32): `vlaunch check` tries whether they"
        " reach each other"
    )
    return Shared(network=around, places=kept, why=(text,), warnings=(warning, *_mtus(kept)))


def _twice(places: Iterable[Place]) -> str | None:
    """Return an address that more than one host says it has."""
    counts = Counter(place.ip for place in places)
    return next((ip for ip, count in counts.items() if count > 1), None)


def _common(places: Iterable[Place]) -> Merit:
    """Return the merit that all places have."""
    return Merit(*map(min, zip(*(place.merit for place in places), strict=True)))


def _about(places: Sequence[Place]) -> str:
    merit = _common(places)
    said = ["on all hosts" if len(places) > 1 else "an address of this host"]
    said += ["on an interface of the RDMA devices"] if merit.rdma else []
    said += [f"{merit.speed / 1000:g} Gbit/s"] if merit.speed else []
    mtus = {place.mtu for place in places}
    said += [f"MTU {mtus.pop()}"] if len(mtus) == 1 and 0 not in mtus else []
    said += ["the default route"] if merit.default else []
    return ", ".join(said)


def _why_not(places: Sequence[Place], chosen: Sequence[Place]) -> str:
    """Say why a network was not chosen, by the places of the hosts on it."""
    if len(places) < len(chosen):
        return f"only on {fold([place.host for place in places])}"
    twice = _twice(places)
    if twice is not None:
        return f"{twice} is on more than one host, so it is not one network"
    less = _common(places)
    slower = f"slower ({less.speed / 1000:g} Gbit/s)" if less.speed else "of unknown speed"
    worse = (
        "no interface of the RDMA devices",
        "not on physical interfaces",
        slower,
        "on top of another interface",
        "without the default route",
    )
    pairs = zip(_common(chosen), less, worse, strict=True)
    return "also on all hosts, but " + next(
        (text for best, own, text in pairs if best != own), "one is enough"
    )


def _mtus(places: Iterable[Place]) -> tuple[str, ...]:
    sizes = grouped((place.mtu, place.host) for place in places)
    if len(sizes) == 1:
        return ()
    told = "; ".join(f"{mtu} on {fold(names)}" for mtu, names in sorted(sizes.items()))
    return (f"the MTU differs ({told}): large packets may be dropped without a word",)


def _none(hosts: Sequence[Probed], places: Sequence[Place]) -> RequestError:
    told = grouped(
        (
            place.host,
            f"{place.interface} {place.ip}/{place.network.prefixlen}"
            + f" ({place.unfit})" * bool(place.unfit),
        )
        for place in places
    )
    return RequestError(
        "the hosts share no network, so they cannot be one cluster",
        evidence=[
            f"{host.name}: "
            + (", ".join(told.get(host.name, ())) or "no IPv4 address besides loopback")
            for host in hosts
        ],
        hint=(
            "give the hosts addresses in one subnet (`ip -br addr` shows what they have), or write"
            " the inventory by hand"
        ),
    )
