"""IMEX channels of GB200 systems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.tools import survey_read
from tests.checks.spoiled import GPU, NODES, ROCE, Case, findings, named, turns_red

GB200 = (replace(GPU, name="NVIDIA GB200"), replace(GPU, name="NVIDIA GB200", index=1))
THERE: dict[str, dict[str, object]] = {"*": {"gpus": GB200}}
CHANNEL = {"*": {"imex": ("channel0",)}}
UNSEEN = {"*": {"error": "no such image"}}
DEVICE = "devices: [/dev/nvidia-caps-imex-channels/channel0]"
CASES = (
    Case(
        id="imex",
        red={"gpu02": "warn"},
        text="there is no IMEX channel",
        fix="nvidia-imex",
        more=f"{ROCE}\nenv: {{NVIDIA_IMEX_CHANNELS: 0}}",
        facts=THERE,
        survey={"*": {"imex": ("channel0",)}, "gpu02": {"imex": ()}},
        inside={"*": {"imex": ("channel0",)}},
    ),
    Case(
        id="imex",
        red={"gpu03": "warn"},
        text="the container has no IMEX channel",
        fix="add `devices: [/dev/nvidia-caps-imex-channels/channel0]`",
        more=f"{ROCE}\nenv: {{NVIDIA_IMEX_CHANNELS: 0}}",
        facts=THERE,
        survey=CHANNEL,
        inside={**CHANNEL, "gpu03": {"imex": ()}},
    ),
    Case(
        id="imex",
        red=dict.fromkeys(NODES, "warn"),
        text="the container has no IMEX channel",
        fix="run `vlaunch up`, which starts the container with the channel",
        more=f"{ROCE}\n{DEVICE}",
        facts=THERE,
        survey=CHANNEL,
    ),
    Case(
        id="imex",
        red=dict.fromkeys(NODES, "warn"),
        text="its IMEX channel is not given to the container",
        fix="add `devices: [/dev/nvidia-caps-imex-channels/channel0]`",
        facts=THERE,
        survey=CHANNEL,
        inside=UNSEEN,
    ),
    Case(
        id="imex",
        red={"gpu02": "warn"},
        text="Docker 29.2 does not read NVIDIA_IMEX_CHANNELS",
        fix="add `devices: [/dev/nvidia-caps-imex-channels/channel0]`",
        more=f"{ROCE}\nenv: {{NVIDIA_IMEX_CHANNELS: 0}}",
        facts={**THERE, "gpu02": {**THERE["*"], "docker_version": "29.2.0"}},
        survey=CHANNEL,
        inside=UNSEEN,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


@pytest.mark.parametrize(
    "more",
    ["env: {NVIDIA_IMEX_CHANNELS: 0}", DEVICE, "privileged: true"],
)
def test_each_way_to_give_a_channel_counts(more: str) -> None:
    """NVIDIA's hook makes it, Docker does, or all devices are there, as far as can be told without
    a look into the container.
    """
    case = Case(
        id="imex",
        red={},
        text="",
        fix="",
        more=f"{ROCE}\n{more}",
        facts=THERE,
        survey=CHANNEL,
        inside=UNSEEN,
    )

    assert {each.status for each in findings(case)} == {"pass"}


def test_a_channel_in_the_container_is_enough() -> None:
    """However it came there."""
    case = Case(id="imex", red={}, text="", fix="", facts=THERE, survey=CHANNEL, inside=CHANNEL)

    assert {each.text for each in findings(case)} == {"channel0, in the container"}


@pytest.mark.parametrize(
    ("facts", "text"), [({}, "no GPU here has NVLink"), (THERE, "the node was not surveyed")]
)
def test_what_cannot_be_judged_is_skipped(facts: dict[str, dict[str, object]], text: str) -> None:
    """Other GPUs have nothing of the kind."""
    found = findings(Case(id="imex", red={}, text="", fix="", facts=facts))

    assert {each.status for each in found} == {"skip"}
    assert all(each.text.startswith(text) for each in found)


def test_channels_are_read() -> None:
    """Their names, none where there are none, and nothing where nobody asked."""

    def read(text: str | None) -> tuple[str, ...] | None:
        parts = {"clock": ("1 1", 0), **({} if text is None else {"imex": (text, 0)})}
        found = survey_read.read(parts, {})
        assert found is not None
        return found.imex

    assert read("channel0\nchannel1") == ("channel0", "channel1")
    assert read("") == ()
    assert read(None) is None
