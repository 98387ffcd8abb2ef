"""Addresses across the cluster."""

from __future__ import annotations

import pytest

from launcher.tools.host import Address
from tests.checks.spoiled import Case, facts, findings, named, stays_unknown, turns_red


def addresses(name: str) -> tuple[Address, ...]:
    """Return a healthy node's addresses."""
    return facts(name).addresses or ()


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
)


UNKNOWN = (
    (
        Case(id="address-unique", red={}, text="", fix="", facts={"gpu01": {"addresses": None}}),
        "`ip` is not installed",
    ),
    (
        Case(id="subnet", red={}, text="", fix="", facts={"gpu01": {"addresses": None}}),
        "is not known",
    ),
    (
        Case(
            id="one-nic-per-subnet", red={}, text="", fix="", facts={"gpu01": {"addresses": None}}
        ),
        "`ip` is not installed",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


def test_loopback_link_local_and_second_addresses_are_no_second_interface() -> None:
    """Nor are point-to-point addresses, which have no subnet."""
    more = (
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
        facts={"gpu01": {"addresses": (*addresses("gpu01"), *more)}},
    )

    assert {each.status for each in findings(case)} == {"pass"}


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_what_was_not_seen_is_skipped_with_its_reason(case: Case, reason: str) -> None:
    """Never green."""
    stays_unknown(case, reason)
