"""What else could be run instead, and what it is better at.

Pure. Flags come in the order of what they cost when the KV cache is short (`Preemption` in
https://docs.vllm.ai/en/latest/configuration/optimization/), then splits.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.core.domain import fold
from launcher.planner import versions
from launcher.planner.choice import Option, Planned, Question, choose, enough, options, refused
from launcher.planner.estimate import Range
from launcher.tools import vllm

_MOST = 6
_SEQUENCES, _BATCHED, _UTILIZATION = 128, 2048, 0.95
_EVERYTHING = "one replica that takes everything: the longest contexts"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A change, as vLLM's argument or as a split, what it is better at, and its figures."""

    change: str
    better: str
    planned: Planned


def alternatives(question: Question, chosen: Planned) -> tuple[Alternative, ...]:
    """Return other ways, at most six: changes of flags, then other splits."""
    short = chosen.verdict == "does-not-fit" and not chosen.estimate.states("high")
    more = list(_more_nodes(question)) if short else []
    flags = [*_other_layers(question, chosen), *_other_flags(question, chosen)]
    splits = list(_other_splits(question, chosen))
    return (*more, *flags[: _MOST - len(more) - min(3, len(splits))], *splits)[:_MOST]


def _more_nodes(question: Question) -> Iterator[Alternative]:
    if larger := enough(question):
        count = len(larger.cluster.hosts)
        yield Alternative(f"--nodes {count}", "the fewest such nodes that fit", choose(larger))


