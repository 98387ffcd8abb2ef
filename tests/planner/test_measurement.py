"""A server's KV cache from the measurement of an earlier similar one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.choice import Demand, Layout, PlannedLayout, PlanQuestion
from launcher.planner.cluster import Cluster, PlanHost
from launcher.planner.estimate import GpuModel
from launcher.planner.flags import EngineFlags
from launcher.planner.measurement import MeasuredStart
from launcher.planner.weights import GIB
from tests.planner import models

LENGTH = EngineFlags(length=8192)
H100 = GpuModel(name="H100", memory_gib=79.18)
START = MeasuredStart(at=5.0, tp=2, pp=1, dp=1, flags=LENGTH, concurrency=100.0)
MOE = MeasuredStart(
    at=5.0, tp=1, pp=1, dp=8, flags=replace(LENGTH, expert_parallel=True), concurrency=9
)


def judged(
    start: MeasuredStart,
    flags: EngineFlags = LENGTH,
    config: dict[str, object] = models.LLAMA_8B,
    **split: int,
) -> PlannedLayout:
    """Judge a layout, with an earlier server's answer."""
    question = PlanQuestion(
        model=parse_architecture(config),
        weight_bytes=int(14.96 * GIB),
        cluster=Cluster(hosts=(PlanHost(name="a", gpus=8, gpu=H100),)),
        demand=Demand(context=8192),
        flags=flags,
        starts=(start,),
    )
    sizes = {"tp": start.tp, "pp": start.pp, "dp": start.dp, **split}
    return question.judge_layout(Layout(**sizes, experts=start.flags.expert_parallel, exact=True))


def tokens(planned: PlannedLayout) -> tuple[float, float]:
    """Return the range of tokens."""
    capacity = planned.estimate.tokens
    assert capacity is not None
    return capacity.low, capacity.high


@pytest.mark.parametrize("concurrency", [1.25, 37.125, 100.0, 1234.5])
def test_the_same_start_is_predicted_exactly(concurrency: float) -> None:
    """To the printed token."""
    planned = judged(replace(START, concurrency=concurrency))
    assert tokens(planned) == (int(concurrency * 8192), int(concurrency * 8192))
    assert planned.estimate.measured_at == 5.0
    assert planned.verdict == "fits"


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        (replace(LENGTH, length=16384), 1.0),
        (replace(LENGTH, cache_dtype="fp8"), 2.0),
        (replace(LENGTH, prefix_caching=False), 1.0),
    ],
)
def test_another_cache_format_is_converted(flags: EngineFlags, times: float) -> None:
    """Its memory is unchanged."""
    low, high = tokens(judged(START, flags))
    assert low == high == pytest.approx(times * 819_200, rel=0.001)


def test_a_higher_utilization_enlarges_the_cache() -> None:
    """Utilization moves the budget, and nothing else."""
    larger = judged(START, replace(LENGTH, utilization=0.95)).estimate.stages[0].kv.likely
    same = judged(START).estimate.stages[0].kv.likely
    assert larger - same == pytest.approx(0.03 * 79.18, rel=0.001)


@pytest.mark.parametrize(
    "flags",
    [
        replace(LENGTH, sequences=8),
        replace(LENGTH, batched_tokens=2048),
        replace(LENGTH, eager=True),
        replace(LENGTH, drafts=True),
        replace(LENGTH, expert_parallel=True),
    ],
)
def test_changes_of_working_memory_are_an_estimate(flags: EngineFlags) -> None:
    """No measurement covers them."""
    planned = judged(START, flags)
    assert planned.estimate.measured_at is None


def test_another_layout_is_an_estimate() -> None:
    """More replicas of a dense model are the same layout; those of a mixture are not."""
    assert judged(START, tp=4).estimate.measured_at is None
    assert judged(START, pp=2).estimate.measured_at is None
    assert judged(START, dp=4).estimate.measured_at == 5.0
    assert judged(MOE, MOE.flags, models.QWEN_235B).estimate.measured_at == 5.0
    assert judged(MOE, MOE.flags, models.QWEN_235B, dp=4).estimate.measured_at is None


def test_an_unmodelled_model_repeats_its_capacity() -> None:
    """The growth of its cache with the length is unknown."""
    odd = {**models.LLAMA_8B, "architectures": ["OddForCausalLM"], "model_type": "odd"}
    planned = judged(START, config=odd)
    assert tokens(planned) == (819_200, 819_200)
    assert planned.verdict == "fits"
    assert judged(START, replace(LENGTH, length=4096), odd).estimate.measured_at is None
