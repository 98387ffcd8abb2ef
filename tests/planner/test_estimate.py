"""One replica, from weights to tokens: meaning of the range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.estimate import Estimate, GpuModel, PlannedEngine, Range, estimate_replica
from launcher.planner.flags import EngineFlags, parse_flags, parse_length
from launcher.planner.versions import default_limits, default_utilization, sampler_kind
from launcher.planner.weights import GIB
from tests.planner import models

H100 = GpuModel(name="H100", memory_gib=79.18)


def worked(config: dict[str, Any], gib: float, *, gpus: int = 1, **settings: Any) -> Estimate:
    """Return the estimate of a replica on H100s; `gpus` are pipeline stages."""
    engine = PlannedEngine(gpus=(H100,) * gpus, **{"flags": EngineFlags(length=8192), **settings})
    return estimate_replica(parse_architecture(config), int(gib * GIB), engine)


def test_the_sum_is_the_budget() -> None:
    """Weights, working memory and KV cache use the utilization."""
    stage = worked(models.LLAMA_8B, 14.96).poorest
    assert stage.budget == pytest.approx(79.18 * 0.92, abs=1e-6)
    assert stage.weights.likely + stage.working.likely + stage.kv.likely == pytest.approx(
        stage.budget
    )
    assert stage.kv.low < stage.kv.likely < stage.kv.high


def test_the_poorest_stage_decides() -> None:
    """A smaller GPU in the second stage reduces all tokens."""
    small = GpuModel(name="L40S", memory_gib=44.4)
    both = PlannedEngine(gpus=(H100, small), flags=EngineFlags(length=8192))
    model = parse_architecture(models.LLAMA_8B)
    estimate = estimate_replica(model, int(14.96 * GIB), both)
    alike = estimate_replica(model, int(14.96 * GIB), replace(both, gpus=(H100, H100)))
    assert estimate.poorest is estimate.stages[1]
    assert estimate.tokens is not None
    assert alike.tokens is not None
    assert estimate.tokens.likely < alike.tokens.likely


def test_too_large_a_model_does_not_start() -> None:
    """Even at the optimistic end of the range."""
    estimate = worked(models.LLAMA_8B, 80.0)
    assert not estimate.can_start("high")
    assert estimate.tokens is not None
    assert estimate.tokens.high == 0


def test_flags_move_memory() -> None:
    """Fewer sequences and eager mode leave more for the KV cache; fp8 doubles the tokens."""
    plain = worked(models.LLAMA_8B, 14.96)
    few = worked(models.LLAMA_8B, 14.96, flags=EngineFlags(length=8192, sequences=16))
    eager = worked(models.LLAMA_8B, 14.96, flags=EngineFlags(length=8192, eager=True))
    fp8 = worked(models.LLAMA_8B, 14.96, flags=EngineFlags(length=8192, cache_dtype="fp8"))
    for better in (few, eager):
        assert better.poorest.kv.likely > plain.poorest.kv.likely
    assert plain.tokens is not None
    assert fp8.tokens is not None
    assert fp8.tokens.likely == pytest.approx(2 * plain.tokens.likely, rel=0.01)


def test_unmodelled_architectures_have_no_tokens() -> None:
    """Only their weights are judged."""
    estimate = worked({"architectures": ["NewForCausalLM"]}, 30.0)
    assert estimate.tokens is None
    assert estimate.can_start("likely")
    assert not worked({"architectures": ["NewForCausalLM"]}, 90.0).can_start("high")


def test_a_cache_of_a_fixed_size_is_exact() -> None:
    """The figures come from a lab host (vLLM 0.32, CPU): two stages of one layer, 64 MiB each."""
    tiny = {
        **models.LLAMA_8B,
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    args = "--dtype float32 --max-model-len 512 --kv-cache-memory-bytes 67108864"
    estimate = worked(tiny, 0.001, gpus=2, flags=parse_flags(args.split()))
    assert estimate.tokens is not None
    assert estimate.concurrency is not None
    assert (estimate.tokens.low, estimate.tokens.high) == (65536, 65536)
    assert estimate.concurrency.likely == 128


@given(
    config=st.sampled_from(list(models.ALL.values())),
    gib=st.floats(0, 2000),
    tp=st.sampled_from([1, 2, 4, 8]),
    stages=st.integers(1, 8),
    length=st.integers(1, 1 << 24),
    sequences=st.integers(1, 4096),
)
def test_ranges_are_in_order(
    config: dict[str, Any], gib: float, tp: int, stages: int, length: int, sequences: int
) -> None:
    """For any request, low ≤ likely ≤ high; more weights never give more tokens."""
    flags = EngineFlags(length=length, sequences=sequences)
    estimate = worked(config, gib, gpus=stages, tp=tp, flags=flags)
    heavier = worked(config, gib + 10, gpus=stages, tp=tp, flags=flags)
    for stage in estimate.stages:
        for quantity in (stage.weights, stage.working, stage.kv):
            assert quantity.low <= quantity.likely <= quantity.high
    assert estimate.tokens is not None
    assert heavier.tokens is not None
    assert 0 <= estimate.tokens.low <= estimate.tokens.likely <= estimate.tokens.high
    assert heavier.tokens.likely <= estimate.tokens.likely


def test_defaults_follow_version_and_gpu() -> None:
    """As vLLM's own."""
    assert default_utilization((0, 19)) == 0.9
    assert default_utilization((0, 32)) == 0.92
    assert default_limits((0, 32), "H100", 79.2) == (8192, 1024)
    assert default_limits((0, 32), "A100 80GB", 79.2) == (2048, 256)
    assert default_limits((0, 32), "B200", 178.0) == (16384, 1024)
    assert default_limits((0, 32), "NVIDIA GB10", 119.6) == (2048, 256)


