"""Differences between vLLM releases that affect memory.

Pure. Sources: vLLM's release notes, and the files named at each function.
"""

from typing import Literal

CURRENT = (0, 32)


def default_utilization(version: tuple[int, int]) -> float:
    """Return the default of `--gpu-memory-utilization` (`config/cache.py`)."""
    return 0.92 if version > (0, 19) else 0.9


def counts_graph_memory(version: tuple[int, int]) -> bool:
    """True if CUDA graphs reduce the KV cache (`gpu_worker.py` says since 0.21; 0.20.0 did)."""
    return version >= (0, 20)


def sampler_kind(
    version: tuple[int, int], gpu: str, flashinfer: bool | None
) -> Literal["fused", "sorts", "either", "unsure"]:
    """Return the sampler of a server's memory measurement (`v1/sample/ops/topk_topp_sampler.py`):
    sorting all logits takes ten copies of them, a kernel of FlashInfer or Triton three.
    `flashinfer` is `VLLM_USE_FLASHINFER_SAMPLER`.

    Triton's kernel came with 0.17. Up to 0.11, FlashInfer's was used if it was installed, as in
    vLLM's own images; then only on request, and since 0.21 again by default. On RTX Blackwell it
    may not compile, and its replacement took up to eleven copies.
    """
    if version >= (0, 17):
        return "unsure" if "RTX PRO" in gpu or "RTX 50" in gpu else "fused"
    if version < (0, 12) and flashinfer is None and not is_amd(gpu):
        return "either"
    return "fused" if flashinfer and not is_amd(gpu) else "sorts"


def is_amd(gpu: str) -> bool:
    """True for an AMD GPU."""
    return "MI3" in gpu or "AMD" in gpu


def mxfp4_width(version: tuple[int, int], gpu: str) -> int:
    """Return the multiple to which the width of gpt-oss' experts is padded
    (`layers/quantization/mxfp4.py`, later `fused_moe/oracle/mxfp4.py`): Triton's kernels, which
    Hopper uses since 0.11, need less.
    """
    hopper = any(name in gpu for name in ("H100", "H20", "H800"))
    return 64 if hopper and version >= (0, 11) else 128


def needs_block_per_sequence(version: tuple[int, int]) -> bool:
    """True if CUDA graphs of a recurrent model need a cache block for each of `--max-num-seqs`
    (`config/compilation.py`, "exceeds available Mamba cache blocks"). 0.18 and 0.19 captured fewer
    graphs instead.
    """
    return version >= (0, 20)


def max_batches(version: tuple[int, int], pp: int) -> int:
    """Return the maximum of concurrent batches (`max_concurrent_batches` in `config/vllm.py`).

    Before 0.25, a sliding window's cache was computed with one batch.
    """
    return pp + 1 if version >= (0, 25) else 1


def default_limits(version: tuple[int, int], gpu: str, memory_gib: float) -> tuple[int, int]:
    """Return `--max-num-batched-tokens` and `--max-num-seqs` (`engine/arg_utils.py`,
    `get_batch_defaults`).
    """
    if "gb10" in gpu.lower():  # from logs: vLLM does not use its memory size
        return 2048, 256
    if memory_gib >= 160 and version >= (0, 14):
        return 16384, 1024
    if memory_gib >= 70 and "a100" not in gpu.lower():
        return 8192, 1024
    return 2048, 256


def caches_prefixes(version: tuple[int, int]) -> bool:
    """True if recurrent models cache prefixes by default, for which a request keeps two states
    (`MambaModelConfig` in `model_executor/models/config.py`).
    """
    return version >= (0, 14)
