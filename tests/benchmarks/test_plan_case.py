"""Cases of the planner's benchmark: layers in words, tokens of a measured cache, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from benchmarks.plan import FIXTURES
from benchmarks.plan_case import Case, parse_cases, parse_version
from launcher.core.errors import RequestError
from tests.planner import models


def case(**fields: Any) -> Case:
    """A case of an 8B model on one H100, with some fields replaced."""
    whole = {
        "id": "one",
        "config": models.LLAMA_8B,
        "weights_gib": 14.96,
        "gpu": {"name": "H100", "memory_gib": 79.18},
        **fields,
    }
    (read_case,) = parse_cases(yaml.safe_dump([whole]))
    return read_case


def test_tokens_of_a_measured_cache() -> None:
    """As many blocks of 16 tokens as 40 GiB hold on each of two GPUs."""
    measured = case(tp=2, max_model_len=8192, expect={"kv_gib": 40.0})
    expected = 40 * 1024**3 // (32 * 16 * 4 * 2 * 128 * 2) * 16

    assert expected == measured.tokens_from_kv()


def test_layers_in_words() -> None:
    """Alternating kinds, and every fourth of another kind."""
    cases = parse_cases((FIXTURES / "cases.yaml").read_text())
    kinds = {case.id: {layer.kind for layer in case.model().layers} for case in cases}

    assert len(cases) == 12
    assert kinds["dl-gpt-oss-120b-tp4-four-nodes"] == {"sliding", "full"}
    assert kinds["talos-1995-qwen3.8-27b-fp8-tp2"] == {"recurrent", "full"}


def test_counted_layers() -> None:
    """`5 mamba2, 4 mlp, 1 attention` gives the counts, which is enough without stages."""
    config = {**models.NEMOTRON_H, "layer_types": "5 mamba2, 4 mlp, 1 attention"}
    del config["hybrid_override_pattern"]
    kinds = [layer.kind for layer in case(config=config).model().layers]

    assert (kinds.count("recurrent"), kinds.count("none"), kinds.count("full")) == (5, 4, 1)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["NewForCausalLM"]},
        {**models.LLAMA_8B, "quantization": "MIXED_PRECISION"},
    ],
)
def test_no_estimate_without_weights(config: dict[str, Any]) -> None:
    """Weights of 0 GiB would otherwise be taken for measured ones."""
    with pytest.raises(RequestError, match="no estimate is possible"):
        case(config=config, weights_gib=None).estimate()


def test_stages_must_match_the_model() -> None:
    """A partition of other layers than the model has is refused."""
    with pytest.raises(RequestError, match="do not go together with a model of 32 layers"):
        case(pp=2, pp_layer_partition=[10, 10]).estimate()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.10.1.1", (0, 10)),
        ("v0.32.0", (0, 32)),
        ("0.11 nightly of 2025-11-06", (0, 11)),
        ("0.1", (0, 10)),  # what YAML makes of 0.10
        ("0.1.dev12345+g0123abc", (0, 32)),  # a build without tags: of any version
        ("0.1.dev7 of 2025-11-06", (0, 11)),
        ("0.28.dev3", (0, 28)),
        ("0.7 (2025-02, V0 engine)", (0, 7)),
        ("2026-08 (not said)", (0, 27)),
        ("nightly of 2025-11-06", (0, 11)),
        ("2024-01-01", (0, 7)),
        (None, (0, 32)),
    ],
)
def test_versions(text: str | None, version: tuple[int, int]) -> None:
    """What names no version is of today."""
    assert parse_version(text) == version
