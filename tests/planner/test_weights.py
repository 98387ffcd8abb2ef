"""Weights per GPU, compared with logs of real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import MeasuredCase, read_cases
from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.versions import mxfp4_width
from launcher.planner.weights import GIB, ParallelConfig, estimate_weight_bytes, stage_bytes
from tests.planner import models

FIXTURES = Path(__file__).parents[1] / "fixtures" / "planner"
_CASES = [
    case
    for name in ("cases.yaml", "collected.yaml", "unseen.yaml")
    for case in read_cases(FIXTURES / name)
    if case.model_gib and case.case.weights_gib
]


def stage_gib(config: dict[str, Any], gib: float, **split: Any) -> list[float]:
    """Return the GiB per GPU of every stage."""
    model = parse_architecture(config)
    parallel = ParallelConfig(**{"stages": (len(model.layers) or 1,), **split})
    return [size / GIB for size in stage_bytes(model, int(gib * GIB), parallel)]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.case.id)
def test_weights_match_printed_ones(case: MeasuredCase) -> None:
    """Within 3 %, and within 14 % if a kernel pads experts."""
    likely = case.case.estimate().stages[0].weights.likely
    allowed = 0.14 if case.model.quantization == "mxfp4" else 0.03
    assert likely == pytest.approx(case.model_gib, rel=allowed)


@pytest.mark.parametrize(
    ("gpu", "version", "gib"),
    [
        ("A100 80GB", (0, 14), 65.97),  # printed by an H100 without Triton's kernels
        ("H100 80GB", (0, 10), 65.97),
        ("H100 80GB", (0, 14), 64.38),  # https://github.com/vllm-project/vllm/issues/33155
    ],
)
def test_experts_of_gpt_oss_are_padded_for_the_kernel(
    gpu: str, version: tuple[int, int], gib: float
) -> None:
    """Triton's, which Hopper uses since 0.11, pads less than Marlin's."""
    width = mxfp4_width(version, gpu)
    assert stage_gib(models.GPT_OSS_120B, 60.8, mxfp4_width=width) == pytest.approx(
        [gib], rel=0.005
    )


@pytest.mark.parametrize(
    ("quantization", "per_parameter"),
    [
        (None, 2.0),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, 0.0),
    ],
)
def test_weights_are_counted_by_their_precision(
    quantization: dict[str, str] | None, per_parameter: float
) -> None:
    """With several precisions, the size is unknown."""
    config = {"quantization_config": quantization} if quantization else {}
    model = parse_architecture({**models.LLAMA_8B, **config})
    tables = 2 * model.vocabulary * model.hidden * 2
    linear = estimate_weight_bytes(parse_architecture(models.LLAMA_8B)) - tables
    expected = tables + linear / 2 * per_parameter if per_parameter else 0
    assert estimate_weight_bytes(model) == pytest.approx(expected, rel=1e-6)


def test_a_single_gpu_has_the_whole_checkpoint() -> None:
    """Without changes."""
    assert stage_gib(models.LLAMA_8B, 14.96) == [pytest.approx(14.96, rel=1e-3)]


def test_tp_divides_what_it_can() -> None:
    """KV heads beyond their number are copied."""
    assert stage_gib(models.LLAMA_8B, 14.96, tp=8)[0] == pytest.approx(14.96 / 8, rel=1e-3)
    assert stage_gib(models.LLAMA_8B, 14.96, tp=16)[0] > 14.96 / 16


def test_the_first_stage_has_the_embedding_and_the_last_the_head() -> None:
    """Tied embeddings count twice, then."""
    first, middle, last = stage_gib(models.LLAMA_8B, 14.96, stages=(11, 11, 10))
    embedding = 128256 * 4096 * 2 / GIB
    layer = (14.96 - 2 * embedding) / 32
    assert first == pytest.approx(11 * layer + embedding, rel=1e-3)
    assert middle == pytest.approx(11 * layer, rel=1e-3)
    assert last == pytest.approx(10 * layer + embedding, rel=1e-3)
    tied = {**models.LLAMA_8B, "tie_word_embeddings": True}
    assert sum(stage_gib(tied, 14.0, stages=(16, 16))) == pytest.approx(14.0 + embedding, rel=1e-3)


def test_experts_are_shared_by_data_parallel_ranks() -> None:
    """DP 8 with TP 1 has all of the attention and an eighth of the experts."""
    alone = stage_gib(models.QWEN_235B, 219.8)[0]
    shared = stage_gib(models.QWEN_235B, 219.8, dp=8, expert_parallel=True)[0]
    split = stage_gib(models.QWEN_235B, 219.8, tp=8, expert_parallel=True)[0]
    assert alone / 8 < split < shared < alone / 4


def test_draft_layers_are_not_loaded() -> None:
    """The checkpoint of DeepSeek-V3 has one more layer, which is loaded for speculation alone."""
    without = {**models.DEEPSEEK_V3, "num_nextn_predict_layers": 0}
    extra = stage_gib(without, 641.0, tp=16)[0] - stage_gib(models.DEEPSEEK_V3, 641.0, tp=16)[0]
    assert extra * 16 == pytest.approx(13.0, abs=2.5)


def test_a_vision_tower_is_on_the_first_stage() -> None:
    """Bytes that the language part does not explain belong to the tower."""
    first, last = stage_gib(models.QWEN_NEXT, 53.0, stages=(32, 32))
    assert first > last


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.case.id)
def test_weights_can_be_counted(case: MeasuredCase) -> None:
    """Without a checkpoint, the shape gives its size within a fifth."""
    assert estimate_weight_bytes(case.model) / GIB == pytest.approx(case.case.weights_gib, rel=0.2)


def test_unmodelled_weights_are_divided_evenly() -> None:
    """Ranks get equal parts."""
    config = {"architectures": ["NewForCausalLM"]}
    assert stage_gib(config, 16.0, tp=4, stages=(0, 0)) == [2.0, 2.0]
