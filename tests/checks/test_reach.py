"""The login, and sudo."""

from __future__ import annotations

import pytest

from tests.checks.spoiled import NODES, ROCE, Case, facts, findings, named, turns_red

CASES = (
    Case(
        id="ssh",
        red={"gpu03": "fail"},
        text="cannot be reached: Connection refused",
        fix="`ssh -p 2222 ops@gpu03 true`",
        own={"gpu03": ", ssh: {user: ops, port: 2222}"},
        evidence={
            "facts": {name: facts(name) for name in NODES[:2]},
            "missing": {"gpu03": "Connection refused"},
        },
    ),
    Case(
        id="sudo",
        red={"gpu02": "fail"},
        text="`sudo -n docker` may not be run by `ops` without a password",
        fix="NOPASSWD",
        more="docker: [sudo, -n, docker]\n" + ROCE,
        facts={
            "gpu02": {"docker_version": None, "said": {"docker": "sudo: a password is required"}}
        },
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


def test_a_node_says_who_it_was_reached_as() -> None:
    """The value to fold by."""
    assert {each.text for each in findings(Case(id="ssh", red={}, text="", fix=""))} == {
        "answers, as ops"
    }
