"""What would end a healthy cluster later."""

from __future__ import annotations

import pytest

from tests.checks.spoiled import ROCE, Case, findings, named, stays_unknown, turns_red

HOSTS = ROCE + "\nshm: host"

CASES = (
    Case(
        id="remove-ipc",
        red={"gpu02": "warn"},
        text="RemoveIPC=yes: when `ops` logs out",
        fix="sudo loginctl enable-linger ops",
        survey={"gpu02": {"linger": False}},
        more=HOSTS,
    ),
    Case(
        id="next-boot",
        red={"gpu01": "warn"},
        text="the next boot, 6.11.0-9, has no nvidia module",
        fix="dkms autoinstall -k 6.11.0-9",
        survey={"gpu01": {"next_kernel_has_driver": False, "next_kernel": "6.11.0-9"}},
    ),
)


UNKNOWN = (
    (
        Case(
            id="remove-ipc",
            red={},
            text="",
            fix="",
            survey={"gpu01": {"remove_ipc": None}},
            more=HOSTS,
        ),
        "is not known",
    ),
    (
        Case(
            id="next-boot",
            red={},
            text="",
            fix="",
            survey={"gpu01": {"next_kernel_has_driver": None}},
        ),
        "is not known",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


@pytest.mark.parametrize("spared", [{"uid": 0}, {"remove_ipc": False}, {"linger": True}])
def test_who_keeps_shared_memory_at_logout(spared: dict[str, object]) -> None:
    """Root and other system users, those who linger, and hosts where it is switched off."""
    case = Case(
        id="remove-ipc",
        red={},
        text="",
        fix="",
        survey={"*": {"linger": False, **spared}},
        more=HOSTS,
    )

    assert {each.status for each in findings(case)} == {"pass"}


@pytest.mark.parametrize("survey", [{"remove_ipc": None}, {"uid": None}])
def test_containers_with_memory_of_their_own_have_nothing_to_lose_at_logout(
    survey: dict[str, object],
) -> None:
    """What logind does need not be known then."""
    found = findings(Case(id="remove-ipc", red={}, text="", fix="", survey={"*": survey}))

    assert {(each.status, each.text) for each in found} == {
        ("pass", "the containers have shared memory of their own")
    }


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_what_was_not_seen_is_skipped_with_its_reason(case: Case, reason: str) -> None:
    """Never green."""
    stays_unknown(case, reason)
