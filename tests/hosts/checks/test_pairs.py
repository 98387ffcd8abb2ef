"""Ports and packets between nodes, by direction."""

from __future__ import annotations

import pytest

from tests.hosts.checks.spoiled import Case, findings, named, stays_unknown, turns_red

CASES = (
    Case(
        id="ports-reachable",
        red={"gpu01": "fail"},
        text="gpu02 → gpu01: TCP 6379, 10002 timed out: something drops it",
        fix="-s 10.0.0.12 -j ACCEPT",
        port_probes={
            ("gpu02", "gpu01"): {
                "ports": {6379: "timed out", 10002: "timed out", 43210: "timed out"},
                "bulk": None,
            }
        },
    ),
    Case(
        id="ports-reachable",
        red={"gpu01": "fail"},
        text="gpu02 → gpu01: TCP 6379 timed out",
        fix="with firewalld `sudo firewall-cmd --zone=trusted --add-source=10.0.0.12`",
        port_probes={("gpu02", "gpu01"): {"ports": {6379: "timed out", 43210: "open"}}},
    ),
    Case(
        id="ports-reachable",
        red={"gpu03": "fail"},
        text="gpu01 → gpu03: TCP 6380 was refused",
        fix="on gpu03",
        port_probes={("gpu01", "gpu03"): {"ports": {6380: "refused", 43210: "open"}}},
    ),
    Case(
        id="high-port",
        red={"gpu02": "fail"},
        text="gpu03 → gpu02: TCP 43210 timed out",
        fix="allow all TCP from 10.0.0.13",
        port_probes={("gpu03", "gpu02"): {"ports": {6379: "open", 43210: "timed out"}}},
    ),
    Case(
        id="high-port",
        red={"gpu03": "fail"},
        text="TCP 43210 timed out",
        fix="check also the outgoing rules of gpu03",
        port_probes={
            ("gpu03", name): {"ports": {6379: "open", 43210: "timed out"}}
            for name in ("gpu01", "gpu02")
        },
    ),
    Case(
        id="mtu-path",
        red={"gpu02": "fail"},
        text="gpu01 → gpu02: packets of more than 1000 bytes are lost; 1500 should pass",
        fix="mtu 1000`; test it with `ping -M do -s 972 10.0.0.12`",
        port_probes={("gpu01", "gpu02"): {"largest": 1000, "bulk": False}},
    ),
    Case(
        id="mtu-path",
        red={"gpu02": "fail"},
        text="1 MB does not arrive",
        fix="`sudo ip link set eth0 mtu 1400`",
        port_probes={("gpu01", "gpu02"): {"bulk": False}},
    ),
)


UNKNOWN = (
    (
        Case(id="ports-reachable", red={}, text="", fix="", evidence={"port_probes": None}),
        "no connection was tested",
    ),
    (
        Case(id="high-port", red={}, text="", fix="", evidence={"port_probes": ()}),
        "no high port was tested",
    ),
    (
        Case(
            id="mtu-path",
            red={},
            text="",
            fix="",
            port_probes={
                ("gpu01", "gpu02"): {"largest": None},
                ("gpu02", "gpu03"): {"largest": None},
                ("gpu03", "gpu01"): {"largest": None},
            },
        ),
        "no datagram arrived",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


def test_a_larger_mtu_of_a_single_node_is_not_the_paths_fault() -> None:
    """Sizes within both MTUs pass; `mtu` names the node that differs."""
    wide = {("gpu02", name): {"mtu": 9000, "largest": 1500} for name in ("gpu01", "gpu03")}

    assert {
        finding.status
        for finding in findings(Case(id="mtu-path", red={}, text="", fix="", port_probes=wide))
    } == {"pass"}


def test_a_node_without_a_probe_is_skipped_with_the_reason() -> None:
    """The others pass only for pairs verified in both directions."""
    evidence = Case(id="high-port", red={}, text="", fix="").build_evidence()
    remaining = tuple(
        port_probe for port_probe in evidence.port_probes or () if port_probe.source != "gpu03"
    )
    case = Case(
        id="high-port",
        red={},
        text="",
        fix="",
        evidence={"port_probes": remaining, "probes_missing": {"gpu03": "no python3"}},
    )

    assert [(port_probe.status, port_probe.text) for port_probe in findings(case)] == [
        ("pass", "a high port is open, both ways (with gpu02)"),
        ("pass", "a high port is open, both ways (with gpu01)"),
        ("skip", "no python3"),
    ]


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_unknown_values_are_skipped_with_the_reason(case: Case, reason: str) -> None:
    """They never pass."""
    stays_unknown(case, reason)


def test_a_node_that_is_down_is_no_firewall() -> None:
    """Its peers could not reach it either; `ssh` reports it."""
    evidence = Case(id="ports-reachable", red={}, text="", fix="").build_evidence()
    shut = {"ports": {6379: "timed out", 43210: "timed out"}}
    case = Case(
        id="ports-reachable",
        red={},
        text="",
        fix="",
        port_probes={("gpu01", "gpu03"): shut, ("gpu02", "gpu03"): shut},
        evidence={"facts": {name: evidence.facts[name] for name in ("gpu01", "gpu02")}},
    )

    assert [finding.status for finding in findings(case)] == ["pass", "pass", "skip"]
