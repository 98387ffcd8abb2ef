"""Shared memory and Ray's object store."""

from __future__ import annotations

import pytest

from launcher.checks.memory import object_store
from tests.checks.spoiled import NODES, ROCE, Case, findings, named, stays_unknown, turns_red

GB = 10**9
HOSTS = ROCE + "\nshm: host"

CASES = (
    Case(
        id="shm",
        red={"gpu02": "fail"},
        text="Ray's object store of 9.3 GiB does not fit: the host's /dev/shm has 0.1 GiB",
        fix="object_store: 75MiB",
        survey={"gpu02": {"shm": 64 << 20, "shm_free": 64 << 20}},
        more=HOSTS,
    ),
    Case(
        id="shm",
        red={"gpu02": "fail"},
        text="1.0 GiB of it free",
        fix="mount -o remount",
        survey={"gpu02": {"shm_free": 1 << 30}},
        more=HOSTS,
    ),
    Case(
        id="shm",
        red={"gpu02": "fail"},
        text="the container's /dev/shm, half of the memory, has 1.0 GiB",
        fix="object_store: 512MiB}` in the inventory, or make it larger: give `shm:` a size",
        survey={"gpu02": {"memory": 2 << 30}},
        more=ROCE + "\nray: {object_store: 2GiB}",
    ),
    Case(
        id="shm",
        red=dict.fromkeys(NODES, "fail"),
        text="`shm:` has 1.0 GiB",
        fix="raise `shm:`",
        more=ROCE + "\nshm: 1GiB",
    ),
)


UNKNOWN = (
    (
        Case(id="shm", red={}, text="", fix="", survey={"gpu01": {"shm": None}}, more=HOSTS),
        "size of /dev/shm is not known",
    ),
    (
        Case(id="shm", red={}, text="", fix="", survey={"gpu01": {"memory": None}}),
        "memory is not known",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


@pytest.mark.parametrize(
    ("wanted", "memory", "shm", "store"),
    [
        (4 * GB, 100 * GB, 50 * GB, 4 * GB),
        (None, 100 * GB, 50 * GB, 30 * GB),
        (None, 1000 * GB, 1000 * GB, 200 * GB),
        (None, 1000 * GB, 100 * GB, 95 * GB),
        (None, 1000 * GB, 1 * GB, 10 * GB),
        (None, 10 * GB, 1 * GB, 3 * GB),
    ],
)
def test_the_object_store_is_as_large_as_ray_makes_it(
    wanted: int | None, memory: int, shm: int, store: int
) -> None:
    """Three tenths of memory, bounded by 200 GB and by shared memory, but not below 10 GB."""
    assert object_store(wanted, memory, shm) == store


def test_an_object_store_that_fits_is_told_with_its_sizes() -> None:
    """The value to fold by."""
    case = Case(
        id="shm", red={}, text="", fix="", more=ROCE + "\nshm: 8GiB\nray: {object_store: 4GiB}"
    )

    assert findings(case)[0].text == "/dev/shm of 8.0 GiB holds Ray's object store of 4.0 GiB"


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_what_was_not_seen_is_skipped_with_its_reason(case: Case, reason: str) -> None:
    """Never green."""
    stays_unknown(case, reason)
