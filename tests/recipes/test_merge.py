"""Merging a recipe: base, variant, hardware, features."""

from __future__ import annotations

import pytest

from launcher.core.errors import RequestError
from launcher.recipes.library import Hardware
from launcher.recipes.merge import merge_recipe, version_numbers
from launcher.recipes.vllm_command import VllmCommand
from tests.recipes import case

UNKNOWN = Hardware(accelerator="nvidia")


def merged(
    on: str | Hardware, variant: str | None = None, gpus: int = 8, **features: str
) -> VllmCommand:
    """Merge the made-up recipe."""
    hardware = case.hardware(on) if isinstance(on, str) else on
    return merge_recipe("acme", case.recipe(), hardware, gpus, variant=variant, features=features)


def args(command: VllmCommand) -> list[str]:
    """The options of a command."""
    return [option.text for option in command.options]


def test_base_arguments_on_unknown_hardware() -> None:
    """The base, the brand's overrides, and the features that are on; strategies are not read."""
    command = merged(UNKNOWN)

    assert command.model == "acme/Dense-8B"
    assert args(command) == [
        "--max-num-seqs 64",
        "--max-model-len auto",
        "--port 9000",
        "--enable-auto-tool-choice",
        "--tool-call-parser acme",
    ]
    assert command.env == {"ACME_BASE": "1", "ACME_LAYER": "nvidia"}
    assert (command.image, command.version) == ("acme/vllm:nvidia", "0.11.0")
    assert command.notes == (
        "recipe acme: variant default on unknown hardware (needs 200 GB)",
        "features: tool_calling; off: spec_decoding (`--feature NAME`)",
        "arguments for one kind of GPU are left out; name it: `--hardware NAME`",
        "the image must contain the packages of: uv pip install acme-kernels",
    )


def test_later_layers_win() -> None:
    """Variant, its hardware, the recipe's hardware, and the variant's generation, in this order."""
    command = merged("h200", "fp8")

    assert command.model == "acme/Dense-8B-FP8"
    assert command.env["ACME_LAYER"] == "variant on hopper"
    assert args(command)[:5] == [
        "--max-model-len auto",
        "--port 9000",
        "--kv-cache-dtype fp8",
        "--seed 7",
        "--max_num_seqs=256",
    ]
    assert (command.image, command.version) == ("acme/vllm:h200", "0.30.0")
    assert merged("h100", "fp8").image == "acme/vllm:fp8"
    assert merged("h100").env["ACME_LAYER"] == "hopper"
    assert "not verified on h200; verified on: h100" in command.notes
    assert "the recipe serves this variant with TP 4 (`--tp 4`)" in command.notes


@pytest.mark.parametrize(
    ("on", "gpus", "variant", "why"),
    [
        ("h100", 8, "default", "needs 200 GB"),
        ("h100", 2, "fp8", "needs 100 GB; variant default needs 200 GB, the GPUs have 160 GB"),
        ("b200", 1, "fp8", "needs 100 GB; variant default needs 200 GB, the GPUs have 180 GB"),
        ("rtx_5090", 2, "nvfp4", "the GPUs have 64 GB"),
    ],
)
def test_the_largest_variant_that_fits(on: str, gpus: int, variant: str, why: str) -> None:
    """The default first; NVFP4 only on Blackwell."""
    (note, *_) = merged(on, gpus=gpus).notes

    assert note.startswith(f"recipe acme: variant {variant} on {on} (")
    assert why in note


def test_a_chosen_variant_is_served_although_it_does_not_fit() -> None:
    """With a note."""
    note = merged("h100", "nvfp4").notes[0]

    assert note.endswith("(chosen, but variant nvfp4 (nvfp4) needs blackwell)")


def test_features() -> None:
    """Turned on with a mode, turned off, replaced on some hardware, or on by default."""
    assert args(merged("h100", spec_decoding=""))[-1].endswith("""'{"method":"mtp"}'""")
    assert args(merged("h100", spec_decoding="eagle"))[-1].endswith("""'{"method":"eagle"}'""")
    assert "--enable-auto-tool-choice" not in args(merged("h100", tool_calling="off"))
    assert args(merged("b200"))[-1] == "--tool-call-parser acme-b"
    assert args(merged("gb200"))[-1] == "--port 9000"
    assert args(merged("h100", "fp8"))[-1].endswith("""'{"method":"eagle"}'""")
    off = "feature spec_decoding is off: its modes for fp8 are: none"
    assert off in merged("rtx_5090", "fp8").notes


@pytest.mark.parametrize(
    ("on", "variant", "features", "message", "hint"),
    [
        ("h100", "fp9", {}, "acme has no variant `fp9`; did you mean `fp8`?", "default, fp8"),
        ("h100", None, {"tools": ""}, "acme has no feature `tools`", "tool_calling"),
        (
            "h100",
            "fp8",
            {"spec_decoding": "mtp"},
            "spec_decoding cannot be used: its modes for fp8 are: eagle",
            "recipes show acme",
        ),
        ("h100", None, {"tool_calling": "x"}, "its modes for default are: none", "leave it out"),
        ("rtx_5090", None, {}, "no variant of acme runs on these nodes", "`--variant ascend`"),
    ],
)
def test_errors(
    on: str, variant: str | None, features: dict[str, str], message: str, hint: str
) -> None:
    """Each names what exists."""
    with pytest.raises(RequestError) as raised:
        merged(on, variant, 1 if on == "rtx_5090" else 8, **features)

    assert message in raised.value.message
    assert raised.value.hint
    assert hint in raised.value.hint


def test_unsupported_hardware() -> None:
    """A recipe may exclude hardware."""
    with pytest.raises(RequestError, match="acme does not run on mi300x"):
        merged(case.hardware("mi300x", "amd"))


def test_versions_are_compared_as_numbers() -> None:
    """Not as text."""
    assert version_numbers("v0.9.1") < version_numbers("0.10") < version_numbers("0.10.1rc2")
    assert version_numbers("nightly") == ()
