"""What changed between releases of vLLM, as far as memory goes.

Pure. Sources: vLLM's release notes, and the sources named beside each.
"""

from __future__ import annotations

from typing import Literal

CURRENT = (0, 32)


def default_utilization(version: tuple[int, int]) -> float:
    """Return the default of `--gpu-memory-utilization` (`config/cache.py`)."""
    return 0.92 if version > (0, 19) else 0.9


def counts_graph_memory(version: tuple[int, int]) -> bool:
    """Tell whether CUDA graphs are taken off the KV cache (`gpu_worker.py`, it says since 0.21;
    0.20.0 did).
    """
    return version >= (0, 20)


def sampler_kind(
    version: tuple[int, int], gpu: str, flashinfer: bool | None
) -> Literal["fused", "sorts", "either", "unsure"]:
    """Return how a server samples while it measures its memory (`v1/sample/ops/
    topk_topp_sampler.py`): it sorts all logits, which takes ten copies of them, or a kernel of
    FlashInfer's or Triton's takes three. `flashinfer` is `VLLM_USE_FLASHINFER_SAMPLER`.

    Triton's kernel came with 0.17. Until 0.11 FlashInfer's was used where it was installed, which
    it is in vLLM's own images; then only where it was asked for, and since 0.21 again by default.
    On RTX Blackwell it may not compile, and what is used instead took up to eleven copies.
    """
    if version >= (0, 17):
        return "unsure" if "RTX PRO" in gpu or "RTX 50" in gpu else "fused"
    if version < (0, 12) and flashinfer is None and not is_amd(gpu):
        return "either"
    return "fused" if flashinfer and not is_amd(gpu) else "sorts"


def is_amd(gpu: str) -> bool:
    """Tell whether a GPU is AMD's."""
    return "MI3" in gpu or "AMD" in gpu


def mxfp4_width(version: tuple[int, int], gpu: str) -> int:
    """Return what the width of gpt-oss' experts is padded to a multiple of
    (`layers/quantization/mxfp4.py`, later `fused_moe/oracle/mxfp4.py`): Triton's kernels, which
    Hopper uses since 0.11, need less.
    """
    hopper = any(name in gpu for name in ("H100", "H20", "H800"))
    return 64 if hopper and version >= (0, 11) else 128


def needs_block_per_sequence(version: tuple[int, int]) -> bool:
    """Tell whether CUDA graphs of a recurrent model are only captured where each of
    `--max-num-seqs` has a block of the cache (`config/compilation.py`, "exceeds available Mamba
    cache blocks"). 0.18 and 0.19 captured fewer graphs instead.
    """
    return version >= (0, 20)


def max_batches(version: tuple[int, int], pp: int) -> int:
    """Return how many batches may be under way (`max_concurrent_batches` in `config/vllm.py`).

    Before, what a sliding window keeps was counted with one batch.
    """
    return pp + 1 if version >= (0, 25) else 1


def default_limits(version: tuple[int, int], gpu: str, memory_gib: float) -> tuple[int, int]:
    """Return `--max-num-batched-tokens` and `--max-num-seqs` (`engine/arg_utils.py`,
    `get_batch_defaults`).
    """
    if "gb10" in gpu.lower():  # printed by servers on it: its memory is not asked as others' is
        return 2048, 256
    if memory_gib >= 160 and version >= (0, 14):
        return 16384, 1024
    if memory_gib >= 70 and "a100" not in gpu.lower():
        return 8192, 1024
    return 2048, 256


def caches_prefixes(version: tuple[int, int]) -> bool:
    """Tell whether recurrent models cache prefixes by default, for which a request keeps two states
    (`MambaModelConfig` in `model_executor/models/config.py`).
    """
    return version >= (0, 14)
