"""How long names take to be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.tools.survey import Lookup
from tests.checks.spoiled import Case, findings, named, turns_red

ASKS = ("nameserver 192.0.2.53", "hosts: files dns")


def lost(*peers: str) -> tuple[Lookup, ...]:
    """Return lookups of which none was answered."""
    own = Lookup(kind="own", what="gpu01", seconds=5.01, answered=False)
    return (*(replace(own, kind="reverse", what=peer) for peer in peers), own)


CASES = (
    Case(
        id="names-resolve",
        red={"gpu02": "warn"},
        text="looking up the name of 10.0.0.11, 10.0.0.12 and its own name got no answer within 5",
        fix="'10.0.0.11 gpu01' '10.0.0.12 gpu02' '10.0.0.13 gpu03' | sudo tee -a /etc/hosts",
        survey={"gpu02": {"lookups": lost("10.0.0.11", "10.0.0.12"), "asks": ASKS}},
    ),
    Case(
        id="names-resolve",
        red={"gpu01": "warn", "gpu02": "warn", "gpu03": "warn"},
        text="looking up the name of 10.0.0.1, 10.0.0.2, 10.0.0.3 and 2 more and its own name got",
        fix="on every node",
        survey={"*": {"lookups": lost(*(f"10.0.0.{each}" for each in range(1, 6)))}},
    ),
    Case(
        id="names-resolve",
        red={"gpu03": "warn"},
        text="looking up the address of gpu02 took 3 s",
        fix="`vlaunch down` and `vlaunch up`",
        survey={
            "gpu03": {
                "lookups": (
                    Lookup(kind="reverse", what="10.0.0.12", seconds=0.01),
                    Lookup(kind="forward", what="gpu02", seconds=3.2),
                )
            }
        },
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


def test_whom_the_node_asks_is_the_evidence() -> None:
    """Its own configuration, so that the wrong server shows."""
    found = {each.node: each for each in findings(CASES[0])}

    assert found["gpu02"].evidence == "nameserver 192.0.2.53\nhosts: files dns"
    assert found["gpu01"].status == "pass"


def test_what_could_not_be_looked_up_is_skipped() -> None:
    """A node without getent."""
    case = Case(id="names-resolve", red={}, text="", fix="", survey={"gpu01": {"lookups": None}})
    (found,) = [each for each in findings(case) if each.node == "gpu01"]

    assert (found.status, "getent" in found.text) == ("skip", True)
