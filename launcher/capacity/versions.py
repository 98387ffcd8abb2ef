"""What changed between releases of vLLM, as far as memory goes.

Pure. Sources: vLLM's release notes, and the sources named beside each.
"""

from __future__ import annotations

import re

TODAY = (0, 32)
_VERSION = re.compile(r"v?0\.(\d{1,3})(\.\d)?(?!\d)")
_MONTH = re.compile(r"(20\d\d)-(\d\d)")
# The minor release that was the newest in a month, from the logs of `tests/fixtures/planner/`.
_RELEASES = {
    "2025-02": 7,
    "2025-06": 9,
    "2025-08": 10,
    "2025-10": 11,
    "2025-12": 13,
    "2026-01": 14,
    "2026-02": 15,
    "2026-03": 17,
    "2026-04": 19,
    "2026-06": 23,
    "2026-07": 26,
    "2026-08": 27,
    "2026-09": 29,
    "2026-10": 31,
    "2026-11": 32,
}


def version_of(text: str | None) -> tuple[int, int]:
    """Return major and minor of a version as people write it, or of the newest in the month of a
    date; today's where it says neither. `0.1` is what YAML makes of 0.10.
    """
    if found := _VERSION.search(text or ""):
        minor = int(found[1])
        return (0, minor * 10 if minor < 4 and not found[2] else minor)
    if month := _MONTH.search(text or ""):
        known = [minor for when, minor in _RELEASES.items() if when <= month[0]]
        return (0, known[-1]) if known else (0, min(_RELEASES.values()))
    return TODAY


def utilization(version: tuple[int, int]) -> float:
    """Return the default of `--gpu-memory-utilization` (`config/cache.py`)."""
    return 0.92 if version > (0, 19) else 0.9


def charges_graphs(version: tuple[int, int]) -> bool:
    """Tell whether CUDA graphs are taken off the KV cache (`gpu_worker.py`, it says since 0.21;
    0.20.0 did).
    """
    return version >= (0, 20)


def batches(version: tuple[int, int], pp: int) -> int:
    """Return how many batches may be under way (`max_concurrent_batches` in `config/vllm.py`).

    Before, what a sliding window keeps was counted with one batch.
    """
    return pp + 1 if version >= (0, 25) else 1


def defaults(version: tuple[int, int], gpu: str, memory_gib: float) -> tuple[int, int]:
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


def aligns_states(version: tuple[int, int]) -> bool:
    """Tell whether recurrent models cache prefixes by default, for which a request keeps two states
    (`MambaModelConfig` in `model_executor/models/config.py`).
    """
    return version >= (0, 14)
