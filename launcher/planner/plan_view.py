"""A plan as labelled rows for the terminal."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from launcher.core.domain import fold
from launcher.planner.advice import Alternative, list_alternatives, serve_commands
from launcher.planner.architecture import Architecture
from launcher.planner.choice import PlannedLayout, PlanQuestion, explain_layout
from launcher.planner.estimate import Estimate, Range, StageMemory
from launcher.planner.weights import GIB

_LEAD = 11
_VERDICTS = {"fits": "FITS", "tight": "TIGHT", "does-not-fit": "DOES NOT FIT"}


def plan_rows(
    name: str, question: PlanQuestion, plan: PlannedLayout, args: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the plan of a model; `args` are vLLM's own."""
    estimate, layout = plan.estimate, plan.layout
    yield _format_row("model", _describe_model(name, question))
    yield _format_row("cluster", _describe_cluster(question))
    version = ".".join(map(str, question.version))
    yield _format_row("choice", f"{layout.description}; vLLM {version}")
    unit = "per slot" if question.cluster.smallest.cpu else "per GPU"
    yield _format_row(unit, _describe_memory(estimate.poorest))
    if estimate.tokens and estimate.tokens.high:
        replicas = f" per replica, {layout.replicas} replicas" if layout.replicas > 1 else ""
        tokens = _format_tokens(estimate.tokens)
        yield _format_row("KV cache", f"{tokens} tokens{replicas}; {_format_requests(plan)}")
    yield _format_row("verdict", _VERDICTS[plan.verdict] + _explain_verdict(question, plan))
    for index, reason in enumerate(explain_layout(question, plan)):
        yield _format_row("" if index else "why", reason.text)
    for index, alternative in enumerate(list_alternatives(question, plan)):
        yield _format_row("" if index else "other", _describe_alternative(alternative))
    if plan.verdict != "does-not-fit":
        yield from _command_rows(serve_commands(name, question, plan, args))
    yield _format_row("basis", _describe_basis(question.model, estimate))


def _command_rows(lines: Sequence[str]) -> Iterator[str]:
    yield _format_row("run", lines[0])
    if len(lines) > 2:
        yield _format_row("", f"… {len(lines) - 2} more, one for each server; all of them: --json")
    if len(lines) > 1:
        yield _format_row("", lines[-1])


def stage_rows(plan: PlannedLayout) -> Iterator[str]:
    """Yield the arithmetic of each pipeline stage, and the KV cache's groups."""
    estimate = plan.estimate
    for index, stage in enumerate(estimate.stages):
        text = f"{index}: {stage.layers} layers; {_describe_memory(stage)}"
        yield _format_row("" if index else "stages", text)
    if (cache := estimate.cache) is None:
        return
    for index, group in enumerate(cache.groups):
        spec = group.spec
        text = (
            f"{len(group.layers)} {spec.kind} layers, {spec.block} tokens a block, {spec.page:,}"
            f" bytes a page; a request of {estimate.length:,} tokens takes"
            f" {group.request_blocks:,} blocks"
        )
        yield _format_row("" if index else "groups", text)
    sizes = ", ".join(f"{size:,}" for size in cache.block_bytes)
    text = f"{sizes} bytes each; {cache.per_request:,} for a longest request"
    yield _format_row("blocks", text)


def _format_row(name: str, text: str) -> str:
    return f"{name:<{_LEAD - 2}}  {text}" if name else " " * _LEAD + text


def _describe_model(name: str, question: PlanQuestion) -> str:
    model = question.model
    kind = f"{len(model.layers)} layers"
    if model.experts:
        kind += f", {model.experts.count} experts"
    if model.latent:
        kind += ", latent attention"
    elif model.kv_heads:
        kind += f", {model.kv_heads} KV heads × {model.head_dim}"
    weights = f"{_format_size(question.weight_bytes / GIB)} GiB of weights"
    parts = [name, weights] + ([model.quantization] if model.quantization else []) + [kind]
    return ", ".join(parts)


