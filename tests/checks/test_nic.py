"""The interface that carries a node's address, and the node's own name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checks.spoiled import ETH0, ROCE, Case, findings, named, stays_unknown, turns_red

CASES = (
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
        text="its name `gpu01` resolves to nothing",
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
        fix="take NCCL_SOCKET_IFNAME out of `env:`",
        own={"gpu02": ", env: {NCCL_SOCKET_IFNAME: =ens9}"},
    ),
    Case(
        id="interface",
        red={"gpu01": "fail", "gpu03": "fail"},
        text="GLOO_SOCKET_IFNAME names `eth7`, which is not there",
        fix="set it to eth0",
        more=ROCE + "\nenv: {GLOO_SOCKET_IFNAME: eth7}",
        survey={"gpu02": {"nics": (ETH0, replace(ETH0, name="eth7"))}},
    ),
)


UNKNOWN = (
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
        "tells no speed",
    ),
    (
        Case(id="hostname", red={}, text="", fix="", survey={"gpu01": {"own_names": None}}),
        "is not known",
    ),
    (
        Case(id="hostname", red={}, text="", fix="", facts={"gpu01": {"addresses": None}}),
        "was not compared",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("NCCL_SOCKET_IFNAME: eth", "pass"),
        ("NCCL_SOCKET_IFNAME: =eth", "fail"),
        ("NCCL_SOCKET_IFNAME: ^docker", "pass"),
        ("NCCL_SOCKET_IFNAME: '=eth0,ens1'", "pass"),
        ("GLOO_SOCKET_IFNAME: eth", "fail"),
        ("GLOO_SOCKET_IFNAME: eth0", "pass"),
    ],
)
def test_nccl_takes_prefixes_and_gloo_whole_names(given: str, status: str) -> None:
    """As their documentation says."""
    found = findings(Case(id="interface", red={}, text="", fix="", more=f"env: {{{given}}}"))

    assert {each.status for each in found} == {status}


def test_one_address_on_the_clusters_network_is_enough() -> None:
    """Resolvers list link-local addresses beside it."""
    names = {"gpu01": {"own_names": ("fe80::1%eth0", "10.0.0.11")}}

    assert {
        each.status for each in findings(Case(id="hostname", red={}, text="", fix="", survey=names))
    } == {"pass"}


def test_of_two_nodes_the_second_is_told_apart_from_the_head() -> None:
    """Nobody has the majority; the first is what the second is held against."""
    evidence = Case(
        id="mtu", red={}, text="", fix="", survey={"gpu01": {"nics": (replace(ETH0, mtu=9000),)}}
    ).seen()
    two = {name: evidence.facts[name] for name in ("gpu01", "gpu02")}
    found = findings(Case(id="mtu", red={}, text="", fix="", evidence={"facts": two}))

    assert [(each.status, each.text) for each in found[:2]] == [
        ("pass", "mtu 9000"),
        ("fail", "mtu 1500 on `eth0`, while gpu01 has 9000"),
    ]


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_what_was_not_seen_is_skipped_with_its_reason(case: Case, reason: str) -> None:
    """Never green."""
    stays_unknown(case, reason)
