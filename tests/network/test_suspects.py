"""Suspects of a slow network, and the fixes."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from launcher.core.check import Finding
from launcher.network import suspects, transport
from launcher.network.network_shape import Cell, Measurement
from launcher.network.probe_command import RankReport, Report
from tests.network.reports import GDR, NAMES, healthy, three

TCP = "NET/Socket is below the required level: RDMA"
INVENTORY = three("network: {fabric: infiniband, interface: ens1}")


def cells(*bad: tuple[str, str], **changed: Any) -> list[Cell]:
    """Return six directions with some bad ones."""
    good = Cell(
        source="",
        target="",
        status="pass",
        transport="NET/IB/GDRDMA",
        level="gdrdma",
        bandwidth=2e10,
        latency=1e-5,
    )
    spoiled = {"status": "fail", "transport": "NET/Socket", "level": "any", "text": TCP, **changed}
    return [
        replace(good, source=a, target=b, **(spoiled if (a, b) in bad else {}))
        for a, b in permutations(NAMES, 2)
    ]


def both(*pairs: tuple[str, str]) -> list[tuple[str, str]]:
    """Return both directions of pairs."""
    return [direction for a, b in pairs for direction in ((a, b), (b, a))]


def measured(reports: dict[str, Report], **missing: str) -> Measurement:
    """Return reports of the three nodes."""
    return Measurement(inventory=INVENTORY, reports=reports, missing=missing)


def collect(result: list[Cell], reports: dict[str, Report] | None = None) -> list[Finding]:
    """Return the findings."""
    reports = healthy(via=GDR) if reports is None else reports
    return suspects.cell_findings(measured(reports), result)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ([], []),
        ([("n1", "n2")], ["n1 → n2"]),
        (both(("n1", "n2")), ["n1 ↔ n2"]),
        (both(("n1", "n3"), ("n2", "n3")), ["n3"]),
        ([("n1", "n3"), ("n2", "n3")], ["n1 → n3", "n2 → n3"]),
        ([*both(("n1", "n3"), ("n2", "n3")), ("n1", "n2")], ["n3", "n1 → n2"]),
        (both(("n1", "n2"), ("n1", "n3"), ("n2", "n3")), [""]),
    ],
)
def test_the_fewest_suspects_are_named(bad: list[tuple[str, str]], named: list[str]) -> None:
    """All; a node if all of its directions are bad; else a pair; else a direction, with no
    direction twice.
    """
    assert [finding.node for finding in collect(cells(*bad))] == named


def test_two_problems_of_one_pair_are_two_findings() -> None:
    """Slow in one direction and TCP in the other; differing figures are the same problem."""
    items = [
        replace(c, text="1.1 GB/s, where other pairs have 20 GB/s") if c.source == "n1" else c
        for c in cells(*both(("n1", "n2")))
    ]
    rates = [
        replace(c, text=f"{1.1 if c.source == 'n1' else 1.3} GB/s, where other pairs have 20 GB/s")
        if c.status == "fail"
        else c
        for c in cells(*both(("n1", "n2")))
    ]

    assert [f.node for f in collect(items)] == ["n1 → n2", "n2 → n1"]
    assert [f.node for f in collect(rates)] == ["n1 ↔ n2"]


def test_warnings_stay_warnings() -> None:
    """A pair with half the bandwidth."""
    (finding,) = collect(
        cells(*both(("n1", "n2")), status="warn", text="9 GB/s, where other pairs have 20 GB/s")
    )

    assert (finding.status, finding.node) == ("warn", "n1 ↔ n2")
    assert "ethtool ens1` on n1 and n2" in finding.fix


def test_a_pair_that_did_not_connect_gets_the_addresses_to_open() -> None:
    """It has no figures."""
    (finding,) = collect(
        cells(*both(("n1", "n2")), bandwidth=None, transport="", text="connecting: timed out")
    )

    assert "allow TCP between 10.0.0.1 and 10.0.0.2" in finding.fix


@pytest.mark.parametrize(
    ("report", "text", "fix"),
    [
        ({"log": "n2:1:2 [0] NCCL INFO NET/IB : No device found.\n"}, " on n2", "modprobe"),
        ({"env": {"NCCL_IB_DISABLE": "1"}}, " on n2", "NCCL_IB_DISABLE"),
        ({"infiniband": ()}, " on n2", "modprobe"),
        ({}, "", "with `network: {require: any}` it is allowed"),
    ],
)
def test_the_cause_comes_from_the_affected_node(
    report: dict[str, Any], text: str, fix: str
) -> None:
    """Of two nodes with TCP; without a cause, the fix says how to find it and how to allow TCP."""
    reports = healthy(via=GDR)
    reports["n1"] = replace(reports["n1"], infiniband=("uverbs0",))
    reports["n2"] = replace(reports["n2"], **report)
    (finding,) = collect(cells(*both(("n1", "n2"))), reports)

    assert finding.text.startswith(TCP)
    assert finding.text.endswith(text)
    assert fix in finding.fix


def test_rdma_without_gpudirect_may_be_allowed() -> None:
    """The level that the pair does reach."""
    text = "NET/IB is below the required level: RDMA with GPUDirect"
    (finding,) = collect(cells(*both(("n1", "n2")), transport="NET/IB", level="rdma", text=text))

    assert "`network: {require: rdma}` it is allowed" in finding.fix


def test_unmeasured_pairs_are_named_once() -> None:
    """By their node; if no rank has started, the nodes are named instead."""
    missing = cells(
        *both(("n1", "n2"), ("n1", "n3")), transport="", bandwidth=None, text="was not measured"
    )
    (finding,) = collect(missing)

    assert (finding.node, finding.text) == ("n1", "every pair with this node: was not measured")
    assert collect(missing, {name: Report(node=name, backend="nccl") for name in NAMES}) == []


def ranked(rank: RankReport) -> list[Finding]:
    """Return the findings for nodes with this rank on the second one."""
    reports = healthy(via=GDR)
    second = replace(reports["n2"], ranks=(rank,))
    return suspects.node_findings(measured({**reports, "n2": second}))


@pytest.mark.parametrize(
    ("phase", "exit_", "text", "fix"),
    [
        ("rendezvous at 10.0.0.1:29500", None, "; arrived: n1, n3", "--only names-resolve"),
        ("importing torch", -9, "; arrived: n1, n3", "`uptime`, `iostat -x 1`"),
        ("starting", 1, "; arrived: n1, n3", "vlaunch check --group network"),
        ("pair n1 ↔ n2", -9, "was killed (signal 9) in the phase “pair n1 ↔ n2”", "dmesg"),
        ("all_reduce", 3, "ended with exit code 3", "vlaunch check --group network"),
        ("all_reduce", None, "did not finish before the deadline", "vlaunch check --group network"),
    ],
)
def test_a_rank_is_named_with_its_phase(phase: str, exit_: int | None, text: str, fix: str) -> None:
    """The arrived nodes matter only for a rank that failed before the rendezvous."""
    rank = RankReport(rank=1, local_rank=0, phase=phase, ended=False, exit=exit_, tail="last words")
    (finding,) = ranked(rank)

    assert (finding.node, finding.evidence) == ("n2", "last words")
    assert text in finding.text
    assert ("arrived" in finding.text) is ("arrived" in text)
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("head", "fix"),
    [
        ({}, "allow TCP from 10.0.0.2 to 10.0.0.1:29500"),
        ({"error": "port 29500 is taken on the head"}, "fix n1 first"),
    ],
)
def test_the_fix_to_open_the_heads_port(head: dict[str, Any], fix: str) -> None:
    """Only for nodes that did not reach it, and only if a rank listened."""
    rank = RankReport(
        rank=1,
        local_rank=0,
        phase="rendezvous at 10.0.0.1:29500",
        ended=False,
        exit=1,
        error="the head did not open 10.0.0.1:29500 within 60 s: no answer",
    )
    reports = healthy(via=GDR)
    reports["n1"] = replace(reports["n1"], **head)
    reports["n2"] = replace(reports["n2"], ranks=(rank,))
    (result,) = [
        finding for finding in suspects.node_findings(measured(reports)) if finding.node == "n2"
    ]

    assert fix in result.fix


def stopped(rank: int, error: str = "stopped: rank 0 (n1) ended") -> RankReport:
    """Return the report of a rank that stopped because of another."""
    return RankReport(
        rank=rank,
        local_rank=rank % 2,
        phase="rendezvous at 10.0.0.1:29500",
        ended=False,
        exit=1,
        error=error,
    )


GONE = "waiting for all ranks at rendezvous: the store is gone: rank 0 (n1) ended (Failed to recv)"


KILLED = RankReport(
    rank=0, local_rank=0, phase="starting", ended=False, exit=-9, error="ended by signal 9"
)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n1": {"ranks": (KILLED,)}, "n2": {"ranks": (stopped(1),)}}, ["n1"]),
        ({"n1": {"ranks": (KILLED, stopped(1))}, "n3": {"ranks": (stopped(2),)}}, ["n1"]),
        ({"n1": {"error": "it failed"}, "n2": {"ranks": (stopped(1),)}}, ["n1"]),
        ({"n1": {"ranks": (KILLED,)}, "n2": {"ranks": (stopped(1, GONE),)}}, ["n1"]),
        ({"n2": {"ranks": (KILLED, stopped(1))}}, ["n2"]),
        ({"n2": {"ranks": (stopped(1),)}, "n3": {"ranks": (KILLED,)}}, ["n2", "n3"]),
        ({"n2": {"ranks": (stopped(1),)}}, ["n2"]),
    ],
    ids=["head", "all of it", "its probe", "its store", "one node", "another node", "no cause"],
)
def test_stopped_ranks_are_no_culprits(
    changes: dict[str, dict[str, Any]], named: list[str]
) -> None:
    """If the rank, or the head, that caused it is named."""
    reports = healthy(via=GDR)
    for name, changed in changes.items():
        reports[name] = replace(reports[name], **changed)

    assert [finding.node for finding in suspects.node_findings(measured(reports))] == named


def test_a_dead_head_is_the_only_failure() -> None:
    """Missing measurements are its consequence."""
    reports = {
        name: Report(node=name, backend="gloo", ranks=(stopped(rank) if rank else KILLED,))
        for rank, name in enumerate(NAMES)
    }
    verdict = transport.judge(measured(reports), ("any", ""))

    assert [finding.node for finding in verdict.findings if finding.status == "fail"] == ["n1"]
    assert not verdict.passed


def test_a_successful_rank_has_no_finding() -> None:
    """All is well."""
    assert suspects.node_findings(measured(healthy(via=GDR))) == []


def test_a_node_without_report_and_one_with_an_error() -> None:
    """With their own errors; for a used port, a command that finds its process."""
    reports = {name: Report(node=name, backend="nccl") for name in ("n1", "n2")}
    reports["n1"] = replace(reports["n1"], error="port 29500 is taken on the head")
    reports["n2"] = replace(reports["n2"], error="the head has another nonce")
    first, two, three_ = suspects.node_findings(
        measured(reports, n3="ended with exit code 1: no such file")
    )

    assert (first.node, two.node, three_.node) == ("n1", "n2", "n3")
    assert "sport = :29500" in first.fix
    assert "vlaunch logs n2" in two.fix
    assert three_.text == "its probe sent no report: ended with exit code 1: no such file"


def test_without_a_fabric_the_fix_is_the_inventory() -> None:
    """Containers get RDMA devices only when it says so."""
    reports = healthy(via="NET/Socket/0", log="n1:1:2 [0] NCCL INFO NET/IB : No device found.\n")
    text = Measurement(inventory=three(""), reports=reports)
    findings = transport.judge(text, ("rdma", "every node has an active RDMA port"))

    assert "network: {fabric: infiniband}" in findings.findings[0].fix
