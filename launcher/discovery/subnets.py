"""Which of the hosts' networks the cluster runs on: the one that all have, on the best interface;
what is passed over.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.discovery.described import on_some
from launcher.discovery.shape import Probed
from launcher.errors import RequestError
from launcher.model import fold
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An address of a host on one of its interfaces; `physical`: a card is it, or is below it;
    `card`: is it.
    """

    interface: str
    ip: str
    network: ipaddress.IPv4Network
    speed: int
    mtu: int
    physical: bool
    default: bool
    card: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The network that was chosen: each host's place on it, by the index of the host, and the lines
    about the others.
    """

    network: ipaddress.IPv4Network
    places: tuple[Place, ...]
    why: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def choose(
    hosts: Sequence[Probed], netdevs: Mapping[int, frozenset[str]], order: Sequence[str]
) -> Shared:
    """Choose the network; `netdevs` are the interfaces of each host's compute devices, `order` the
    hosts' names.

    Raises RequestError, with every host's networks, when there is none that all have.
    """
    seen, passed = _sorted(hosts, netdevs, order)
    common = {
        network: places
        for network, places in seen.items()
        if len(places) == len(hosts) and _twice(places.values()) is None
    }
    if not common:
        lone = _lone(hosts, order)
        if lone is None:
            raise _none(hosts, order)
        return lone
    best = max(
        common,
        key=lambda network: (
            _common_merit(common[network], netdevs),
            -int(network.network_address),
        ),
    )
    chosen = common[best]
    others = [
        f"not {_interfaces(places)} {network}: {_why_not(places, chosen, netdevs, order)}"
        for network, places in sorted(seen.items())
        if network != best
    ]
    never = [f"not {text}{on_some(names, order)}" for text, names in passed.items()]
    kept = tuple(chosen[at] for at in range(len(hosts)))
    return Shared(
        network=best,
        places=kept,
        why=(f"{best}: {_about(chosen, netdevs)}", *others, *never),
        warnings=_mtus(kept, order),
    )


def _interfaces(places: Mapping[int, Place]) -> str:
    return ", ".join(dict.fromkeys(place.interface for place in places.values()))


def _why_not(
    places: Mapping[int, Place],
    chosen: Mapping[int, Place],
    netdevs: Mapping[int, frozenset[str]],
    order: Sequence[str],
) -> str:
    """Say why a network was not chosen, by the places of the hosts on it."""
    if len(places) < len(order):
        return f"only on {fold([order[at] for at in sorted(places)])}"
    twice = _twice(places.values())
    if twice is not None:
        return f"{twice} is on more than one host, so it is not one network"
    return f"also on all hosts, but {_worse(chosen, places, netdevs)}"


def _sorted(
    hosts: Sequence[Probed], netdevs: Mapping[int, frozenset[str]], order: Sequence[str]
) -> tuple[dict[ipaddress.IPv4Network, dict[int, Place]], dict[str, list[str]]]:
    """Return each network's hosts, by their index, with their best place on it; and what cannot be
    meant, with the names of the hosts that have it.
    """
    seen: dict[ipaddress.IPv4Network, dict[int, Place]] = {}
    passed: dict[str, list[str]] = {}
    for at, host in enumerate(hosts):
        for place, reason in _places(host):
            if reason:
                text = f"{place.interface} {place.network}: {reason}"
                passed.setdefault(text, []).append(order[at])
                continue
            there = seen.setdefault(place.network, {})
            rival = there.get(at)
            if rival is None or _merit(place, netdevs.get(at)) > _merit(rival, netdevs.get(at)):
                there[at] = place
    return seen, passed


def _places(host: Probed) -> Iterator[tuple[Place, str]]:
    """Yield the IPv4 addresses of a host, each with why it cannot be meant, or an empty string."""
    nics = _nics(host)
    for nic in nics:
        for address in _ipv4(nic):
            place = Place(
                interface=nic.name,
                ip=str(address.ip),
                network=address.network,
                speed=max(0, nic.speed or 0),
                mtu=nic.mtu,
                physical=_backed(nic, nics),
                default=nic.name == host.survey.default_nic,
                card=_is_card(nic),
            )
            yield place, _reason(nic, address)


def _nics(host: Probed) -> tuple[Nic, ...]:
    """Return a host's interfaces; of one that was not surveyed, what the probe knows of them."""
    if host.survey.nics is not None:
        return host.survey.nics
    return tuple(
        Nic(name=each.interface, up=each.up, mtu=0, addresses=(f"{each.ip}/{each.prefix}",))
        for each in host.facts.addresses or ()
    )


