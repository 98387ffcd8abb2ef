"""Alternatives to a plan, each with its advantage.

Pure. Flags come first, in the order of their cost when the KV cache is short (`Preemption` in
https://docs.vllm.ai/en/latest/configuration/optimization/), then other layouts.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.core.domain import fold
from launcher.planner import versions
from launcher.planner.choice import (
    Layout,
    PlannedLayout,
    PlanQuestion,
    add_nodes_until_fit,
    candidate_layouts,
    choose_layout,
    tp_objection,
)
from launcher.planner.estimate import Range
from launcher.tools import vllm
from launcher.tools.site.placement import split_evenly

_MAX_ALTERNATIVES = 6
_SEQUENCES, _BATCHED, _UTILIZATION = 128, 2048, 0.95
_EVERYTHING = "one replica on all GPUs: the longest contexts"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A change, as vLLM's argument or as a layout, with its advantage and its figures."""

    change: str
    better: str
    planned: PlannedLayout


def list_alternatives(question: PlanQuestion, plan: PlannedLayout) -> tuple[Alternative, ...]:
    """Return at most six alternatives: changes of flags, then other layouts."""
    lacks_memory = plan.verdict == "does-not-fit" and not plan.estimate.state_limit("high")
    bigger = list(_node_alternatives(question)) if lacks_memory else []
    flags = [*_partition_alternatives(question, plan), *_flag_alternatives(question, plan)]
    layouts = list(_layout_alternatives(question, plan))
    flags = flags[: _MAX_ALTERNATIVES - len(bigger) - min(3, len(layouts))]
    return (*bigger, *flags, *layouts)[:_MAX_ALTERNATIVES]


def _node_alternatives(question: PlanQuestion) -> Iterator[Alternative]:
    if bigger := add_nodes_until_fit(question):
        count = len(bigger.cluster.hosts)
        better = "the fewest such nodes that fit"
        yield Alternative(f"--nodes {count}", better, choose_layout(bigger))


