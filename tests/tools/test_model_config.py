"""What a model's `config.json` says about how it can be split."""

from __future__ import annotations

import pytest

from launcher.tools.model_config import shape_of
from tests.tools.test_placement import LLAMA_70B, MOE


@pytest.mark.parametrize(
    ("config", "heads", "layers"),
    [
        (LLAMA_70B, 64, 80),
        ({"n_head": 12, "n_layer": 6}, 12, 6),
        (
            {
                "num_attention_heads": 16,
                "text_config": {"num_attention_heads": 32, "num_hidden_layers": 40},
            },
            32,
            40,
        ),
        ({"num_attention_heads": "many", "text_config": None}, None, None),
        ({"num_attention_heads": True}, None, None),
        (None, None, None),
    ],
)
def test_shape_of(config: dict[str, object] | None, heads: int | None, layers: int | None) -> None:
    """Heads and layers are read where models keep them; nonsense is not believed."""
    shape = shape_of(config)

    assert (heads, layers) == (shape.heads, shape.layers)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (LLAMA_70B, 0),
        (MOE, 128),
        ({**LLAMA_70B, "n_routed_experts": 256}, 256),
        ({**LLAMA_70B, "num_local_experts": 8}, 8),
        ({**LLAMA_70B, "moe_num_experts": [64, 64]}, 64),
        ({"text_config": MOE}, 128),
        ({**LLAMA_70B, "thinker_config": {"text_config": MOE}}, 128),
        (
            {
                **LLAMA_70B,
                "block_configs": [
                    {"block_type": "mamba"},
                    {"block_type": "moe", "n_routed_experts": 32},
                ],
            },
            32,
        ),
        ({"architectures": ["x"]}, None),
        (None, None),
    ],
)
def test_experts(config: dict[str, object] | None, experts: int | None) -> None:
    """They are found where models name them; a config that says nothing of attention is not taken
    for a dense model's.
    """
    assert experts == shape_of(config).experts
