"""Measured KV caches: a server that has answered gives the memory of the next one with the same
layout and flags, without an estimate.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.planner.architecture import Architecture
from launcher.planner.estimate import (
    Estimate,
    PlannedEngine,
    Range,
    StageMemory,
    add_cache,
    build_cache_request,
    engine_limits,
    memory_budget,
)
from launcher.planner.flags import EngineFlags
from launcher.planner.kv_cache import build_cache
from launcher.planner.weights import GIB

# Flags that only change the cache's layout, or its size by a known difference.
_NEUTRAL_FLAGS = EngineFlags(length=1, utilization=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStart:
    """A server of the model that has answered: its time in seconds since 1970, its layout, its
    flags, and the number of longest requests in the KV cache of one replica.
    """

    at: float
    tp: int
    pp: int
    dp: int
    flags: EngineFlags
    concurrency: float


def apply_measurement(
    model: Architecture, engine: PlannedEngine, estimate: Estimate, starts: Sequence[MeasuredStart]
) -> Estimate:
    """Return the estimate with the capacity of the newest comparable start, if there is one.

    Another length, cache dtype or utilization is converted.
    """
    for start in starts:
        if _comparison_key(
            start.flags, start.tp, start.pp, _coupled_replicas(model, start.dp)
        ) == _comparison_key(engine.flags, engine.tp, engine.pp, engine.dp):
            return _estimate_from_start(model, engine, estimate, start)
    return estimate


def _coupled_replicas(model: Architecture, dp: int) -> int:
    """Return the replicas that share experts, 1 without experts."""
    return dp if model.experts else 1


def _comparison_key(flags: EngineFlags, tp: int, pp: int, dp: int) -> tuple[object, ...]:
    neutral = replace(
        flags,
        length=_NEUTRAL_FLAGS.length,
        utilization=_NEUTRAL_FLAGS.utilization,
        cache_dtype=_NEUTRAL_FLAGS.cache_dtype,
        prefix_caching=_NEUTRAL_FLAGS.prefix_caching,
        hybrid=_NEUTRAL_FLAGS.hybrid,
        block=_NEUTRAL_FLAGS.block,
        dcp=_NEUTRAL_FLAGS.dcp,
    )
    return neutral, tp, pp, dp


def _estimate_from_start(
    model: Architecture, engine: PlannedEngine, estimate: Estimate, start: MeasuredStart
) -> Estimate:
    if engine.flags.cache_bytes:  # a fixed size needs no measurement
        return replace(estimate, measured_at=start.at)
    measured = replace(engine, flags=start.flags)
    limits = engine_limits(model, measured)
    if estimate.cache is None:
        if limits.length != estimate.length:
            return estimate
        tokens = _exact_range(int(start.concurrency * estimate.length))
        concurrency = _exact_range(start.concurrency)
        return replace(estimate, measured_at=start.at, tokens=tokens, concurrency=concurrency)
    cache = build_cache(model, build_cache_request(model, measured, limits), limits.counts)
    blocks = round(start.concurrency * cache.per_request)
    stages = []
    for index, stage in enumerate(estimate.stages):
        kv = blocks * cache.block_bytes[index] / GIB
        kv += memory_budget(engine, index) - memory_budget(measured, index)
        stages.append(_measured_stage(stage, kv))
    return add_cache(replace(estimate, stages=tuple(stages), measured_at=start.at), estimate.cache)


def _measured_stage(stage: StageMemory, kv: float) -> StageMemory:
    """Return a stage with a known KV cache: the budget less cache and weights is working memory."""
    remaining = max(0.0, stage.budget - kv)
    weights = min(stage.weights.likely, remaining)
    return replace(
        stage,
        weights=_exact_range(weights),
        working=_exact_range(remaining - weights),
        kv=_exact_range(kv),
    )


def _exact_range(value: float) -> Range:
    return Range(value, value, value)