def _describe_cluster(question: PlanQuestion) -> str:
    cluster = question.cluster
    names = fold([host.name for host in cluster.hosts])
    link = cluster.link
    link_text = "not measured"
    if link.gbps:
        link_text = f"{link.gbps:.{0 if link.gbps >= 10 else 1}f} GB/s for each GPU" + (
            ", RDMA" if link.rdma else ""
        )
    elif link.rdma:
        link_text = "RDMA, not measured"
    between = f"; between nodes: {link_text}" if len(cluster.hosts) > 1 else ""
    counts = {host.gpus for host in cluster.hosts}
    gpu = f"{cluster.smallest.name} ({cluster.smallest.memory_gib:.1f} GiB)"
    if len(counts) == 1:
        return f"{names}: {cluster.gpus_per_node} × {gpu} each{between}"
    groups = {
        count: fold([host.name for host in cluster.hosts if host.gpus == count])
        for count in sorted(counts, reverse=True)
    }
    shares = ", ".join(f"{count} on {nodes}" for count, nodes in groups.items())
    return f"{names}: {cluster.gpus} × {gpu}: {shares}{between}"


def _describe_memory(stage: StageMemory) -> str:
    used = f"weights {_format_size(stage.weights.likely)} + working {_format_gib(stage.working)}"
    if stage.kv.high <= 0:
        return (
            f"{used} exceed the budget of {stage.budget:.1f} by at least {-stage.kv.high:.1f} GiB"
        )
    return f"budget {stage.budget:.1f} = {used} + KV {_format_gib(stage.kv)} GiB"


def _format_gib(gib: Range) -> str:
    low, likely, high = (_format_size(value) for value in (gib.low, gib.likely, gib.high))
    return likely if gib.high == gib.low else f"{low} to {high} (likely {likely})"


def _format_size(gib: float) -> str:
    """Format GiB with at least one significant digit."""
    return f"{gib:.1f}" if abs(gib) >= 0.1 or not gib else f"{gib:.3f}"


def _format_tokens(tokens: Range) -> str:
    low, high = f"{int(tokens.low):,}", f"{int(tokens.high):,}"
    return low if low == high else f"{low} to {high}"


def _format_requests(plan: PlannedLayout) -> str:
    low, high = (f"{plan.requests(bound):.1f}" for bound in ("low", "high"))
    count = low if low == high else f"{low} to {high}"
    return f"{count} requests of {plan.estimate.length:,} tokens at once"


def _explain_verdict(question: PlanQuestion, plan: PlannedLayout) -> str:
    demand = question.demand
    requests = "a request" if demand.requests == 1 else f"{demand.requests} requests"
    demand_text = f"{requests} of {demand.context:,} tokens"
    if question.model.unmodelled_reason:
        return f": {question.model.unmodelled_reason}; only its weights are judged"
    if states := plan.estimate.state_limit("high"):
        sequences = f"{plan.estimate.sequences:,} sequences"
        return f": {sequences} at once, with blocks of recurrent state for {states:,}"
    if plan.verdict == "fits":
        return f": {demand_text}, even at the highest estimate of working memory"
    if plan.verdict == "tight":
        return f": {demand_text}, only at the lowest estimate of working memory"
    return f": {demand_text} {'exceeds' if demand.requests == 1 else 'exceed'} the KV cache"


def _describe_alternative(alternative: Alternative) -> str:
    plan = alternative.planned
    requests = ""
    if plan.verdict != "does-not-fit" and plan.estimate.concurrency:
        low, high = (f"{plan.requests(bound):.0f}" for bound in ("low", "high"))
        requests = f", {low if low == high else f'{low} to {high}'} requests"
    return f"{alternative.change}: {_VERDICTS[plan.verdict]}{requests}; {alternative.better}"


def _describe_basis(model: Architecture, estimate: Estimate) -> str:
    if estimate.measured_at is not None:
        when = datetime.fromtimestamp(estimate.measured_at, timezone.utc)
        return f"measured on a server with this layout, {when:%Y-%m-%d %H:%M} UTC"
    if model.unmodelled_reason:
        return "weights only"
    return "estimate: nothing was started; working memory is the uncertain part"
