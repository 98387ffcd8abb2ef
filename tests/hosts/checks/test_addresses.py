"""Addresses, interfaces and names of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.tools.host import Address
from launcher.tools.host.survey import Lookup
from tests.hosts.checks.spoiled import (
    ETH0,
    ROCE,
    Case,
    facts,
    findings,
    named,
    stays_unknown,
    turns_red,
)

ASKS = ("nameserver 192.0.2.53", "hosts: files dns")


def addresses(name: str) -> tuple[Address, ...]:
    """Return a healthy node's addresses."""
    return facts(name).addresses or ()


def lost(*peers: str) -> tuple[Lookup, ...]:
    """Return unanswered lookups."""
    own = Lookup(kind="own", subject="gpu01", seconds=5.01, answered=False)
    return (*(replace(own, kind="reverse", subject=peer) for peer in peers), own)


CASES = (
    Case(
        id="address-unique",
        red={"gpu03": "fail"},
        text="`eth5` has 10.0.0.11, the address of gpu01",
        fix="`sudo ip addr del 10.0.0.11/32 dev eth5` on gpu03",
        facts={
            "gpu03": {
                "addresses": (
                    *addresses("gpu03"),
                    Address(interface="eth5", ip="10.0.0.11", prefix=32, up=True),
                )
            }
        },
    ),
    Case(
        id="subnet",
        red={"gpu02": "warn"},
        text="10.0.0.12 is in 10.0.0.0/28, while gpu[01,03] is in 10.0.0.0/24",
        fix="set `ip:` of gpu02",
        facts={
            "gpu02": {"addresses": (Address(interface="eth0", ip="10.0.0.12", prefix=28, up=True),)}
        },
    ),
    Case(
        id="one-nic-per-subnet",
        red={"gpu02": "warn"},
        text="`eth0` and `eth1` are both in 10.0.0.0/24",
        fix="arp_announce=2",
        facts={
            "gpu02": {
                "addresses": (
                    *addresses("gpu02"),
                    Address(interface="eth1", ip="10.0.0.99", prefix=24, up=True),
                )
            }
        },
    ),
    Case(
        id="mtu",
        red={"gpu03": "fail"},
        text="mtu 9000 on `eth0`, while gpu[01-02] has 1500",
        fix="`sudo ip link set eth0 mtu 1500` on gpu03",
        survey={"gpu03": {"nics": (replace(ETH0, mtu=9000),)}},
    ),
    Case(
        id="link-speed",
        red={"gpu02": "warn"},
        text="`eth0` runs at 1 Gbit/s, while gpu[01,03] has 25 Gbit/s",
        fix="`sudo ethtool eth0` on gpu02",
        survey={"gpu02": {"nics": (replace(ETH0, speed=1000),)}},
    ),
    Case(
        id="hostname",
        red={"gpu02": "fail"},
        text="its name `gpu02` resolves to 127.0.1.1",
        fix="echo '10.0.0.12 gpu02' | sudo tee -a /etc/hosts",
        survey={"gpu02": {"own_names": ("127.0.1.1",)}},
    ),
    Case(
        id="hostname",
        red={"gpu01": "warn"},
        text="its name `gpu01` does not resolve",
        fix="/etc/hosts",
        survey={"gpu01": {"own_names": ()}},
    ),
    *(
        Case(
            id="hostname",
            red={"gpu01": "warn"},
            text=(
                f"its name `gpu01` resolves to {address}, which is not on the network of 10.0.0.11"
            ),
            fix="echo '10.0.0.11 gpu01' | sudo tee -a /etc/hosts",
            survey={"gpu01": {"own_names": (address,)}},
        )
        for address in ("fe80::1%eth0", "172.17.0.1", "10.1.0.1")
    ),
    Case(
        id="interface",
        red={"gpu02": "fail"},
        text="NCCL_SOCKET_IFNAME names `ens9`",
        fix="remove NCCL_SOCKET_IFNAME from `env:`",
        own={"gpu02": ", env: {NCCL_SOCKET_IFNAME: =ens9}"},
    ),
    Case(
        id="interface",
        red={"gpu01": "fail", "gpu03": "fail"},
        text="GLOO_SOCKET_IFNAME names `eth7`, which does not exist",
        fix="set it to eth0",
        extra=ROCE + "\nenv: {GLOO_SOCKET_IFNAME: eth7}",
        survey={"gpu02": {"nics": (ETH0, replace(ETH0, name="eth7"))}},
    ),
    Case(
        id="names-resolve",
        red={"gpu02": "warn"},
        text="looking up the name of 10.0.0.11, 10.0.0.12 and its own name got no answer within 5",
        fix="'10.0.0.11 gpu01' '10.0.0.12 gpu02' '10.0.0.13 gpu03' | sudo tee -a /etc/hosts",
        survey={"gpu02": {"lookups": lost("10.0.0.11", "10.0.0.12"), "resolver_lines": ASKS}},
    ),
    Case(
        id="names-resolve",
        red={"gpu01": "warn", "gpu02": "warn", "gpu03": "warn"},
        text="looking up the name of 10.0.0.1, 10.0.0.2, 10.0.0.3 and 2 more and its own name got",
        fix="on every node",
        survey={"*": {"lookups": lost(*(f"10.0.0.{number}" for number in range(1, 6)))}},
    ),
    Case(
        id="names-resolve",
        red={"gpu03": "warn"},
        text="looking up the address of gpu02 took 3 s",
        fix="`vlaunch down` and `vlaunch up`",
        survey={
            "gpu03": {
                "lookups": (
                    Lookup(kind="reverse", subject="10.0.0.12", seconds=0.01),
                    Lookup(kind="forward", subject="gpu02", seconds=3.2),
                )
            }
        },
    ),
)

