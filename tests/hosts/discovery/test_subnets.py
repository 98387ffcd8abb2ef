"""Choice of the nodes' network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.errors import RequestError
from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.shape import InitOptions, ScannedHost
from launcher.hosts.discovery.subnets import SharedNetwork, choose_network
from launcher.tools.host.survey import Nic
from tests.hosts.discovery.hosts import BRIDGE, host, nic


def chosen(*hosts: ScannedHost, netdevs: dict[int, frozenset[str]] | None = None) -> SharedNetwork:
    """Return the network chosen for these hosts."""
    return choose_network(hosts, [(netdevs or {}).get(at, frozenset()) for at in range(len(hosts))])


def pair(*nics: tuple[str, str, int | None, bool], default: str = "-") -> list[ScannedHost]:
    """Return two hosts with the same interfaces; `N` in an address is the host's number."""
    return [
        host(
            f"h{at}",
            *(
                nic(name, ip.replace("N", str(at)), speed, physical=real)
                for name, ip, speed, real in nics
            ),
            default=default,
        )
        for at in (1, 2)
    ]


def test_the_fastest_physical_network_wins() -> None:
    """The other is listed with the reason."""
    shared = chosen(
        *pair(("eth0", "10.0.0.N/24", 1000, True), ("eth1", "10.1.0.N/24", 100_000, True))
    )

    assert str(shared.network) == "10.1.0.0/24"
    assert [(place.interface, place.ip) for place in shared.addresses] == [
        ("eth1", "10.1.0.1"),
        ("eth1", "10.1.0.2"),
    ]
    assert "not eth0 10.0.0.0/24: also on all hosts, but slower (1 Gbit/s)" in shared.why


def test_physical_interfaces_win_over_fast_virtual_ones() -> None:
    """A virtual interface may claim any speed."""
    shared = chosen(
        *pair(("vlan7", "10.0.0.N/24", 100_000, False), ("eth1", "10.1.0.N/24", 1000, True))
    )

    assert str(shared.network) == "10.1.0.0/24"


@pytest.mark.parametrize("fast", ["ens1f0.100", "br0", "vmbr1", "vlan100", "bond0"])
def test_interfaces_stacked_on_a_card_have_its_speed(fast: str) -> None:
    """The card itself has no address then, and management is slower."""
    cards = (nic("eno1", "", 1000), nic("ens1f0", "", 100_000))
    hosts = [
        host(
            f"h{at}",
            *cards,
            nic("mgmt0", f"10.0.0.{at}/24", 1000),
            nic(fast, f"10.1.0.{at}/24", 100_000, physical=False),
        )
        for at in (1, 2)
    ]

    assert str(chosen(*hosts).network) == "10.1.0.0/24"


def test_a_bridge_without_a_card_is_not_fast() -> None:
    """It reports a virtual 10 Gbit/s."""
    shared = chosen(
        *pair(("br0", "10.0.0.N/24", 10_000, False), ("eth1", "10.1.0.N/24", 1000, True))
    )

    assert str(shared.network) == "10.1.0.0/24"
    assert "not br0 10.0.0.0/24: also on all hosts, but not on physical interfaces" in shared.why


def test_the_card_itself_wins_among_equally_fast_interfaces() -> None:
    """Before interfaces stacked on it."""
    shared = chosen(
        *pair(
            ("eth1.7", "10.0.0.N/24", 1000, False),
            ("eth1", "10.1.0.N/24", 1000, True),
            default="eth1.7",
        )
    )

    assert str(shared.network) == "10.1.0.0/24"
    assert (
        "not eth1.7 10.0.0.0/24: also on all hosts, but on top of another interface" in shared.why
    )


def test_single_addresses_come_from_the_default_route() -> None:
    """Google Cloud assigns /32 and routes between them; `check` tests it."""
    hosts = [
        host(f"h{at}", nic("ens4", f"10.128.0.{at}/32"), BRIDGE, default="ens4") for at in (2, 3)
    ]
    shared = chosen(*hosts)

    assert [(place.interface, place.ip) for place in shared.addresses] == [
        ("ens4", "10.128.0.2"),
        ("ens4", "10.128.0.3"),
    ]
    assert "`vlaunch check`" in shared.warnings[0]
    assert discover(hosts, InitOptions()).nodes[1].ip == "10.128.0.3"


@pytest.mark.parametrize(
    "second",
    [
        nic("ens4", "10.128.0.2/32"),
        nic("ens4", "10.128.0.3/32", up=False),
        nic("ens5", "10.128.0.3/32"),
        nic("ens4"),
    ],
)
def test_other_single_addresses_are_not_used(second: Nic) -> None:
    """Duplicates, links that are down, routes beside the default one, or on some hosts only."""
    hosts = [host("h1", nic("ens4", "10.128.0.2/32")), host("h2", second, default="ens4")]

    with pytest.raises(RequestError) as raised:
        chosen(*hosts)
    assert raised.value.message == "the hosts share no network"


def test_the_interface_of_the_rdma_devices_wins() -> None:
    """RoCE uses its interfaces' addresses."""
    hosts = pair(("eth0", "10.0.0.N/24", 400_000, True), ("eth1", "10.1.0.N/24", 100_000, True))
    shared = chosen(*hosts, netdevs=dict.fromkeys((0, 1), frozenset({"eth1"})))

    assert str(shared.network) == "10.1.0.0/24"
    assert (
        "not eth0 10.0.0.0/24: also on all hosts, but no interface of the RDMA devices"
        in shared.why
    )


