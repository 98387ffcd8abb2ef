"""Merging a recipe: base, variant, hardware, features."""

from __future__ import annotations

import pytest
import yaml

from launcher.core.errors import RequestError
from launcher.recipes.library import Hardware
from launcher.recipes.merge import merge_recipe, version_numbers
from launcher.recipes.schema import Recipe
from launcher.recipes.vllm_command import VllmCommand
from tests.recipes import case

UNKNOWN = Hardware(accelerator="nvidia")


def merged(
    on: str | Hardware, variant: str | None = None, gpus: int = 8, **features: str
) -> VllmCommand:
    """Merge the sample recipe."""
    hardware = case.hardware(on) if isinstance(on, str) else on
    return merge_recipe("acme", case.recipe(), hardware, gpus, variant=variant, features=features)


def args(command: VllmCommand) -> list[str]:
    """Return a command's options."""
    return [option.text for option in command.options]


def test_base_arguments_on_unknown_hardware() -> None:
    """The base, the vendor's overrides, and default features, without strategies."""
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
    """Enabled with a mode, disabled, replaced on some hardware, or on by default."""
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
    """They list the existing names."""
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
    """`0.10` is newer than `0.9`."""
    assert version_numbers("v0.9.1") < version_numbers("0.10") < version_numbers("0.10.1rc2")
    assert version_numbers("nightly") == ()


def merge_text(text: str, on: str = "h100", **features: str) -> VllmCommand:
    """Merge the recipe in a text on eight GPUs."""
    recipe = Recipe.model_validate(yaml.safe_load(text))
    return merge_recipe("acme/M", recipe, case.hardware(on), 8, features=features)


def test_variables_of_features() -> None:
    """They come with the arguments, and only while the feature is on."""
    text = (
        "model: {model_id: acme/M, base_env: {ACME: base, OTHER: base}}\n"
        "features: {long: {args: [--long], env: {ACME: long}}}\n"
        "opt_in_features: [long]\n"
    )

    assert merge_text(text).env == {"ACME": "base", "OTHER": "base"}
    assert merge_text(text, long="").env == {"ACME": "long", "OTHER": "base"}


def test_memory_on_one_kind_of_hardware() -> None:
    """Hardware with memory beside its GPUs' may need less of that."""
    text = (
        "model: {model_id: acme/M}\n"
        "variants: {default: {vram_minimum_gb: 900,"
        " hardware_overrides: {h200: {vram_minimum_gb: 300}}}}\n"
    )

    assert "variant default on h200 (needs 300 GB)" in merge_text(text, "h200").notes[0]
    with pytest.raises(RequestError, match="no variant"):
        merge_text(text, "h100")


def test_dependencies_of_one_brand() -> None:
    """Those of another brand are no concern."""
    text = (
        "model: {model_id: acme/M}\n"
        "dependencies: [{command: pip a, brand: NVIDIA}, {command: pip b, brand: AMD}]\n"
    )
    notes = "\n".join(merge_text(text).notes)

    assert "the packages of: pip a" in notes
    assert "pip b" not in notes


def test_rust_front_end() -> None:
    """A recipe that prefers it says so; vLLM's default stays."""
    command = merge_text("model: {model_id: acme/M, default_frontend: rust}\n")

    assert "VLLM_USE_RUST_FRONTEND" in command.notes[-1]
    assert command.env == {}


@pytest.mark.parametrize(
    "image", ["acme/x:1", "{nvidia: acme/x:1}", "{nvidia: {cu130: acme/x:1}}", "{cu130: acme/x:1}"]
)
def test_forms_of_an_image(image: str) -> None:
    """One for NVIDIA, or one per brand, optionally by CUDA version."""
    assert merge_text(f"model: {{model_id: acme/M, docker_image: {image}}}\n").image == "acme/x:1"
