"""The model on the nodes, and at Hugging Face."""

from __future__ import annotations

import pytest

from launcher.hosts.check import HubAccess
from tests.hosts.checks.spoiled import (
    FILES,
    NODES,
    ROCE,
    Case,
    findings,
    named,
    stays_unknown,
    turns_red,
)

CASES = (
    Case(
        id="model",
        red={"gpu02": "fail"},
        text="has no org/model, while gpu[01,03] has it",
        fix="vlaunch model copy org/model --from gpu01 --to gpu02",
        files={"gpu02": None},
    ),
    Case(
        id="model",
        red={"gpu02": "fail"},
        text="differs from the one on gpu[01,03]: lacks model.safetensors",
        fix="copy it from gpu01",
        files={"gpu02": {"config.json": 700}},
    ),
    Case(
        id="model",
        red={"gpu03": "fail"},
        text="config.json has 701 bytes, 700 on gpu[01-02]",
        fix="vlaunch model copy org/model --from gpu01 --to gpu03",
        files={"gpu03": {**FILES, "config.json": 701}},
    ),
    Case(
        id="model",
        red={"gpu01": "fail"},
        text="was not downloaded completely",
        fix="copy it from gpu02",
        files={"gpu01": {**FILES, "blobs/ab12.incomplete": 5}},
    ),
    Case(
        id="model",
        red=dict.fromkeys(NODES, "fail"),
        text="HF_HUB_OFFLINE prevents",
        fix="remove HF_HUB_OFFLINE",
        extra=ROCE + "\nenv: {HF_HUB_OFFLINE: 1}",
        files=dict.fromkeys(NODES),
    ),
    Case(
        id="model",
        red=dict.fromkeys(NODES, "fail"),
        text="has no /models/m",
        fix="vlaunch model copy ./FOLDER --as /models/m",
        files=dict.fromkeys(NODES),
        evidence={"model": "/models/m"},
    ),
    Case(
        id="hf-token",
        red={"": "fail"},
        text="rejects the token",
        fix="settings/tokens",
        evidence={"hub": HubAccess(status="unauthorized")},
    ),
    Case(
        id="hf-token",
        red={"": "fail"},
        text="org/model is gated",
        fix="huggingface.co/org/model",
        evidence={"hub": HubAccess(status="gated")},
    ),
    Case(
        id="hf-token",
        red={"": "fail"},
        text="org/model does not exist",
        fix="correct the model",
        evidence={"hub": HubAccess(status="not found")},
    ),
)


UNKNOWN = (
    (
        Case(id="model", red={}, text="", fix="", files=dict.fromkeys(NODES)),
        "`vlaunch serve` downloads it to each node",
    ),
    (Case(id="model", red={}, text="", fix="", evidence={"model": ""}), "no model is named"),
    (Case(id="model", red={}, text="", fix="", evidence={"files": {}}), "could not be checked"),
    (Case(id="hf-token", red={}, text="", fix="", evidence={"hub": None}), "was not queried"),
    (
        Case(id="hf-token", red={}, text="", fix="", evidence={"hub": HubAccess(status="offline")}),
        "cannot reach Hugging Face",
    ),
    (
        Case(
            id="hf-token", red={}, text="", fix="", evidence={"hub": HubAccess(status="no token")}
        ),
        "no HF_TOKEN",
    ),
    (Case(id="hf-token", red={}, text="", fix="", evidence={"model": "/models/m"}), "is a path"),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


def test_a_model_on_all_nodes_is_reported_with_its_size() -> None:
    """The text for folding."""
    assert {finding.text for finding in findings(Case(id="model", red={}, text="", fix=""))} == {
        "org/model: 2 files, 5.00 GB"
    }


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_unknown_values_are_skipped_with_the_reason(case: Case, reason: str) -> None:
    """They never pass."""
    stays_unknown(case, reason)


def test_of_two_copies_the_complete_copy_is_the_reference() -> None:
    """Although the other has more bytes so far."""
    partial = {**FILES, "blobs/ab12.incomplete": 9_000_000_000}
    case = Case(id="model", red={}, text="", fix="", files={"gpu01": partial, "gpu03": None})

    assert [finding.status for finding in findings(case)] == ["fail", "pass", "fail"]
    assert "copy it from gpu02" in findings(case)[0].fix
