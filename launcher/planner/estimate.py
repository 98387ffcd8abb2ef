"""Memory of one engine on each GPU, and the capacity of the remaining KV cache in tokens.

Pure: budget = memory × utilization; KV cache = budget − weights − working memory, and the stage
with the fewest blocks decides (`determine_available_memory` in vLLM's `v1/worker/gpu_worker.py`).

vLLM's CPU build, for lab clusters and servers without GPUs, takes its KV cache from
`--kv-cache-memory-bytes` or `VLLM_CPU_KVCACHE_SPACE`, else the node's memory × utilization less the
memory of the rank's process so far (`platforms/cpu.py`, `v1/worker/cpu_worker.py` and
`engine/arg_utils.py` of vLLM 0.32).
"""

import math
from dataclasses import dataclass, field, replace

from launcher.planner import versions
from launcher.planner.architecture import Architecture
from launcher.planner.flags import EngineFlags
from launcher.planner.kv_cache import CacheRequest, KvCache, build_cache, partition_layers
from launcher.planner.weights import GIB, ParallelConfig, stage_bytes
from launcher.planner.working_memory import FACTORS, EngineLoad, Parts, memory_parts, sum_parts

CPU_NAME = "CPU"
CPU_DEFAULTS = (2048, 128)  # batched tokens and sequences, for each rank
CPU_BLOCK = 128  # tokens of a block; latent attention has 16, as elsewhere
CPU_PARTS = (("process", 1.0),)  # of working memory


