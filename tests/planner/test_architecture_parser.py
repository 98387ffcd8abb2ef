"""Architectures from `config.json` files, and rejection of impossible ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import RequestError
from launcher.planner.architecture_parser import parse_architecture
from tests.planner import models


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (models.LLAMA_8B, {"full": 32}),
        (models.DEEPSEEK_V3, {"mla": 61}),
        (models.GPT_OSS_120B, {"sliding": 18, "full": 18}),
        (models.QWEN_NEXT, {"recurrent": 48, "full": 16}),
        (models.NEMOTRON_H, {"recurrent": 4, "none": 5, "full": 1}),
        (models.LLAMA_4, {"chunked": 36, "full": 12}),
        ({**models.LLAMA_8B, "sliding_window": 4096}, {"sliding": 32}),
        (
            {**models.LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False},
            {"full": 32},
        ),
        (
            {**models.LLAMA_8B, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096},
            {"full": 32},
        ),
        (
            {
                **models.LLAMA_8B,
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 28,
            },
            {"full": 28, "sliding": 4},
        ),
        (
            {k: v for k, v in models.GPT_OSS_120B.items() if k != "layer_types"},
            {"sliding": 18, "full": 18},
        ),
        (
            {**models.LLAMA_8B, "architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096},
            {"sliding": 16, "full": 16},
        ),
    ],
)
def test_kinds_of_layers(config: dict[str, Any], kinds: dict[str, int]) -> None:
    """From the file's list, or from the family's rule."""
    architecture = parse_architecture(config)
    assert not architecture.unmodelled_reason
    assert Counter(layer.kind for layer in architecture.layers) == kinds


def test_the_first_layers_of_a_mixture_may_be_dense() -> None:
    """DeepSeek's first three layers have no experts."""
    architecture = parse_architecture(models.DEEPSEEK_V3)
    assert [layer.moe for layer in architecture.layers[:4]] == [False, False, False, True]
    assert architecture.experts is not None
    assert (architecture.experts.count, architecture.experts.shared) == (256, 2048)


def test_head_size_is_derived() -> None:
    """Without `head_dim`, heads share the hidden size."""
    assert parse_architecture(models.LLAMA_8B).layers[0].head_dim == 128


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "config.json names no architecture"),
        ({"architectures": ["NewForCausalLM"]}, "the architecture NewForCausalLM is not modelled"),
        (
            {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2},
            "config.json lacks hidden_size, num_attention_heads, vocab_size",
        ),
        (
            {**models.LLAMA_8B, "architectures": ["DeepseekV3ForCausalLM"]},
            "config.json lacks kv_lora_rank, qk_rope_head_dim",
        ),
        (
            {**models.DEEPSEEK_V3, "compress_ratios": [4, 128]},
            "DeepseekV3ForCausalLM with compressed attention is not modelled",
        ),
        ({**models.LLAMA_8B, "layer_types": ["strange"] * 32}, "its layer types are unknown"),
    ],
)
def test_unmodelled_features_are_named(config: dict[str, Any], reason: str) -> None:
    """Without guesses."""
    assert reason in parse_architecture(config).unmodelled_reason


@pytest.mark.parametrize(
    "name", ["LlamaModel", "LlamaForSequenceClassification", "LlamaForRewardModel"]
)
def test_pooling_models_have_the_layers_of_generating_ones(name: str) -> None:
    """Without a head; other encoders are not modelled."""
    architecture = parse_architecture({**models.LLAMA_8B, "architectures": [name]})
    assert (architecture.unmodelled_reason, architecture.tied) == ("", True)
    assert architecture.layers == parse_architecture(models.LLAMA_8B).layers
    assert parse_architecture({**models.LLAMA_8B, "architectures": ["BertModel"]}).unmodelled_reason


def test_wrong_fields_are_reported_together() -> None:
    """Negative, huge and wrongly typed fields are one error."""
    wrong = {
        **models.LLAMA_8B,
        "num_hidden_layers": 100_000,
        "hidden_size": -1,
        "vocab_size": "many",
        "tie_word_embeddings": "yes",
    }
    with pytest.raises(RequestError) as caught:
        parse_architecture(wrong)
    evidence = caught.value.evidence
    assert "num_hidden_layers: 100000" in evidence
    assert "hidden_size: -1" in evidence
    assert "vocab_size: 'many'" in evidence
    assert "tie_word_embeddings: 'yes'" in evidence


def test_attention_without_kv_heads_is_an_error() -> None:
    """The model has other attention heads."""
    with pytest.raises(RequestError) as caught:
        parse_architecture({**models.LLAMA_8B, "num_key_value_heads": 0})
    assert caught.value.evidence == "num_key_value_heads: 0"


_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**40),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers()),
)


@given(
    base=st.sampled_from(list(models.ALL.values())),
    odd=st.dictionaries(
        st.sampled_from(
            sorted({key for config in models.ALL.values() for key in config})
            + sorted(models.QWEN_NEXT["text_config"])
        ),
        _ODD,
        max_size=4,
    ),
)
def test_any_file_is_parsed_or_rejected(base: dict[str, Any], odd: dict[str, Any]) -> None:
    """It gives an architecture or one error."""
    try:
        architecture = parse_architecture({**base, **odd})
    except RequestError as error:
        assert error.evidence
    else:
        assert architecture.unmodelled_reason or architecture.layers
