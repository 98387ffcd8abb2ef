"""A plan as people read it: a name in front of each row, figures behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from launcher.core.domain import fold
from launcher.planner.advice import Alternative, alternatives, commands
from launcher.planner.architecture import Architecture
from launcher.planner.choice import Planned, Question, remarks
from launcher.planner.estimate import Estimate, Range, Stage
from launcher.planner.weights import GIB

_LEAD = 11
_VERDICTS = {"fits": "FITS", "tight": "TIGHT", "does-not-fit": "DOES NOT FIT"}


def rows(
    name: str, question: Question, planned: Planned, args: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the plan of a model; `args` are vLLM's that were asked for."""
    found, option = planned.estimate, planned.option
    yield _row("model", _model(name, question))
    yield _row("cluster", _cluster(question))
    yield _row("choice", f"{option.words}; vLLM {'.'.join(map(str, question.version))}")
    yield _row("per slot" if question.cluster.smallest.cpu else "per GPU", _memory(found.poorest))
    if found.tokens and found.tokens.high:
        several = f" per replica, {option.replicas} replicas" if option.replicas > 1 else ""
        yield _row("KV cache", f"{_tokens(found.tokens)} tokens{several}; {_requests(planned)}")
    yield _row("verdict", _VERDICTS[planned.verdict] + _because(question, planned))
    for place, reason in enumerate(remarks(question, planned)):
        yield _row("" if place else "why", reason.text)
    for place, each in enumerate(alternatives(question, planned)):
        yield _row("" if place else "other", _other(each))
    if planned.verdict != "does-not-fit":
        yield from _run(commands(name, question, planned, args))
    yield _row("basis", _basis(question.model, found))


def _run(lines: Sequence[str]) -> Iterator[str]:
    yield _row("run", lines[0])
    if len(lines) > 2:
        yield _row("", f"… {len(lines) - 2} more, one for each server; all of them: --json")
    if len(lines) > 1:
        yield _row("", lines[-1])


def explained(planned: Planned) -> Iterator[str]:
    """Yield the sum of each pipeline stage, and the KV cache's groups."""
    found = planned.estimate
    for index, stage in enumerate(found.stages):
        yield _row("" if index else "stages", f"{index}: {stage.layers} layers; {_memory(stage)}")
    if found.cache is None:
        return
    for place, group in enumerate(found.cache.groups):
        spec = group.spec
        text = (
            f"{len(group.layers)} {spec.kind} layers, {spec.block} tokens a block, {spec.page:,}"
            f" bytes a page; a request of {found.length:,} tokens takes {group.needs:,} blocks"
        )
        yield _row("" if place else "groups", text)
    each = ", ".join(f"{size:,}" for size in found.cache.block_bytes)
    yield _row("blocks", f"{each} bytes each; {found.cache.per_request:,} for a longest request")


def _row(name: str, text: str) -> str:
    return f"{name:<{_LEAD - 2}}  {text}" if name else " " * _LEAD + text


def _model(name: str, question: Question) -> str:
    model = question.model
    kind = f"{len(model.layers)} layers"
    if model.experts:
        kind += f", {model.experts.count} experts"
    if model.latent:
        kind += ", latent attention"
    elif model.kv_heads:
        kind += f", {model.kv_heads} KV heads × {model.head_dim}"
    weights = f"{_size(question.weight_bytes / GIB)} GiB of weights"
    parts = [name, weights] + ([model.quantization] if model.quantization else []) + [kind]
    return ", ".join(parts)


def _cluster(question: Question) -> str:
    cluster = question.cluster
    names = fold([host.name for host in cluster.hosts])
    gpu = cluster.smallest
    link = cluster.link
    between = "not measured"
    if link.gbps:
        between = f"{link.gbps:.{0 if link.gbps >= 10 else 1}f} GB/s for each GPU" + (
            ", RDMA" if link.rdma else ""
        )
    elif link.rdma:
        between = "RDMA, not measured"
    several = f"; between nodes: {between}" if len(cluster.hosts) > 1 else ""
    return f"{names}: {cluster.each} × {gpu.name} ({gpu.memory_gib:.1f} GiB) each{several}"


def _memory(stage: Stage) -> str:
    spent = f"weights {_size(stage.weights.likely)} + working {_gib(stage.working)}"
    if stage.kv.high <= 0:
        return (
            f"{spent} are {-stage.kv.high:.1f} GiB and more over the budget of {stage.budget:.1f}"
        )
    return f"budget {stage.budget:.1f} = {spent} + KV {_gib(stage.kv)} GiB"


def _gib(found: Range) -> str:
    if found.high == found.low:
        return _size(found.likely)
    return f"{_size(found.low)} to {_size(found.high)} (likely {_size(found.likely)})"


def _size(gib: float) -> str:
    """Return GiB with a digit that says something."""
    return f"{gib:.1f}" if abs(gib) >= 0.1 or not gib else f"{gib:.3f}"


def _tokens(found: Range) -> str:
    low, high = f"{int(found.low):,}", f"{int(found.high):,}"
    return low if low == high else f"{low} to {high}"


def _requests(planned: Planned) -> str:
    low, high = (f"{planned.requests(which):.1f}" for which in ("low", "high"))
    times = low if low == high else f"{low} to {high}"
    return f"{times} requests of {planned.estimate.length:,} tokens at once"


def _because(question: Question, planned: Planned) -> str:
    want = question.want
    many = "a request" if want.requests == 1 else f"{want.requests} requests"
    asked = f"{many} of {want.context:,} tokens"
    if question.model.modelled:
        return f": {question.model.modelled}; only its weights are judged"
    if states := planned.estimate.states("high"):
        sequences = f"{planned.estimate.sequences:,} sequences"
        return f": {sequences} at once, with blocks of recurrent state for {states:,}"
    if planned.verdict == "fits":
        return f": {asked}, even if working memory is as large as it may be"
    if planned.verdict == "tight":
        return f": {asked} if working memory is small; the start will tell"
    return f": {asked} {'is' if want.requests == 1 else 'are'} more than it holds"


def _other(each: Alternative) -> str:
    planned = each.planned
    held = ""
    if planned.verdict != "does-not-fit" and planned.estimate.concurrency:
        low, high = (f"{planned.requests(which):.0f}" for which in ("low", "high"))
        held = f", {low if low == high else f'{low} to {high}'} requests"
    return f"{each.change}: {_VERDICTS[planned.verdict]}{held}; {each.better}"


def _basis(model: Architecture, found: Estimate) -> str:
    if found.at is not None:
        when = datetime.fromtimestamp(found.at, timezone.utc)
        return f"measured: a server of this split has answered here, {when:%Y-%m-%d %H:%M} UTC"
    if model.modelled:
        return "weights only"
    return "estimate: nothing was started; working memory is the uncertain part"
