"""What the arguments of `vllm serve` say about memory.

Pure. Names and defaults: `engine/arg_utils.py` of vLLM 0.32. What stands in the inventory or on the
command line is read leniently, for vLLM itself refuses what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.tools import vllm

_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# `VLLM_CPU_KVCACHE_SPACE` is GiB, `VLLM_PP_LAYER_PARTITION` numbers between commas.
_SPACE, _PARTITION = "VLLM_CPU_KVCACHE_SPACE", "VLLM_PP_LAYER_PARTITION"
_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
_NOT_FULL = re.compile(r"cudagraph_mode\W+(PIECEWISE|NONE)\b")  # however it is quoted
_LENGTH = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?)([kKmMgG]?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What is asked of an engine; None where nothing is said, so that vLLM's default holds.

    `cache_bytes` is a KV cache of a given size on each GPU, beside which nothing else counts.
    `drafts`: a draft model speculates. `full_graphs`: whole decoding steps are captured.
    `flashinfer_sampler` is what the environment says of it.
    """

    utilization: float | None = None
    length: int | None = None
    batched_tokens: int | None = None
    sequences: int | None = None
    cache_dtype: str = "auto"
    cache_bytes: int = 0
    block: int = 0
    dcp: int = 1
    eager: bool = False
    expert_parallel: bool = False
    prefix_caching: bool = True
    hybrid: bool = True
    drafts: bool = False
    partition: tuple[int, ...] = ()
    full_graphs: bool = True
    flashinfer_sampler: bool | None = None


def length_of(text: str) -> int | None:
    """Return the tokens of `32768`, `32k` (thousands) or `32K` (times 1024), as vLLM reads them;
    None for what it does not read (`human_readable_int`).
    """
    found = _LENGTH.fullmatch(text)
    if not found:
        return None
    return int(float(found[1]) * _THOUSANDS[found[2]]) or None


def flags_of(args: Sequence[str], env: Mapping[str, str] | None = None) -> Flags:
    """Read the arguments, and of an engine's environment what counts before them: vLLM's CPU build
    takes the GiB of its cache from there (`platforms/cpu.py`), pipeline stages their layers
    (`distributed/utils.py`).
    """
    env = env or {}

    def number(*names: str) -> int | None:
        found = [length_of(value) for value in vllm.values(args, *names)]
        return found[-1] if found else None

    words = {word.partition("=")[0].replace("_", "-") for word in args}
    cache = vllm.values(args, "--kv-cache-dtype")
    cache = cache or vllm.values(args, "--dtype")  # `auto` is the model's own
    return Flags(
        utilization=vllm.memory_share(args) if "--gpu-memory-utilization" in words else None,
        length=number("--max-model-len"),
        batched_tokens=number("--max-num-batched-tokens"),
        sequences=number("--max-num-seqs"),
        cache_dtype=cache[-1] if cache else "auto",
        cache_bytes=_whole(env.get(_SPACE)) * (1 << 30)
        or number("--kv-cache-memory-bytes", "--kv-cache-memory")
        or 0,
        block=number("--block-size") or 0,
        dcp=number("--decode-context-parallel-size", "-dcp") or 1,
        eager="--enforce-eager" in words,
        expert_parallel=bool(words & {"--enable-expert-parallel", "-ep"}),
        prefix_caching="--no-enable-prefix-caching" not in words,
        drafts=bool(words & {"--speculative-config", "-sc"}),
        hybrid="--disable-hybrid-kv-cache-manager" not in words,
        partition=_partition(env.get(_PARTITION, "")),
        full_graphs=not _NOT_FULL.search(" ".join(args)),
        flashinfer_sampler={"0": False, "1": True}.get(env.get(_SAMPLER, "")),
    )


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 6 else 0


def _partition(text: str) -> tuple[int, ...]:
    """Return the layers of each pipeline stage; () where it says nothing that can be read."""
    counts = [_whole(each.strip()) for each in text.split(",")]
    return tuple(counts) if all(counts) else ()
