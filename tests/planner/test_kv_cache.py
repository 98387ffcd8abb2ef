"""Groups, blocks and tokens of a KV cache, against printed figures of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import MeasuredCase, block_error, read_cases
from launcher.core.errors import RequestError
from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.kv_cache import (
    CacheRequest,
    KvCache,
    build_cache,
    count_kv_copies,
    partition_layers,
)
from tests.planner import models

FIXTURES = Path(__file__).parents[1] / "fixtures" / "planner"
GIB = 1 << 30
# Printed by another rank, or with unknown flags.
_UNKNOWN = {
    "q3-235b-fp8-l40s-tp8-ep",
    "q3-235b-fp8-h100-tp4",
    "glm52-nvfp4-gb200-tp4-ep",
    "nano3-30b-nvfp4-tp2-consumer",
}
_CASES = [
    case
    for name in ("cases.yaml", "collected.yaml")
    for case in read_cases(FIXTURES / name)
    if case.case.id not in _UNKNOWN and case.tokens and case.case.tokens_from_kv()
]


def cache(config: dict[str, Any], stages: tuple[int, ...] = (), **settings: Any) -> KvCache:
    """Return a model's cache; requests have 8,192 tokens by default."""
    model = parse_architecture(config)
    request = CacheRequest(**{"length": 8192, "in_flight": 4096, **settings})
    return build_cache(model, request, stages or (len(model.layers),))


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.case.id)
def test_tokens_match_printed_ones(case: MeasuredCase) -> None:
    """From the measured GiB, to one block."""
    off = block_error(case, case.case.estimate())
    assert off is not None
    assert off <= 1


def test_the_cases_suffice() -> None:
    """Every kind of attention is among the cases."""
    kinds = {layer.kind for case in _CASES for layer in case.model.layers}
    assert len(_CASES) >= 35
    assert {"full", "sliding", "mla", "recurrent"} <= kinds


@pytest.mark.parametrize(
    ("tp", "block"), [(1, 16 * 8 * 2 * 128 * 2), (4, 16 * 2 * 2 * 128 * 2), (16, 16 * 2 * 128 * 2)]
)
def test_heads_are_split_down_to_a_single_head(tp: int, block: int) -> None:
    """TP beyond the KV heads copies them."""
    assert cache(models.LLAMA_8B, tp=tp).block_bytes == (32 * block,)
    assert count_kv_copies(parse_architecture(models.LLAMA_8B), tp) == max(1, tp // 8)


def test_latent_attention_is_complete_on_every_gpu() -> None:
    """TP does not divide a latent KV cache; DCP multiplies what it holds."""
    single = cache(models.DEEPSEEK_V3, tp=8)
    assert single.block_bytes == (61 * 64 * 576 * 2,)
    assert single.per_request == 8192 // 64
    assert cache(models.DEEPSEEK_V3, tp=8, dcp=8).per_request == 8192 // 64 // 8


def test_an_indexer_has_a_cache_of_its_own() -> None:
    """Sparse latent attention keeps 128 values and a scale for each token and layer."""
    sparse = {**models.DEEPSEEK_V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
    assert cache(sparse).block_bytes == (61 * 64 * (576 * 2 + 132),)
    assert cache(sparse, dtype="fp8").block_bytes == (61 * 64 * (656 + 132),)


def test_blocks_of_a_sliding_window() -> None:
    """Sliding layers need a bounded number of blocks, full ones all."""
    shape = cache(models.GPT_OSS_120B, length=131072)
    needs = {group.spec.kind: group.request_blocks for group in shape.groups}
    assert needs == {"full": 131072 // 16, "sliding": -(-(127 + 4096) // 16) + 1}
    assert shape.block_bytes == (18 * 16 * 8 * 2 * 64 * 2,)


def test_blocks_without_the_hybrid_manager() -> None:
    """One group with all layers."""
    shape = cache(models.GPT_OSS_120B, hybrid=False)
    assert len(shape.groups) == 1
    assert shape.block_bytes == (36 * 16 * 8 * 2 * 64 * 2,)


def test_attention_blocks_grow_to_hold_a_state() -> None:
    """The talos case: a gated delta net's state needs blocks of 1,568 tokens with fp8 and TP 2."""
    shape = cache(models.QWEN_NEXT, tp=2, dtype="fp8", length=131072)
    assert {group.spec.block for group in shape.groups} == {1568}
    assert [len(group.layers) for group in shape.groups] == [16, 16, 16, 16]
    assert shape.per_request == 84 + 3 * 2
    assert cache(models.QWEN_NEXT, tp=2, dtype="fp8", prefix_caching=False).per_request == 6 + 3


def test_stages_differ_and_the_poorest_decides() -> None:
    """The stage with the least memory for its layers limits the blocks."""
    shape = cache(models.LLAMA_8B, stages=(20, 12))
    assert shape.block_bytes[0] * 12 == shape.block_bytes[1] * 20
    assert shape.blocks([10 * GIB, 10 * GIB]) == 10 * GIB // shape.block_bytes[0]
    assert shape.blocks([10 * GIB, 2 * GIB]) == 2 * GIB // shape.block_bytes[1]


def test_a_block_is_reserved() -> None:
    """A longest request must fit beside vLLM's reserved block."""
    shape = cache(models.LLAMA_8B)
    need = shape.per_request * shape.block_bytes[0]
    assert not shape.can_start([need])
    assert shape.can_start([need + shape.block_bytes[0]])


def test_a_model_without_attention() -> None:
    """It has no blocks, and starts."""
    config = {**models.NEMOTRON_H, "hybrid_override_pattern": "-" * 10}
    shape = cache(config)
    assert shape.blocks([GIB]) == 0
    assert shape.tokens(5) == 0


def test_an_unknown_dtype_is_rejected() -> None:
    """Layouts are not guessed."""
    with pytest.raises(RequestError, match="turboquant_k8v4"):
        cache(models.LLAMA_8B, dtype="turboquant_k8v4")


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (61, 1, (61,)),
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (62, 4, (15, 16, 16, 15)),
        (63, 4, (16, 16, 16, 15)),
        (2, 3, (1, 1, 0)),
    ],
)
def test_surplus_layers_go_before_the_last_stage(
    layers: int, stages: int, expected: tuple[int, ...]
) -> None:
    """As `get_pp_indices` divides them."""
    assert partition_layers(layers, stages) == expected
