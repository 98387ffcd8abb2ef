"""The planner's forecast in `vlaunch serve`: expected capacity and a better layout before the
start, the difference and the effect of another node after it.
"""

from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from launcher.app.session import Session
from launcher.core.domain import ServerSpec
from launcher.core.errors import RequestError
from launcher.planner.advice import extra_node_tokens, layout_flags
from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.choice import Demand, Layout, PlannedLayout, PlanQuestion, choose_layout
from launcher.planner.cluster import Cluster, ClusterLink
from launcher.planner.estimate import Range
from launcher.planner.flags import parse_flags
from launcher.planner.plan_inputs import engine_env, list_hosts, measured_starts, merge_link
from launcher.planner.plan_json import figures_basis
from launcher.serving.replicas import share_cluster
from launcher.serving.serve_request import ServeRequest
from launcher.serving.start_spec import StartSpec
from launcher.tools import vllm
from launcher.tools.site.placement import narrow_inventory
from launcher.tools.site.snapshot import ClusterSnapshot

_TOLERANCE = 0.005  # relative difference that still counts as planned


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """A server's plan: its question, its own layout, and the planner's layout if that differs."""

    question: PlanQuestion
    planned: PlannedLayout
    better: PlannedLayout | None = None

    @property
    def tokens(self) -> Range | None:
        """Tokens of all replicas' KV caches."""
        tokens, replicas = self.planned.estimate.tokens, self.planned.layout.replicas
        return None if tokens is None else Range(*(value * replicas for value in astuple(tokens)))


def plan_memory(snapshot: ClusterSnapshot, request: ServeRequest) -> ServePlan | None:
    """Return the plan of a server; None if too little is known about its model or GPUs."""
    question = _build_question(snapshot, request)
    placement = request.placement
    if question is None or placement.pcp > 1:
        return None
    tp, pp, dp, experts = placement.tp, placement.pp, placement.dp, question.flags.expert_parallel
    plan = question.judge_layout(Layout(tp=tp, pp=pp, dp=dp, experts=experts, exact=True))
    fixed_cache = question.flags.cache_bytes or plan.estimate.measured_at is not None
    if not question.cluster.smallest.memory_gib and not fixed_cache:
        return None
    best = choose_layout(question)
    sizes, best_sizes = ((p.layout.tp, p.layout.pp, p.layout.replicas) for p in (plan, best))
    better = None if sizes == best_sizes or best.verdict != "fits" else best
    return ServePlan(question=question, planned=plan, better=better)


def _build_question(snapshot: ClusterSnapshot, server: ServerSpec) -> PlanQuestion | None:
    """Return the planner's question; None if too little is known about the model or GPUs."""
    site, inventory = snapshot.site, snapshot.site.inventory
    if snapshot.config is None or not snapshot.weight_bytes:
        return None
    flags = parse_flags(server.args, engine_env(inventory, server.env))
    narrowed = narrow_inventory(inventory, server.nodes, server.gpus)
    try:
        architecture = parse_architecture(snapshot.config)
        hosts = list_hosts(replace(site, inventory=narrowed))
    except RequestError:
        return None
    return PlanQuestion(
        model=architecture,
        weight_bytes=snapshot.weight_bytes,
        cluster=Cluster(hosts=hosts, link=merge_link(site, ClusterLink(), snapshot.network)),
        demand=Demand(context=flags.length or architecture.context or 4096),
        flags=flags,
        starts=measured_starts(snapshot.revisions, server.model, architecture, inventory),
    )


def apply_planned_layout(
    spec: StartSpec, snapshot: ClusterSnapshot, count: int, *, guess: bool
) -> StartSpec:
    """Return the spec with the planner's layout for each of `count` replicas; a server that runs
    already keeps its own. With `guess`, a model that no node has gets one GPU, and stays `planned`.

    Raises RequestError if too little is known for a plan, or no layout fits.
    """
    hint = f"run `vlaunch plan --model {spec.model}` for details, or set `--tp N --pp N`"
    if (running := _keep_running_layout(spec, snapshot)) is not None:
        return running
    if guess and (snapshot.config is None or not snapshot.weight_bytes):
        return replace(spec, tp=1, pp=1, dp=1)
    question = _build_question(snapshot, share_cluster(spec, count, snapshot.site.inventory))
    if question is None:
        raise RequestError(f"no node has the configuration of {spec.model}", hint=hint)
    plan = choose_layout(question, single_server=True)
    if plan.verdict == "does-not-fit":
        raise RequestError(f"no layout of {spec.model} fits this cluster", hint=hint)
    layout = plan.layout
    needs_flag = layout.experts and not question.flags.expert_parallel
    args = (*spec.args, *((vllm.EXPERT_PARALLEL,) if needs_flag else ()))
    return replace(spec, planned=False, tp=layout.tp, pp=layout.pp, dp=layout.dp, args=args)