def _flag_alternatives(question: PlanQuestion, plan: PlannedLayout) -> Iterator[Alternative]:
    flags, estimate = question.flags, plan.estimate
    sequences = estimate.state_limit() or _SEQUENCES
    utilization = flags.utilization or versions.default_utilization(question.version)
    sizes_cache = not flags.cache_bytes  # else the cache has a fixed size
    changes = (
        (
            flags.cache_dtype == "auto" and question.model.kv_heads > 0,
            "--kv-cache-dtype fp8",
            "twice the KV cache, at slightly lower accuracy",
            replace(flags, cache_dtype="fp8"),
        ),
        (
            estimate.sequences > sequences and (sizes_cache or sequences != _SEQUENCES),
            f"--max-num-seqs {sequences}",
            "frees memory of the sampler and of CUDA graphs",
            replace(flags, sequences=sequences),
        ),
        (
            estimate.batched_tokens > _BATCHED and sizes_cache,
            f"--max-num-batched-tokens {_BATCHED}",
            "frees memory of a forward pass; prompts are slower",
            replace(flags, batched_tokens=_BATCHED),
        ),
        (
            sizes_cache and utilization < _UTILIZATION,
            f"--gpu-memory-utilization {_UTILIZATION}",
            "uses the rest of the memory, if no other process needs it",
            replace(flags, utilization=_UTILIZATION),
        ),
        (
            estimate.length > 1,
            f"--max-model-len {estimate.length // 2}",
            "more requests at once, each of half the length",
            replace(flags, length=estimate.length // 2),
        ),
        (
            sizes_cache and not flags.eager and not question.cluster.smallest.cpu,
            "--enforce-eager",
            "frees memory of CUDA graphs; answers are slower",
            replace(flags, eager=True),
        ),
    )
    for applies, change, better, changed in changes:
        if applies:
            yield Alternative(change, better, question.judge_layout(plan.layout, changed))


def _partition_alternatives(question: PlanQuestion, plan: PlannedLayout) -> Iterator[Alternative]:
    """Yield layer counts per stage for GPUs of unequal memory, if they hold more tokens: layers
    move one by one from the stage that decides to the one with the most room.
    """
    layout = plan.layout
    gpus = question.stage_gpus(layout)
    if len({gpu.memory_gib for gpu in gpus}) < 2 or question.model.unmodelled_reason:
        return
    counts, best = [stage.layers for stage in plan.estimate.stages], plan
    for _ in question.model.layers:
        estimate = best.estimate
        headroom = [stage.kv.likely / max(1, stage.layers) for stage in estimate.stages]
        counts[headroom.index(min(headroom))] -= 1
        counts[headroom.index(max(headroom))] += 1
        if min(counts) < 1:
            break
        candidate = question.judge_layout(layout, replace(question.flags, partition=tuple(counts)))
        if candidate.requests("likely") <= best.requests("likely"):
            break
        best = candidate
    if best is not plan:
        layers = ",".join(str(stage.layers) for stage in best.estimate.stages)
        yield Alternative(
            f'env: {{VLLM_PP_LAYER_PARTITION: "{layers}"}}',
            "each stage gets the layers that fit its memory",
            best,
        )


def _layout_alternatives(question: PlanQuestion, plan: PlannedLayout) -> Iterator[Alternative]:
    cluster, current = question.cluster, plan.layout
    shapes = {_layout_key(current)}
    tp, pp = split_evenly([host.gpus for host in cluster.hosts])
    default = Layout(tp=tp, pp=pp)
    valid = not tp_objection(question.model, default.tp) and _fills_stages(question, default)
    defaults = (default,) if valid else ()
    for layout in (*defaults, *candidate_layouts(question.model, cluster)):
        candidate = question.judge_layout(layout)
        smaller = layout.gpus_per_replica < current.gpus_per_replica
        smaller = smaller or (candidate.layout.coupled and not layout.coupled)
        useless = smaller and candidate.verdict == "does-not-fit"
        if (shape := _layout_key(candidate.layout)) not in shapes and not useless:
            shapes.add(shape)
            better = _EVERYTHING if layout is default else _describe_benefit(layout, current)
            servers = candidate.layout.servers
            prefix = f"{servers} servers, each " if servers > 1 else ""
            yield Alternative(prefix + layout_flags(candidate.layout), better, candidate)


def _layout_key(layout: Layout) -> tuple[int, int, int, bool]:
    return layout.tp, layout.pp, layout.replicas, layout.coupled


def _fills_stages(question: PlanQuestion, layout: Layout) -> bool:
    """True if each pipeline stage would have a layer."""
    return layout.pp <= max(1, len(question.model.layers))


def serve_commands(
    name: str, question: PlanQuestion, plan: PlannedLayout, args: Sequence[str]
) -> tuple[str, ...]:
    """Return the commands that start a plan, one per server; `args` are vLLM's own."""
    layout = plan.layout
    argv = ["vlaunch", "serve", "--model", name, *_size_flags(layout)]
    vllm_args = [] if question.flags.length else ["--max-model-len", str(plan.estimate.length)]
    if layout.experts and not question.flags.expert_parallel:
        vllm_args.append(vllm.EXPERT_PARALLEL)
    vllm_args = ["--", *vllm_args, *args] if vllm_args or args else []
    if layout.servers == 1:
        return (shlex.join([*argv, *vllm_args]),)
    names = [host.name for host in question.cluster.hosts]
    size = len(names) // layout.servers
    return tuple(
        shlex.join([*argv, "--backend", "mp", "--name", f"server-{number}", "--nodes"])
        + f" {fold(names[(number - 1) * size : number * size])} "
        + shlex.join(vllm_args)
        for number in range(1, layout.servers + 1)
    )


def layout_flags(layout: Layout) -> str:
    """Return the flags of `vlaunch serve` for a layout."""
    argv = _size_flags(layout)
    return " ".join([*argv, "--", vllm.EXPERT_PARALLEL] if layout.experts else argv)


def _size_flags(layout: Layout) -> list[str]:
    return ["--tp", str(layout.tp), "--pp", str(layout.pp), "--dp", str(layout.dp)]


def _describe_benefit(layout: Layout, current: Layout) -> str:
    if layout.coupled and layout.tp == 1:
        return "more throughput with many requests: KV is stored once"
    if layout.gpus_per_replica < current.gpus_per_replica:
        return "more throughput: more replicas, less traffic between GPUs"
    if layout.tp > current.tp:
        return "lower latency of one request, and more KV for each replica"
    return "more room for weights and KV: more GPUs for each replica"


def extra_node_tokens(
    question: PlanQuestion, plan: PlannedLayout, tokens: int
) -> tuple[Range, str] | None:
    """Return how many tokens one more node like the first would add to the present `tokens` of all
    replicas, and in which form; None if unknown.

    If a replica fits a node, the node adds replicas, else pipeline stages.
    """
    layout, gpus_per_node = plan.layout, question.cluster.gpus_per_node
    if layout.gpus_per_unit <= gpus_per_node:
        per_replica, count = tokens // layout.replicas, gpus_per_node // layout.gpus_per_unit
        extra = per_replica * (layout.dp if layout.coupled else 1) * count
        text = f"{'replicas' if count > 1 else 'a replica'} of this layout"
        return Range(extra, extra, extra), text
    stages = max(1, gpus_per_node // layout.tp)
    hosts = (*question.cluster.hosts, replace(question.cluster.hosts[0], name="one more"))
    larger = replace(question, cluster=replace(question.cluster, hosts=hosts))
    deeper = replace(layout, pp=layout.pp + stages)
    if not _fills_stages(question, deeper):
        return None
    total = larger.judge_layout(deeper).estimate.tokens
    if total is None or total.low <= tokens:
        return None
    return (
        Range(*(value - tokens for value in (total.low, total.likely, total.high))),
        f"PP {deeper.pp}",
    )
