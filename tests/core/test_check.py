"""Findings, and their combination."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.check import (
    Finding,
    Status,
    failed,
    fold_findings,
    passed,
    skipped,
    worst_status,
)
from launcher.core.domain import Node
from launcher.hosts.check import Host, collect_surveys, per_host, per_survey, uniform_value
from launcher.tools.host.survey import Survey
from tests.hosts.checks.spoiled import HEALTHY


def finding(node: str, status: Status = "fail", text: str = "no") -> Finding:
    return Finding(node=node, status=status, text=text)


@pytest.mark.parametrize(
    ("statuses", "most"),
    [
        ([], "pass"),
        (["pass", "skip"], "skip"),
        (["skip", "warn"], "warn"),
        (["warn", "wait", "pass"], "wait"),
        (["wait", "fail"], "fail"),
    ],
)
def test_the_worst_finding_decides(statuses: list[Status], most: Status) -> None:
    """A failure ends the wait; a wait is not a pass."""
    assert worst_status([finding("a", status) for status in statuses]) == most


def test_equal_findings_are_folded() -> None:
    """Any difference keeps them apart."""
    same = [
        finding("gpu02"),
        finding("gpu03"),
        finding("gpu04", text="other"),
        finding("", text="cluster"),
    ]

    assert [(item.node, item.text) for item in fold_findings(same)] == [
        ("gpu[02-03]", "no"),
        ("gpu04", "other"),
        ("", "cluster"),
    ]


def test_a_host_combines_a_node_with_its_facts_and_the_evidence() -> None:
    """In the inventory's order, without nodes that did not answer."""
    evidence = HEALTHY.build_evidence()
    remaining = replace(evidence, facts={name: evidence.facts[name] for name in ("gpu03", "gpu01")})

    assert [host.name for host in remaining.reached] == ["gpu01", "gpu03"]
    assert remaining.host("gpu02") is None
    assert remaining.host("gpu03") == remaining.reached[1]
    for host in remaining.reached:
        assert (host.node, host.inventory) == (
            evidence.inventory.node(host.name),
            evidence.inventory,
        )
        assert host.facts is evidence.facts[host.name]
        assert host.survey is host.facts.survey
        assert host.expected_gpu is evidence.expectations.gpu("NVIDIA H100 80GB HBM3")


def test_judges_of_a_single_node_judge_all_nodes() -> None:
    """No finding is a PASS; nodes without a survey are a SKIP for survey judges."""
    evidence = HEALTHY.build_evidence()
    facts = {**evidence.facts, "gpu02": replace(evidence.facts["gpu02"], survey=None)}
    spoiled = replace(evidence, facts=facts)

    def unsurveyed(host: Host) -> Finding | None:
        return failed(host, "has none") if host.survey is None else None

    def whole(node: Node, survey: Survey) -> Finding:
        return passed(node, survey.kernel)

    assert [finding.status for finding in per_host(unsurveyed)(spoiled)] == ["pass", "fail", "pass"]
    assert [finding.status for finding in per_survey(whole)(spoiled)] == ["pass", "skip", "pass"]
    surveys, gaps = collect_surveys(spoiled)
    assert (list(surveys), [gap.node for gap in gaps]) == (["gpu01", "gpu03"], ["gpu02"])


def test_a_node_with_a_repeated_finding_is_named_once() -> None:
    """GPUs are judged on all nodes, and then the port on one of them."""
    findings = [passed("n1"), passed("n2"), passed("n1")]

    assert [finding.node for finding in fold_findings(findings)] == ["n[1-2]"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"gpu01": 1}, ["pass 1"]),
        ({"gpu01": 1, "gpu02": 7, "gpu03": 1}, ["pass 1", "fail 7, gpu[01,03] 1", "pass 1"]),
        ({"gpu01": 2, "gpu02": 1}, ["pass 2", "fail 1, gpu01 2"]),
        ({"gpu01": None, "gpu02": 1, "gpu03": 1}, ["skip unknown", "pass 1", "pass 1"]),
        ({"gpu01": None}, ["skip unknown"]),
    ],
)
def test_an_odd_value_is_compared_with_the_usual_value(
    values: dict[str, int | None], expected: list[str]
) -> None:
    """Most nodes are right, and of two the first; the others pass with the value."""
    evidence = HEALTHY.build_evidence()
    facts = {name: evidence.facts[name] for name in values}

    judge = uniform_value(
        lambda host: skipped(host, "unknown") if (first := values[host.name]) is None else first,
        lambda host, value, common, others: failed(host, f"{value}, {others} {common}"),
    )
    findings = judge(replace(evidence, facts=facts))

    assert [f"{finding.status} {finding.text}" for finding in findings] == expected