def _other_flags(question: Question, chosen: Planned) -> Iterator[Alternative]:
    given, found = question.flags, chosen.estimate
    fewer = found.states() or _SEQUENCES
    measures = not given.cache_bytes  # else the cache's memory is what it is given
    changes = (
        (
            given.cache_dtype == "auto" and question.model.kv_heads > 0,
            "--kv-cache-dtype fp8",
            "twice the tokens, for a little accuracy",
            replace(given, cache_dtype="fp8"),
        ),
        (
            found.sequences > fewer and (measures or fewer != _SEQUENCES),
            f"--max-num-seqs {fewer}",
            "memory of the sampler and of graphs",
            replace(given, sequences=fewer),
        ),
        (
            found.batched_tokens > _BATCHED and measures,
            f"--max-num-batched-tokens {_BATCHED}",
            "memory of a forward pass, for slower prompts",
            replace(given, batched_tokens=_BATCHED),
        ),
        (
            measures
            and (given.utilization or versions.utilization(question.version)) < _UTILIZATION,
            f"--gpu-memory-utilization {_UTILIZATION}",
            "the rest of the memory, where nobody else needs it",
            replace(given, utilization=_UTILIZATION),
        ),
        (
            found.length > 1,
            f"--max-model-len {found.length // 2}",
            "requests at once, of half the length",
            replace(given, length=found.length // 2),
        ),
        (
            measures and not given.eager and not question.cluster.smallest.cpu,
            "--enforce-eager",
            "memory of CUDA graphs, for slower answers",
            replace(given, eager=True),
        ),
    )
    for applies, change, better, flags in changes:
        if applies:
            yield Alternative(change, better, question.judged(chosen.option, flags))


def _other_layers(question: Question, chosen: Planned) -> Iterator[Alternative]:
    """Yield the layers of each stage that suit GPUs of unequal memory, where more tokens come of
    it: one after the other goes from the stage that decides to the one that has most room.
    """
    option = chosen.option
    gpus = question.stage_gpus(option)
    if len({gpu.memory_gib for gpu in gpus}) < 2 or question.model.modelled:
        return
    counts, best = [stage.layers for stage in chosen.estimate.stages], chosen
    for _ in question.model.layers:
        found = best.estimate
        room = [stage.kv.likely / max(1, stage.layers) for stage in found.stages]
        counts[room.index(min(room))] -= 1
        counts[room.index(max(room))] += 1
        if min(counts) < 1:
            break
        planned = question.judged(option, replace(question.flags, partition=tuple(counts)))
        if planned.requests("likely") <= best.requests("likely"):
            break
        best = planned
    if best is not chosen:
        layers = ",".join(str(stage.layers) for stage in best.estimate.stages)
        yield Alternative(
            f'env: {{VLLM_PP_LAYER_PARTITION: "{layers}"}}',
            "each stage has the layers for its memory",
            best,
        )


def _other_splits(question: Question, chosen: Planned) -> Iterator[Alternative]:
    cluster, taken = question.cluster, chosen.option
    seen = {_shape(taken)}
    default = Option(tp=cluster.each, pp=len(cluster.hosts))
    whole = (
        () if refused(question.model, default.tp) or not _stages(question, default) else (default,)
    )
    for option in (*whole, *options(question.model, cluster)):
        planned = question.judged(option)
        alone = option.each < taken.each or (planned.option.coupled and not option.coupled)
        hopeless = alone and planned.verdict == "does-not-fit"
        if (shape := _shape(planned.option)) not in seen and not hopeless:
            seen.add(shape)
            better = _EVERYTHING if option is default else _better(option, taken)
            several = planned.option.servers
            each = f"{several} servers, each " if several > 1 else ""
            yield Alternative(each + arguments(planned.option), better, planned)


def _shape(option: Option) -> tuple[int, int, int, bool]:
    return option.tp, option.pp, option.replicas, option.coupled


def _stages(question: Question, option: Option) -> bool:
    """Tell whether each pipeline stage would have a layer."""
    return option.pp <= max(1, len(question.model.layers))


def commands(
    name: str, question: Question, planned: Planned, args: Sequence[str]
) -> tuple[str, ...]:
    """Return the lines that start what is planned, one for each server; `args` are those of vLLM
    that were asked for.
    """
    option = planned.option
    words = ["vlaunch", "serve", "--model", name, *_sizes(option)]
    own = [] if question.flags.length else ["--max-model-len", str(planned.estimate.length)]
    if option.experts and not question.flags.expert_parallel:
        own.append(vllm.EXPERT_PARALLEL)
    own = ["--", *own, *args] if own or args else []
    if option.servers == 1:
        return (shlex.join([*words, *own]),)
    names = [host.name for host in question.cluster.hosts]
    size = len(names) // option.servers
    return tuple(
        shlex.join([*words, "--backend", "mp", "--name", f"server-{at}", "--nodes"])
        + f" {fold(names[(at - 1) * size : at * size])} "
        + shlex.join(own)
        for at in range(1, option.servers + 1)
    )


def arguments(option: Option) -> str:
    """Return the flags of `vlaunch serve` for a split."""
    words = _sizes(option)
    return " ".join([*words, "--", vllm.EXPERT_PARALLEL] if option.experts else words)


def _sizes(option: Option) -> list[str]:
    return ["--tp", str(option.tp), "--pp", str(option.pp), "--dp", str(option.dp)]


def _better(option: Option, taken: Option) -> str:
    if option.coupled and option.tp == 1:
        return "throughput of many requests: KV is held once"
    if option.each < taken.each:
        return "throughput: more replicas, less talk between GPUs"
    if option.tp > taken.tp:
        return "latency of a single request, and more KV for each replica"
    return "room for weights and KV: more GPUs for each replica"


def one_more_node(question: Question, planned: Planned, tokens: int) -> tuple[Range, str] | None:
    """Return how many tokens one more node like the first would add to the `tokens` of all replicas
    now, and as what; None where nobody knows.

    A replica that fits a node gets others; one that takes nodes gets pipeline stages.
    """
    option, each = planned.option, question.cluster.each
    if option.whole <= each:
        share, several = tokens // option.replicas, each // option.whole
        more = share * (option.dp if option.coupled else 1) * several
        return Range(
            more, more, more
        ), f"{'replicas' if several > 1 else 'a replica'} of this split"
    stages = max(1, each // option.tp)
    hosts = (*question.cluster.hosts, replace(question.cluster.hosts[0], name="one more"))
    larger = replace(question, cluster=replace(question.cluster, hosts=hosts))
    deeper = replace(option, pp=option.pp + stages)
    if not _stages(question, deeper):
        return None
    found = larger.judged(deeper).estimate.tokens
    if found is None or found.low <= tokens:
        return None
    return (
        Range(*(value - tokens for value in (found.low, found.likely, found.high))),
        f"PP {deeper.pp}",
    )