def _keep_running_layout(spec: StartSpec, snapshot: ClusterSnapshot) -> StartSpec | None:
    """Return the spec with the layout of the same server if it runs and stays, else None."""
    running = {server.name: server for server in snapshot.servers_state.running}.get(spec.name)
    if running is None or running.desired is None:
        return None
    if spec.replace_other or running.model != spec.model:
        return None
    original = running.desired.asked_for
    sizes: dict[str, Any] = {key: original.get(key) for key in ("tp", "pp", "dp")}
    if not all(isinstance(size, int) for size in sizes.values()):
        return None
    expert_args = (*spec.args, vllm.EXPERT_PARALLEL)
    args = expert_args if original.get("args") == list(expert_args) else spec.args
    return replace(spec, planned=False, **sizes, args=args)


def report_plan(session: Session, plan: ServePlan, *, fixed: bool) -> None:
    """Report the expected result of a start; `fixed` means that the user chose the layout."""
    planned, model = plan.planned, session.inventory.serve.model
    if planned.verdict == "does-not-fit":
        text = f"estimate: DOES NOT FIT: {_explain_shortage(plan)}; starting it anyway"
        session.warn("plan", text)
    elif planned.verdict == "tight":
        text = f"estimate: TIGHT: {_explain_shortage(plan)}; starting it anyway"
        session.warn("plan", text)
    elif plan.tokens is not None:
        basis = figures_basis(planned.estimate, plan.question.model.unmodelled_reason)
        text = f"estimate: the KV cache holds {_format_tokens(plan.tokens)} tokens ({basis})"
        session.note("plan", text)
    if plan.better is not None and not fixed:
        plan_command = "vlaunch plan" + ("" if model else " --model MODEL")
        own, better = (f"{p.requests('likely'):.0f}" for p in (planned, plan.better))
        comparison = "as with this layout" if better == own else f"not {own}"
        layout = plan.better.layout
        text = (
            f"the planner prefers {layout.description} (`{layout_flags(layout)}`):"
            f" {better} requests of full length at once, {comparison};"
            f" use it with `--plan auto`, details: `{plan_command}`"
        )
        session.note("plan", text)


def _format_tokens(tokens: Range) -> str:
    if tokens.high - tokens.low <= _TOLERANCE * tokens.low:
        return f"{int(tokens.likely):,}"
    return f"{int(tokens.low):,} to {int(tokens.high):,}"


def _explain_shortage(plan: ServePlan) -> str:
    estimate = plan.planned.estimate
    stage, length = estimate.poorest, estimate.length
    if states := estimate.state_limit():
        return (
            f"too many sequences at once ({estimate.sequences:,}); set `-- --max-num-seqs {states}`"
        )
    if stage.kv.likely <= 0:
        return (
            f"weights {stage.weights.likely:.1f} and working memory {stage.working.likely:.1f} GiB"
            f" of {stage.budget:.1f} GiB usable per GPU"
        )
    return f"{stage.kv.likely:.1f} GiB per GPU left for a request of {length:,} tokens"


def compare_tokens(plan: ServePlan | None, tokens: int | None) -> str:
    """Compare a server's KV cache, in tokens, with the plan; empty if one of them is unknown."""
    planned = plan.tokens if plan is not None else None
    if planned is None or not tokens:
        return ""
    exact = _format_tokens(planned) == f"{int(planned.likely):,}"
    if exact and abs(tokens - planned.likely) <= _TOLERANCE * planned.likely:
        return " (as planned)"
    return f" (planned {_format_tokens(planned)})"


def describe_extra_node(plan: ServePlan | None, tokens: int | None) -> str:
    """Describe the gain from one more node like the first; empty if unknown."""
    extra = extra_node_tokens(plan.question, plan.planned, tokens) if plan and tokens else None
    return f"{_format_tokens(extra[0])} tokens more, as {extra[1]}" if extra else ""


def plan_json(plan: ServePlan | None) -> dict[str, Any]:
    """Return the plan ready for JSON."""
    if plan is None or plan.tokens is None:
        return {}
    tokens = plan.tokens
    return {
        "planned": {
            "verdict": plan.planned.verdict,
            "basis": figures_basis(plan.planned.estimate, plan.question.model.unmodelled_reason),
            "kv_cache_tokens": {key: int(value) for key, value in asdict(tokens).items()},
        }
    }