UNKNOWN = (
    (
        Case(id="address-unique", red={}, text="", fix="", facts={"gpu01": {"addresses": None}}),
        "`ip` is not installed",
    ),
    (
        Case(id="subnet", red={}, text="", fix="", facts={"gpu01": {"addresses": None}}),
        "is unknown",
    ),
    (
        Case(
            id="one-nic-per-subnet", red={}, text="", fix="", facts={"gpu01": {"addresses": None}}
        ),
        "`ip` is not installed",
    ),
    (
        Case(id="mtu", red={}, text="", fix="", survey={"gpu01": {"nics": None}}),
        "10.0.0.11 was not surveyed",
    ),
    (
        Case(
            id="link-speed",
            red={},
            text="",
            fix="",
            survey={"*": {"nics": (replace(ETH0, speed=None),)}},
        ),
        "reports no speed",
    ),
    (
        Case(id="hostname", red={}, text="", fix="", survey={"gpu01": {"own_names": None}}),
        "is unknown",
    ),
    (
        Case(id="hostname", red={}, text="", fix="", facts={"gpu01": {"addresses": None}}),
        "was not compared",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


def test_loopback_link_local_and_second_addresses_are_no_second_interface() -> None:
    """Nor are point-to-point addresses, which have no subnet."""
    extra = (
        Address(interface="eth0", ip="10.0.0.200", prefix=24, up=True),
        Address(interface="eth0", ip="fe80::1", prefix=64, up=True),
        Address(interface="ens1", ip="fe80::2", prefix=64, up=True),
        Address(interface="wg0", ip="10.0.0.7", prefix=32, up=True),
        Address(interface="wg1", ip="10.0.0.7", prefix=32, up=True),
        Address(interface="down0", ip="10.0.0.8", prefix=24, up=False),
    )
    case = Case(
        id="one-nic-per-subnet",
        red={},
        text="",
        fix="",
        facts={"gpu01": {"addresses": (*addresses("gpu01"), *extra)}},
    )

    assert {finding.status for finding in findings(case)} == {"pass"}


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_unknown_values_are_skipped_with_the_reason(case: Case, reason: str) -> None:
    """They never pass."""
    stays_unknown(case, reason)


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("NCCL_SOCKET_IFNAME: eth", "pass"),
        ("NCCL_SOCKET_IFNAME: =eth", "fail"),
        ("NCCL_SOCKET_IFNAME: ^docker", "pass"),
        ("NCCL_SOCKET_IFNAME: '=eth0,ens1'", "pass"),
        ("GLOO_SOCKET_IFNAME: eth", "fail"),
        ("GLOO_SOCKET_IFNAME: eth0", "pass"),
    ],
)
def test_nccl_takes_prefixes_and_gloo_whole_names(value: str, status: str) -> None:
    """As documented."""
    judged = findings(Case(id="interface", red={}, text="", fix="", extra=f"env: {{{value}}}"))

    assert {finding.status for finding in judged} == {status}


def test_a_single_address_on_the_clusters_network_is_enough() -> None:
    """Resolvers list link-local addresses beside it."""
    names = {"gpu01": {"own_names": ("fe80::1%eth0", "10.0.0.11")}}

    assert {
        finding.status
        for finding in findings(Case(id="hostname", red={}, text="", fix="", survey=names))
    } == {"pass"}


def test_of_two_nodes_the_second_is_compared_with_the_head() -> None:
    """Without a majority, the first node is the reference."""
    evidence = Case(
        id="mtu", red={}, text="", fix="", survey={"gpu01": {"nics": (replace(ETH0, mtu=9000),)}}
    ).build_evidence()
    two = {name: evidence.facts[name] for name in ("gpu01", "gpu02")}
    judged = findings(Case(id="mtu", red={}, text="", fix="", evidence={"facts": two}))

    assert [(finding.status, finding.text) for finding in judged[:2]] == [
        ("pass", "mtu 9000"),
        ("fail", "mtu 1500 on `eth0`, while gpu01 has 9000"),
    ]


def test_the_resolver_configuration_is_the_evidence() -> None:
    """The node's own, which shows a wrong server."""
    case = next(case for case in CASES if case.id == "names-resolve")
    by_node = {finding.node: finding for finding in findings(case)}

    assert by_node["gpu02"].evidence == "nameserver 192.0.2.53\nhosts: files dns"
    assert by_node["gpu01"].status == "pass"


def test_missing_lookups_are_skipped() -> None:
    """On a node without getent."""
    case = Case(id="names-resolve", red={}, text="", fix="", survey={"gpu01": {"lookups": None}})
    (finding,) = [finding for finding in findings(case) if finding.node == "gpu01"]

    assert (finding.status, "getent" in finding.text) == ("skip", True)
