"""Findings, and what is made of several."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.check import Finding, Status, failed, fold_findings, passed, skipped, worst_status
from launcher.core.domain import Node
from launcher.hosts.check import Host, uniform_value, per_host, per_survey, collect_surveys
from launcher.tools.survey import Survey
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


def test_nodes_that_say_the_same_are_one_line() -> None:
    """And what differs in anything stays apart."""
    same = [
        finding("gpu02"),
        finding("gpu03"),
        finding("gpu04", text="other"),
        finding("", text="cluster"),
    ]

    assert [(each.node, each.text) for each in fold_findings(same)] == [
        ("gpu[02-03]", "no"),
        ("gpu04", "other"),
        ("", "cluster"),
    ]


def test_a_node_that_answered_is_bound_to_what_it_said_and_to_the_rest() -> None:
    """In the inventory's order; one that did not answer is no host."""
    seen = HEALTHY.seen()
    left = replace(seen, facts={name: seen.facts[name] for name in ("gpu03", "gpu01")})

    assert [host.name for host in left.reached] == ["gpu01", "gpu03"]
    assert left.host("gpu02") is None
    assert left.host("gpu03") == left.reached[1]
    for host in left.reached:
        assert (host.node, host.inventory) == (seen.inventory.node(host.name), seen.inventory)
        assert host.facts is seen.facts[host.name]
        assert host.survey is host.facts.survey
        assert host.expected_gpu is seen.expectations.gpu("NVIDIA H100 80GB HBM3")


def test_judges_of_a_single_node_become_one_of_all() -> None:
    """Nothing to say is a PASS; whoever has no survey is a SKIP for those who judge surveys."""
    seen = HEALTHY.seen()
    facts = {**seen.facts, "gpu02": replace(seen.facts["gpu02"], survey=None)}
    spoiled = replace(seen, facts=facts)

    def unsurveyed(host: Host) -> Finding | None:
        return failed(host, "has none") if host.survey is None else None

    def whole(node: Node, survey: Survey) -> Finding:
        return passed(node, survey.kernel)

    assert [each_.status for each_ in per_host(unsurveyed)(spoiled)] == ["pass", "fail", "pass"]
    assert [each_.status for each_ in per_survey(whole)(spoiled)] == ["pass", "skip", "pass"]
    found, gaps = collect_surveys(spoiled)
    assert (list(found), [gap.node for gap in gaps]) == (["gpu01", "gpu03"], ["gpu02"])


def test_a_node_of_which_the_same_is_said_twice_is_named_once() -> None:
    """GPUs are judged on each node, and then the port on one of them."""
    said = [passed("n1"), passed("n2"), passed("n1")]

    assert [each.node for each in fold_findings(said)] == ["n[1-2]"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"gpu01": 1}, ["pass 1"]),
        ({"gpu01": 1, "gpu02": 7, "gpu03": 1}, ["pass 1", "fail 7, gpu[01,03] 1", "pass 1"]),
        ({"gpu01": 2, "gpu02": 1}, ["pass 2", "fail 1, gpu01 2"]),
        ({"gpu01": None, "gpu02": 1, "gpu03": 1}, ["skip unknown", "pass 1", "pass 1"]),
        ({"gpu01": None}, ["skip unknown"]),
    ],
)
def test_the_odd_one_is_told_from_whom_it_differs(
    values: dict[str, int | None], told: list[str]
) -> None:
    """Most nodes are right, and of two the first; the others pass with the value."""
    evidence = HEALTHY.seen()
    facts = {name: evidence.facts[name] for name in values}

    judge = uniform_value(
        lambda host: skipped(host, "unknown") if (one := values[host.name]) is None else one,
        lambda host, value, common, others: failed(host, f"{value}, {others} {common}"),
    )
    found = judge(replace(evidence, facts=facts))

    assert [f"{each.status} {each.text}" for each in found] == told