def _ipv4(nic: Nic) -> Iterator[ipaddress.IPv4Interface]:
    """Yield the IPv4 addresses of an interface that are not the host's alone."""
    if nic.name == "lo":
        return
    for text in nic.addresses:
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
    cards = [each for each in nics if _is_card(each) and each.up]
    named = any(each.name == nic.name.rpartition(".")[0] for each in cards)
    return named or (
        _ON_TOP.fullmatch(nic.name) is not None
        and any(each.speed == nic.speed for each in cards if each.speed)
    )


def _lone(hosts: Sequence[Probed], order: Sequence[str]) -> Shared | None:
    """Take the addresses of the default route where each stands alone (/32), as on Google Cloud:
    its router joins them.
    """
    if len(hosts) < 2:
        return None
    found = [_routed(host) for host in hosts]
    kept = tuple(place for place in found if place is not None)
    if len(kept) < len(hosts) or _twice(kept) is not None:
        return None
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
    return Shared(network=around, places=kept, why=(text,), warnings=(warning, *_mtus(kept, order)))


def _routed(host: Probed) -> Place | None:
    """Return the address that a host has alone (/32) on the default route, if any."""
    return next(
        (place for place, reason in _places(host) if place.default and reason == _ALONE), None
    )


def _reason(nic: Nic, address: ipaddress.IPv4Interface) -> str:
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


def _twice(places: Iterable[Place]) -> str | None:
    """Return an address that more than one host says it has."""
    counts = Counter(place.ip for place in places)
    return next((ip for ip, count in counts.items() if count > 1), None)


_Merit = tuple[bool, bool, int, bool, bool]


def _merit(place: Place, netdevs: frozenset[str] | None) -> _Merit:
    return (
        place.interface in (netdevs or ()),
        place.physical,
        place.speed,
        place.card,
        place.default,
    )


def _common_merit(places: Mapping[int, Place], netdevs: Mapping[int, frozenset[str]]) -> _Merit:
    merits = [_merit(place, netdevs.get(at)) for at, place in places.items()]
    return (
        all(each[0] for each in merits),
        all(each[1] for each in merits),
        min(each[2] for each in merits),
        all(each[3] for each in merits),
        all(each[4] for each in merits),
    )


def _about(places: Mapping[int, Place], netdevs: Mapping[int, frozenset[str]]) -> str:
    rdma, _, speed, _, default = _common_merit(places, netdevs)
    said = ["on all hosts" if len(places) > 1 else "an address of this host"]
    said += ["on an interface of the RDMA devices"] if rdma else []
    said += [f"{speed / 1000:g} Gbit/s"] if speed else []
    mtus = {place.mtu for place in places.values()}
    said += [f"MTU {mtus.pop()}"] if len(mtus) == 1 and 0 not in mtus else []
    said += ["the default route"] if default else []
    return ", ".join(said)


def _mtus(places: Sequence[Place], order: Sequence[str]) -> tuple[str, ...]:
    sizes: dict[int, list[str]] = {}
    for place, name in zip(places, order, strict=True):
        sizes.setdefault(place.mtu, []).append(name)
    if len(sizes) == 1:
        return ()
    told = "; ".join(f"{mtu} on {fold(names)}" for mtu, names in sorted(sizes.items()))
    return (f"the MTU differs ({told}): large packets may be dropped without a word",)


def _worse(
    chosen: Mapping[int, Place], other: Mapping[int, Place], netdevs: Mapping[int, frozenset[str]]
) -> str:
    best, less = _common_merit(chosen, netdevs), _common_merit(other, netdevs)
    if best[0] != less[0]:
        return "no interface of the RDMA devices"
    if best[1] != less[1]:
        return "not on physical interfaces"
    if best[2] != less[2]:
        return f"slower ({less[2] / 1000:g} Gbit/s)" if less[2] else "of unknown speed"
    if best[3] != less[3]:
        return "on top of another interface"
    return "without the default route" if best[4] != less[4] else "one is enough"


def _none(hosts: Sequence[Probed], order: Sequence[str]) -> RequestError:
    lines = []
    for host, name in zip(hosts, order, strict=True):
        told = [
            f"{each.interface} {each.ip}/{each.network.prefixlen}" + (f" ({no})" if no else "")
            for each, no in _places(host)
        ]
        lines.append(f"{name}: {', '.join(told) or 'no IPv4 address besides loopback'}")
    return RequestError(
        "the hosts share no network, so they cannot be one cluster",
        evidence=lines,
        hint=(
            "give the hosts addresses in one subnet (`ip -br addr` shows what they have), or write"
            " the inventory by hand"
        ),
    )
