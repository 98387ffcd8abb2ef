"""Findings, and what is made of several."""

from __future__ import annotations

import pytest

from launcher.checks.shape import Finding, Status, folded, worst


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
    assert worst([finding("a", status) for status in statuses]) == most


def test_nodes_that_say_the_same_are_one_line() -> None:
    """And what differs in anything stays apart."""
    same = [
        finding("gpu02"),
        finding("gpu03"),
        finding("gpu04", text="other"),
        finding("", text="cluster"),
    ]

    assert [(each.node, each.text) for each in folded(same)] == [
        ("gpu[02-03]", "no"),
        ("gpu04", "other"),
        ("", "cluster"),
    ]
