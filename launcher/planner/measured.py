"""What a server that has answered tells of the next one: where split and flags are the same, the
memory of its KV cache is known and need not be estimated.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.planner.architecture import Architecture
from launcher.planner.estimate import (
    Engine,
    Estimate,
    Range,
    Stage,
    budget,
    cache_request,
    limits_of,
    with_cache,
)
from launcher.planner.flags import Flags
from launcher.planner.kv_cache import cache_of
from launcher.planner.weights import GIB

# What decides only how the cache's memory is laid out, or by how much it is larger or smaller.
_OTHERWISE = Flags(length=1, utilization=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server of the model that has answered, at a time in seconds since 1970: its split, its
    flags, and for how many longest requests the KV cache of one replica has room.
    """

    at: float
    tp: int
    pp: int
    dp: int
    flags: Flags
    concurrency: float


def measured(
    model: Architecture, engine: Engine, found: Estimate, starts: Sequence[Started]
) -> Estimate:
    """Return the estimate with what the newest start of the same kind has held, where there is one.

    Another length, dtype of the cache or utilization is reckoned from there.
    """
    for start in starts:
        if _key(start.flags, start.tp, start.pp, _coupled(model, start.dp)) == _key(
            engine.flags, engine.tp, engine.pp, engine.dp
        ):
            return _as_started(model, engine, found, start)
    return found


def _coupled(model: Architecture, dp: int) -> int:
    """Return how many replicas share memory's work: those of a mixture share its experts."""
    return dp if model.experts else 1


def _key(flags: Flags, tp: int, pp: int, dp: int) -> tuple[object, ...]:
    alike = replace(
        flags,
        length=_OTHERWISE.length,
        utilization=_OTHERWISE.utilization,
        cache_dtype=_OTHERWISE.cache_dtype,
        prefix_caching=_OTHERWISE.prefix_caching,
        hybrid=_OTHERWISE.hybrid,
        block=_OTHERWISE.block,
        dcp=_OTHERWISE.dcp,
    )
    return alike, tp, pp, dp


def _as_started(model: Architecture, engine: Engine, found: Estimate, start: Started) -> Estimate:
    if engine.flags.cache_bytes:  # what is given is known without a start
        return replace(found, at=start.at)
    then = replace(engine, flags=start.flags)
    limits = limits_of(model, then)
    if found.cache is None:
        if limits.length != found.length:
            return found
        times = start.concurrency
        tokens = int(times * found.length)
        return replace(found, at=start.at, tokens=_exactly(tokens), concurrency=_exactly(times))
    cache = cache_of(model, cache_request(model, then, limits), limits.counts)
    blocks = round(start.concurrency * cache.per_request)
    stages = tuple(
        _stage(stage, blocks * each / GIB + budget(engine, at) - budget(then, at))
        for at, (stage, each) in enumerate(zip(found.stages, cache.block_bytes, strict=True))
    )
    return with_cache(replace(found, stages=stages, at=start.at), found.cache)


def _stage(stage: Stage, kv: float) -> Stage:
    """Return a stage whose KV cache is known: what weights leave of the rest is working memory."""
    rest = max(0.0, stage.budget - kv)
    weights = min(stage.weights.likely, rest)
    return replace(
        stage, weights=_exactly(weights), working=_exactly(rest - weights), kv=_exactly(kv)
    )


def _exactly(value: float) -> Range:
    return Range(value, value, value)
