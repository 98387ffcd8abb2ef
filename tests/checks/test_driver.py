"""The NVIDIA driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.checks.catalogue import run
from launcher.checks.driver import tag_cuda
from launcher.tools.docker import Image
from tests.checks.spoiled import GPU, IMAGE, NODES, Case, findings, named, turns_red

REQUIRE = "cuda>=12.9 brand=unknown,driver>=535,driver<536"
CUDA12 = Image(
    id="sha256:0",
    identity="i",
    digests=(),
    architecture="amd64",
    labels={},
    env={"NVIDIA_REQUIRE_CUDA": REQUIRE},
)

CASES = (
    Case(
        id="driver",
        red={"gpu02": "warn"},
        text="driver 590.10, while gpu[01,03] has 580.95.05",
        fix="install 580.95.05 on gpu02",
        facts={"gpu02": {"gpus": (replace(GPU, driver="590.10"),) * 2}},
    ),
    Case(
        id="driver",
        red=dict.fromkeys(NODES, "fail"),
        text="driver 570.1 is too old for CUDA 13.0.3 of the image, which needs 580",
        fix="or set `image: vllm/vllm-openai:v0.32.0-cu129`",
        facts={"*": {"gpus": (replace(GPU, driver="570.1"),) * 2}},
    ),
    Case(
        id="driver",
        red={"gpu01": "fail"},
        text="too old for CUDA 12.9",
        fix="install driver 525 or newer on gpu01",
        facts={
            "gpu01": {"gpus": (replace(GPU, driver="520.61"),) * 2},
            "*": {"images": {IMAGE: CUDA12}},
        },
    ),
    Case(
        id="driver",
        red={"gpu01": "fail"},
        text="driver 515.1 is older than 520, the first that knows H100",
        fix="install driver 520 or newer on gpu01",
        facts={
            "gpu01": {"gpus": (replace(GPU, driver="515.1"),) * 2},
            "*": {"images": {IMAGE: replace(CUDA12, env={})}},
        },
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


def test_data_centre_gpus_are_told_of_cuda_compat_and_others_are_not() -> None:
    """NVIDIA supports it on these only."""
    old = replace(GPU, driver="570.1")
    geforce = replace(old, name="NVIDIA GeForce RTX 4090")

    assert (
        "cuda-compat"
        in findings(Case(id="driver", red={}, text="", fix="", facts={"*": {"gpus": (old,) * 2}}))[
            0
        ].fix
    )
    assert (
        "cuda-compat"
        not in findings(
            Case(id="driver", red={}, text="", fix="", facts={"*": {"gpus": (geforce,) * 2}})
        )[0].fix
    )


def test_an_image_that_is_not_here_is_judged_by_its_tag() -> None:
    """vLLM's own tags tell their CUDA."""
    turns_red(
        Case(
            id="driver",
            red=dict.fromkeys(NODES, "fail"),
            text=(
                "driver 535.10 is too old for CUDA 13, which the image's tag tells and which"
                " needs 580"
            ),
            fix="or set `image: vllm/vllm-openai:v0.32.0-cu129`",
            facts={"*": {"images": {}, "gpus": (replace(GPU, driver="535.10"),) * 2}},
        )
    )


@pytest.mark.parametrize(
    ("image", "cuda"),
    [
        ("vllm/vllm-openai:v0.20.0", "13"),
        ("docker.io/vllm/vllm-openai:v1.0", "13"),
        ("vllm/vllm-openai:v0.19.1", ""),
        ("vllm/vllm-openai:v0.32.0-cu129", "12.9"),
        ("vllm/vllm-openai:nightly-cu130", "13.0"),
        ("vllm/vllm-openai:latest", ""),
        ("vllm/vllm-openai", ""),
        ("vllm/vllm-openai:v0.32.0-arm64", ""),
        ("vllm/vllm-openai-cpu:v0.32.0", ""),
        ("registry.example/vllm:v0.32.0", ""),
        ("vllm/vllm-openai@sha256:" + "0" * 64, ""),
    ],
)
def test_tags_tell_a_cuda_version_or_nothing(image: str, cuda: str) -> None:
    """Nothing is guessed of other people's images."""
    assert tag_cuda(image) == cuda


@pytest.mark.parametrize(
    ("image", "images", "reason"),
    [
        ("vllm/vllm-openai:latest", {}, "the image is not here yet, so its CUDA is not known"),
        (IMAGE, {IMAGE: replace(CUDA12, env={})}, "the image does not say its CUDA"),
    ],
)
def test_a_driver_that_is_held_against_nothing_is_not_green(
    image: str, images: dict[str, Image], reason: str
) -> None:
    """An old driver may be too old for what will be pulled."""
    case = Case(id="driver", red={}, text="", fix="", facts={"*": {"images": images}})
    seen = case.seen()
    (result,) = run(replace(seen, inventory=replace(seen.inventory, image=image)), ids=["driver"])

    assert {(each.status, each.text) for each in result.findings} == {
        ("skip", f"driver 580.95.05; {reason}")
    }


@pytest.mark.parametrize(
    ("images", "text"),
    [({}, "for CUDA 13 by the image's tag"), ({IMAGE: CUDA12}, "for CUDA 12.9 of the image")],
)
def test_a_green_driver_tells_what_it_was_held_against(images: dict[str, Image], text: str) -> None:
    """The image itself, or its tag while it is not there."""
    found = findings(Case(id="driver", red={}, text="", fix="", facts={"*": {"images": images}}))

    assert {(each.status, each.text) for each in found} == {("pass", f"driver 580.95.05, {text}")}
