"""What the containers that will serve see."""

from __future__ import annotations

import pytest

from tests.checks.spoiled import NODES, Case, named, stays_unknown, turns_red

CASES = (
    Case(
        id="rdma-container",
        red={"gpu02": "fail"},
        text="the container has no /dev/infiniband",
        fix="ib_uverbs",
        inside={"gpu02": {"infiniband": ()}},
    ),
    Case(
        id="memlock",
        red={"gpu03": "fail"},
        text="may lock 8192 KiB of memory only",
        fix="LimitMEMLOCK=infinity",
        inside={"gpu03": {"memlock_unlimited": False, "memlock": 8 << 20}},
    ),
    Case(
        id="ipc-lock",
        red={"gpu01": "fail"},
        text="lacks the capability IPC_LOCK",
        fix="--cap-add IPC_LOCK",
        inside={"gpu01": {"capabilities": ("CHOWN",)}},
    ),
    Case(
        id="libibverbs",
        red=dict.fromkeys(NODES, "fail"),
        text="no libibverbs.so.1",
        fix="apt-get install -y libibverbs1",
        inside={"*": {"libibverbs": ""}},
    ),
    Case(
        id="ray-version",
        red={"gpu02": "fail"},
        text="Ray 2.48.0, while gpu[01,03] has 2.60.0",
        fix="`docker rmi --force`",
        inside={"gpu02": {"ray": "2.48.0"}},
    ),
    Case(
        id="python-version",
        red={"gpu02": "fail"},
        text="Python 3.10.1, while gpu[01,03] has 3.12.3",
        fix="`vlaunch up` again",
        inside={"gpu02": {"python": "3.10.1"}},
    ),
)


UNKNOWN = (
    (
        Case(id="memlock", red={}, text="", fix="", inside={"gpu01": {"memlock_unlimited": False}}),
        "is not known",
    ),
    (
        Case(
            id="ipc-lock",
            red={},
            text="",
            fix="",
            evidence={"inside": {}, "inside_missing": {"gpu01": "asked in vain"}},
        ),
        "no container",
    ),
    (
        Case(
            id="libibverbs",
            red={},
            text="",
            fix="",
            evidence={"inside": {}},
            facts={"*": {"images": {}}},
        ),
        "the image is not on this node yet: run `vlaunch up`",
    ),
    (
        Case(id="ray-version", red={}, text="", fix="", inside={"*": {"ray": ""}}),
        "the image has no Ray; `vlaunch up` adds 2.60.0",
    ),
    (
        Case(
            id="python-version",
            red={},
            text="",
            fix="",
            inside={"*": {"error": "OCI runtime exec failed"}},
        ),
        "OCI runtime exec failed",
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