def test_the_default_route_breaks_ties() -> None:
    """Between equally fast ones."""
    nics = (("eth0", "10.0.0.N/24", 1000, True), ("eth1", "10.1.0.N/24", 1000, True))

    assert str(chosen(*pair(*nics, default="eth1")).network) == "10.1.0.0/24"
    assert str(chosen(*pair(*nics, default="eth0")).network) == "10.0.0.0/24"


def test_networks_of_software_are_ignored() -> None:
    """Docker's bridge has the same address on every host; the reasons name such networks."""
    extra = (
        BRIDGE,
        nic("br-0123456789ab", "172.18.0.1/16"),
        nic("tailscale0", "100.64.0.1/10"),
        nic("virbr0", "192.168.122.1/24"),
    )
    shared = chosen(
        *(host(f"h{at}", nic("eth0", f"10.0.0.{at}/24", None), *extra) for at in (1, 2))
    )

    assert str(shared.network) == "10.0.0.0/24"
    assert "not docker0 172.17.0.0/16: docker's own bridge" in shared.why
    assert "not tailscale0 100.64.0.0/10: a tunnel" in shared.why


def test_a_bridge_or_vlan_of_the_administrator_may_be_the_network() -> None:
    """Only interfaces created by software are excluded."""
    assert str(chosen(*pair(("br0", "10.0.0.N/24", None, False))).network) == "10.0.0.0/24"


def test_the_same_address_on_two_hosts_is_no_common_network() -> None:
    """For any name of the interface."""
    hosts = [
        host(
            f"h{at}", nic("eth0", f"10.0.0.{at}/24", 1000), nic("eth1", "192.168.122.1/24", 100_000)
        )
        for at in (1, 2)
    ]
    shared = chosen(*hosts)

    assert str(shared.network) == "10.0.0.0/24"
    assert (
        "not eth1 192.168.122.0/24: 192.168.122.1 is on more than one host, so these"
        " are different networks" in shared.why
    )


def test_a_network_of_some_hosts_is_listed_with_their_names() -> None:
    """Folded."""
    hosts = [
        host(
            f"h{at}",
            nic("eth0", f"10.0.0.{at}/24"),
            *([nic("eth1", f"10.1.0.{at}/16")] if at > 1 else []),
        )
        for at in (1, 2, 3)
    ]

    assert "not eth1 10.1.0.0/16: only on h[2-3]" in chosen(*hosts).why


def test_down_and_link_local_do_not_count() -> None:
    """They are listed with the reason."""
    hosts = [
        host(
            f"h{at}",
            nic("eth0", f"10.0.0.{at}/24", 10),
            nic("eth1", f"10.1.0.{at}/24", up=False),
            nic("eth2", f"169.254.0.{at}/16"),
        )
        for at in (1, 2)
    ]
    shared = chosen(*hosts)

    assert str(shared.network) == "10.0.0.0/24"
    assert "not eth1 10.1.0.0/24: the link is down" in shared.why
    assert any(line.startswith("not eth2 169.254.0.0/16: link-local") for line in shared.why)


def test_no_common_network_is_an_error_with_every_hosts_networks() -> None:
    """To show the wrong one."""
    hosts = [
        host("gpu01", nic("eth0", "10.0.0.1/24"), BRIDGE),
        host("gpu02", nic("eth0", "10.0.7.2/24")),
        host("gpu03"),
    ]

    with pytest.raises(RequestError) as raised:
        discover(hosts, InitOptions())
    assert raised.value.message == "the hosts share no network"
    assert raised.value.evidence.splitlines() == [
        "gpu01: eth0 10.0.0.1/24, docker0 172.17.0.1/16 (docker's own bridge)",
        "gpu02: eth0 10.0.7.2/24",
        "gpu03: no IPv4 address besides loopback",
    ]


def test_of_two_addresses_in_a_network_the_better_interface_wins() -> None:
    """One node has one address."""
    first = host("h1", nic("eth0", "10.0.0.1/24", 1000), nic("eth1", "10.0.0.21/24", 100_000))
    two = host("h2", nic("eth0", "10.0.0.2/24", 1000))

    assert [place.ip for place in chosen(first, two).addresses] == ["10.0.0.21", "10.0.0.2"]


def test_addresses_alone_are_enough() -> None:
    """Without a survey of the interfaces."""
    hosts = [host(f"h{at}", nic("eth0", f"10.0.0.{at}/24")) for at in (1, 2)]
    bare = [
        host(scanned.host, survey={"nics": None}, addresses=scanned.facts.addresses)
        for scanned in hosts
    ]

    assert str(chosen(*bare).network) == "10.0.0.0/24"


def test_mtus_that_differ_are_a_warning() -> None:
    """With their hosts."""
    first, two = nic("eth0", "10.0.0.1/24"), replace(nic("eth0", "10.0.0.2/24"), mtu=9000)

    assert (
        chosen(host("h1", first), host("h2", two))
        .warnings[0]
        .startswith("the MTU differs (1500 on h1; 9000 on h2)")
    )


def test_ipv6_is_ignored() -> None:
    """Inventories do not accept it."""
    six = Nic(name="eth1", up=True, mtu=1500, addresses=("2001:db8::1/64",))

    assert len(chosen(host("h1", nic("eth0", "10.0.0.1/24"), six)).why) == 1