@pytest.mark.parametrize(
    ("version", "gpu", "flashinfer", "how"),
    [
        ((0, 10), "A100 80GB", None, "either"),
        ((0, 10), "A100 80GB", True, "fused"),
        ((0, 10), "A100 80GB", False, "sorts"),
        ((0, 10), "AMD MI300X", None, "sorts"),
        ((0, 12), "H100", None, "sorts"),
        ((0, 16), "H100", True, "fused"),
        ((0, 17), "H100", None, "fused"),
        ((0, 32), "H100", False, "fused"),
        ((0, 32), "RTX PRO 6000", None, "unsure"),
    ],
)
def test_the_sampler(version: tuple[int, int], gpu: str, flashinfer: bool | None, how: str) -> None:
    """By version, GPU and environment."""
    assert sampler_kind(version, gpu, flashinfer) == how


def test_sorting_takes_ten_copies_of_the_logits() -> None:
    """Measured by servers: 7.4 GiB for 1,024 sequences of gpt-oss (0.10.1), 1.43 for 256 of Qwen3
    (0.12). FlashInfer's sampler takes three copies; if the sampler is unknown, the range has both.
    """

    def working(version: tuple[int, int], **env: str) -> Range:
        flags = replace(parse_flags((), env), length=8192, sequences=1024)
        return worked(models.LLAMA_8B, 14.96, flags=flags, version=version).poorest.working

    copy = 1024 * 128256 * 4 / GIB
    sorts, fused = working((0, 12)), working((0, 12), VLLM_USE_FLASHINFER_SAMPLER="1")
    assert sorts.likely == pytest.approx(9.65 * copy, rel=0.05)
    assert fused.likely < 4 * copy
    either = working((0, 10))
    assert either.low < fused.likely < sorts.likely < either.high


def test_working_memory_of_an_rtx_pro_6000_is_covered() -> None:
    """1,024 sequences of a hybrid model took 12.7 to 14.2 GiB there (0.27)."""
    card = PlannedEngine(gpus=(GpuModel(name="RTX PRO 6000", memory_gib=94.97),), version=(0, 27))
    estimate = estimate_replica(parse_architecture(models.QWEN_NEXT), int(51.75 * GIB), card)
    assert estimate.sequences == 1024
    assert estimate.poorest.working.low < 12.7
    assert estimate.poorest.working.high > 14.2


def test_arguments_are_parsed() -> None:
    """In both spellings; the last one counts."""
    args = (
        "--max-model-len=32k --max-num-seqs 8 --max_num_seqs 16 --kv-cache-dtype fp8"
        " --gpu-memory-utilization 0.8 --enforce-eager --enable-expert-parallel -dcp 2"
        " --no-enable-prefix-caching --block-size 32 --max-num-batched-tokens 4K"
        " --kv-cache-memory-bytes 1G --speculative-config {}"
        ' --compilation-config {"cudagraph_mode":"PIECEWISE"}'
    )
    assert parse_flags(args.split()) == EngineFlags(
        utilization=0.8,
        length=32000,
        batched_tokens=4096,
        sequences=16,
        cache_dtype="fp8",
        cache_bytes=1 << 30,
        block=32,
        dcp=2,
        eager=True,
        expert_parallel=True,
        prefix_caching=False,
        drafts=True,
        full_graphs=False,
    )
    assert parse_flags([]) == EngineFlags()


@pytest.mark.parametrize(
    ("text", "tokens"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("x", None), ("0", None)]
)
def test_lengths(text: str, tokens: int | None) -> None:
    """`k` is a thousand and `K` 1024, as in vLLM."""
    assert parse_length(text) == tokens


def test_the_cpu_build_uses_a_fixed_cache() -> None:
    """65,536 tokens in 64 MiB, as printed by vLLM's CPU build, however little memory a node has;
    else the rest of the process's share.
    """
    tiny = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    }
    model = parse_architecture(tiny)
    flags = parse_flags(("--max-model-len", "512", "--kv-cache-memory-bytes", "67108864"))
    cpu_engine = PlannedEngine(gpus=(GpuModel(name="CPU", memory_gib=0.0),), flags=flags)
    estimate = estimate_replica(model, 1 << 20, cpu_engine)
    assert estimate.tokens is not None
    assert (estimate.tokens.low, estimate.tokens.high) == (131_072, 131_072)
    assert estimate.cache is not None
    assert estimate.cache.groups[0].spec.block == 128

    card = GpuModel(name="CPU", memory_gib=20.0)
    free = PlannedEngine(gpus=(card,), flags=EngineFlags(length=512, utilization=0.3))
    stage = estimate_replica(model, 1 << 20, free).poorest
    assert stage.budget == pytest.approx(6.0)
    assert 0 <= stage.kv.low < stage.kv.likely < stage.kv.high < 6.0


def test_an_engine_s_environment_counts() -> None:
    """GiB of a CPU's cache, before the flag, and the layers of stages if they fit."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_PP_LAYER_PARTITION": "3,5"}
    flags = parse_flags(("--kv-cache-memory-bytes", "7"), env)
    assert (flags.cache_bytes, flags.partition) == (2 << 30, (3, 5))
    odd = {"VLLM_CPU_KVCACHE_SPACE": "x", "VLLM_PP_LAYER_PARTITION": "3,,5"}
    assert parse_flags(("--kv-cache-memory-bytes", "7"), odd) == parse_flags(
        ("--kv-cache-memory-bytes", "7")
    )
