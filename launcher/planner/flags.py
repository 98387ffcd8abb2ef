"""Arguments of `vllm serve` that affect memory.

Pure. Names and defaults: `engine/arg_utils.py` of vLLM 0.32. Parsing is lenient, as vLLM itself
refuses wrong values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.tools import vllm

_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# `VLLM_CPU_KVCACHE_SPACE` is GiB, `VLLM_PP_LAYER_PARTITION` comma-separated layer counts.
_SPACE, _PARTITION = "VLLM_CPU_KVCACHE_SPACE", "VLLM_PP_LAYER_PARTITION"
_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
_NOT_FULL = re.compile(r"cudagraph_mode\W+(PIECEWISE|NONE)\b")  # however it is quoted
_LENGTH = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?)([kKmMgG]?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Settings of an engine; None stands for vLLM's default.

    `cache_bytes` is a fixed KV cache size per GPU, which overrides everything else. `drafts`: a
    draft model speculates. `full_graphs`: whole decoding steps are captured. `flashinfer_sampler`
    comes from the environment.
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


def parse_length(text: str) -> int | None:
    """Return the tokens of `32768`, `32k` (thousands) or `32K` (times 1024), as vLLM parses them;
    None for other text (`human_readable_int`).
    """
    match = _LENGTH.fullmatch(text)
    if not match:
        return None
    return int(float(match[1]) * _THOUSANDS[match[2]]) or None


def parse_flags(args: Sequence[str], env: Mapping[str, str] | None = None) -> EngineFlags:
    """Parse the arguments, and the variables of an engine's environment that override them: vLLM's
    CPU build takes the GiB of its cache from there (`platforms/cpu.py`), pipeline stages their
    layers (`distributed/utils.py`).
    """
    env = env or {}

    def number(*names: str) -> int | None:
        lengths = [parse_length(value) for value in vllm.option_values(args, *names)]
        return lengths[-1] if lengths else None

    options = {arg.partition("=")[0].replace("_", "-") for arg in args}
    dtypes = vllm.option_values(args, "--kv-cache-dtype")
    dtypes = dtypes or vllm.option_values(args, "--dtype")  # `auto` is the model's own
    return EngineFlags(
        utilization=vllm.memory_share(args) if "--gpu-memory-utilization" in options else None,
        length=number("--max-model-len"),
        batched_tokens=number("--max-num-batched-tokens"),
        sequences=number("--max-num-seqs"),
        cache_dtype=dtypes[-1] if dtypes else "auto",
        cache_bytes=_parse_count(env.get(_SPACE)) * (1 << 30)
        or number("--kv-cache-memory-bytes", "--kv-cache-memory")
        or 0,
        block=number("--block-size") or 0,
        dcp=number("--decode-context-parallel-size", "-dcp") or 1,
        eager="--enforce-eager" in options,
        expert_parallel=bool(options & {"--enable-expert-parallel", "-ep"}),
        prefix_caching="--no-enable-prefix-caching" not in options,
        drafts=bool(options & {"--speculative-config", "-sc"}),
        hybrid="--disable-hybrid-kv-cache-manager" not in options,
        partition=_parse_partition(env.get(_PARTITION, "")),
        full_graphs=not _NOT_FULL.search(" ".join(args)),
        flashinfer_sampler={"0": False, "1": True}.get(env.get(_SAMPLER, "")),
    )


def _parse_count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 6 else 0


def _parse_partition(text: str) -> tuple[int, ...]:
    """Return the layers of each pipeline stage; () if the text is not readable."""
    counts = [_parse_count(count.strip()) for count in text.split(",")]
    return tuple(counts) if all(counts) else ()
