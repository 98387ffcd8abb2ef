"""Clocks."""

from __future__ import annotations

import pytest

from tests.checks.spoiled import Case, named, stays_unknown, turns_red

CASES = (
    Case(
        id="time-skew",
        red={"gpu02": "warn"},
        text="its clock is 5 s ahead of the other nodes'",
        fix="timedatectl set-ntp true",
        survey={"gpu02": {"skew": 5.1}},
    ),
    Case(
        id="time-skew",
        red={"gpu01": "fail"},
        text="its clock is 100 s behind",
        fix="on gpu01",
        survey={"gpu01": {"skew": -99.9}},
    ),
    Case(
        id="time-skew",
        red={"": "warn"},
        text="this machine's clock is 60 s behind the nodes'",
        fix="this machine's clock",
        survey={"*": {"skew": 60.0}},
    ),
    Case(
        id="time-sync",
        red={"gpu03": "warn"},
        text="nothing keeps its clock",
        fix="set-ntp true` on gpu03",
        survey={"gpu03": {"synced": False}},
    ),
)


UNKNOWN = (
    (
        Case(id="time-skew", red={}, text="", fix="", survey={"gpu01": {"skew": None}}),
        "its clock was not read",
    ),
    (
        Case(id="time-sync", red={}, text="", fix="", survey={"gpu01": {"synced": None}}),
        "no time daemon",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_what_was_not_seen_is_skipped_with_its_reason(case: Case, reason: str) -> None:
    """Never green."""
    stays_unknown(case, reason)