@dataclass(frozen=True, slots=True)
class Range:
    """A quantity with its lower bound, likely value and upper bound."""

    low: float
    likely: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A GPU model or a node's CPU. Memory is in GiB, as CUDA reports it, or the node's."""

    name: str
    memory_gib: float

    @property
    def cpu(self) -> bool:
        """True for a CPU, on which vLLM's CPU build runs."""
        return self.name == CPU_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """One replica as planned. `gpus` has one entry per pipeline stage."""

    gpus: tuple[GpuModel, ...]
    tp: int = 1
    dp: int = 1
    nodes: int = 1
    flags: EngineFlags = field(default_factory=EngineFlags)
    version: tuple[int, int] = versions.CURRENT

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """One GPU of a pipeline stage, in GiB; `parts` are those of its working memory."""

    layers: int
    budget: float
    weights: Range
    working: Range
    kv: Range
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory and capacity of one replica; `cache` is None for a model that is not modelled.
    `measured_at` is the start time of the server that was measured (seconds since 1970), None for
    an estimate.
    """

    stages: tuple[StageMemory, ...]
    length: int
    batched_tokens: int
    sequences: int
    cache: KvCache | None
    tokens: Range | None = None
    concurrency: Range | None = None
    measured_at: float | None = None

    @property
    def poorest(self) -> StageMemory:
        """The stage with the fewest blocks, which decides."""
        if self.cache is None:
            return min(self.stages, key=lambda stage: stage.kv.likely)
        blocks = [
            stage.kv.likely / block_bytes if block_bytes else math.inf
            for stage, block_bytes in zip(self.stages, self.cache.block_bytes, strict=True)
        ]
        return self.stages[blocks.index(min(blocks))]

    def can_start(self, bound: str) -> bool:
        """True if a request of the longest length fits at the `low`, `likely` or `high` bound."""
        if self.cache is None and self.measured_at is not None:
            return True  # it has started
        memory = self.kv_bytes(bound)
        return min(memory) > 0 and (self.cache is None or self.cache.can_start(memory))

    def state_limit(self, bound: str = "low") -> int | None:
        """Return the limit of sequences if only recurrent states prevent the start, else None."""
        if self.cache is None:
            return None
        blocks = self.cache.blocks(self.kv_bytes(bound))
        return blocks if self.cache.per_request < blocks < self.cache.states else None

    def kv_bytes(self, bound: str) -> list[int]:
        """Return the KV cache's bytes on each stage at a bound; 0 if there is no room."""
        return [max(0, int(getattr(stage.kv, bound) * GIB)) for stage in self.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine from flags or vLLM's defaults; `counts` is the layers of each stage."""

    length: int
    batched_tokens: int
    sequences: int
    counts: tuple[int, ...]


def engine_limits(model: Architecture, engine: PlannedEngine) -> EngineLimits:
    """Return the limits of an engine: its flags', else the defaults of its version and GPU."""
    flags = engine.flags
    smallest = min(engine.gpus, key=lambda gpu: gpu.memory_gib)
    tokens, sequences = versions.default_limits(engine.version, smallest.name, smallest.memory_gib)
    if smallest.cpu:
        tokens, sequences = (default * engine.tp * engine.pp for default in CPU_DEFAULTS)
    layers = len(model.layers) or 1
    is_valid = (len(flags.partition), sum(flags.partition)) == (engine.pp, layers)
    return EngineLimits(
        length=flags.length or model.context or 1,
        batched_tokens=flags.batched_tokens or tokens,
        sequences=flags.sequences or sequences,
        counts=flags.partition if is_valid else partition_layers(layers, engine.pp),
    )


def estimate_replica(model: Architecture, weight_bytes: int, engine: PlannedEngine) -> Estimate:
    """Estimate one replica.

    Raises:
        RequestError: the planner does not know the KV cache dtype.
    """
    limits = engine_limits(model, engine)
    parallel = ParallelConfig(
        tp=engine.tp,
        dp=engine.dp,
        stages=limits.counts,
        expert_parallel=engine.flags.expert_parallel,
        mxfp4_width=versions.mxfp4_width(engine.version, engine.gpus[0].name),
    )
    stages = []
    for stage, size in enumerate(stage_bytes(model, weight_bytes, parallel)):
        load = _engine_load(engine, limits, parallel, stage)
        stages.append(_estimate_stage(model, engine, load, size / GIB))
    result = Estimate(
        stages=tuple(stages),
        length=limits.length,
        batched_tokens=limits.batched_tokens,
        sequences=limits.sequences,
        cache=None,
    )
    if model.unmodelled_reason:
        return result
    request = build_cache_request(model, engine, limits)
    return add_cache(result, build_cache(model, request, limits.counts))


def add_cache(result: Estimate, cache: KvCache) -> Estimate:
    """Return an estimate with the capacity of a KV cache of this shape in the remaining memory."""
    blocks = [cache.blocks(result.kv_bytes(bound)) for bound in ("low", "likely", "high")]
    return replace(
        result,
        cache=cache,
        tokens=Range(*map(cache.tokens, blocks)),
        concurrency=Range(*map(cache.concurrency, blocks)),
    )


def memory_budget(engine: PlannedEngine, stage: int) -> float:
    """Return the GiB of a stage's GPU that the engine may use."""
    share = engine.flags.utilization or versions.default_utilization(engine.version)
    return math.ceil(engine.gpus[stage].memory_gib * GIB * share) / GIB


def _engine_load(
    engine: PlannedEngine, limits: EngineLimits, parallel: ParallelConfig, stage: int
) -> EngineLoad:
    return EngineLoad(
        parallel=parallel,
        stage=stage,
        batched_tokens=limits.batched_tokens,
        sequences=limits.sequences,
        nodes=engine.nodes,
        eager=engine.flags.eager,
        version=engine.version,
        gpu=engine.gpus[stage].name,
        flashinfer=engine.flags.flashinfer_sampler,
    )


def build_cache_request(
    model: Architecture, engine: PlannedEngine, limits: EngineLimits
) -> CacheRequest:
    """Return the settings that decide an engine's KV cache."""
    flags, on_cpu = engine.flags, engine.gpus[0].cpu
    graphs = flags.full_graphs and not flags.eager and not on_cpu
    block_per_sequence = graphs and versions.needs_block_per_sequence(engine.version)
    batches = engine.pp if on_cpu else versions.max_batches(engine.version, engine.pp)
    return CacheRequest(
        tp=engine.tp,
        dcp=flags.dcp,
        length=limits.length,
        in_flight=limits.batched_tokens * batches,
        block=flags.block or (CPU_BLOCK if on_cpu and not model.latent else 0),
        dtype=flags.cache_dtype,
        prefix_caching=flags.prefix_caching and versions.caches_prefixes(engine.version),
        hybrid=flags.hybrid,
        states=limits.sequences if block_per_sequence else 0,
    )


def _estimate_stage(
    model: Architecture, engine: PlannedEngine, load: EngineLoad, weights: float
) -> StageMemory:
    budget = memory_budget(engine, load.stage)
    sizes = CPU_PARTS if engine.gpus[load.stage].cpu else memory_parts(model, load)
    working = Range(*sum_parts(sizes, FACTORS))
    error = weights * (0.04 if model.quantization == "mxfp4" else 0.015)
    return StageMemory(
        layers=load.parallel.stages[load.stage],
        budget=budget,
        weights=Range(weights - error, weights, weights + error),
        working=working,
        kv=_remaining_kv(budget - weights, working, error, engine.flags.cache_bytes),
        parts=sizes,
    )


def _remaining_kv(free: float, working: Range, weight_error: float, fixed_bytes: int) -> Range:
    """Return the KV cache's GiB: the free memory, or the size set by a flag."""
    if fixed_bytes:
        return Range(fixed_bytes / GIB, fixed_bytes / GIB, fixed_bytes / GIB)
    likely = free - working.likely
    return Range(
        likely - math.hypot(weight_error, working.high - working.likely),
        likely,
        likely + math.hypot(weight_error, working.likely - working.low),
    )
