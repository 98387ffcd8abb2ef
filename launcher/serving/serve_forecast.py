"""What `vlaunch serve` says of the plan: before the start what is expected, and whether another
split would hold more; after it what came of that, and what one more node would bring.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from launcher.app.session import Session
from launcher.core.domain import ServerSpec
from launcher.core.errors import RequestError
from launcher.planner.advice import arguments, one_more_node
from launcher.planner.answer import basis
from launcher.planner.architecture_read import architecture_of
from launcher.planner.choice import Option, Planned, Question, Want, choose
from launcher.planner.cluster import Cluster, Link
from launcher.planner.estimate import Range
from launcher.planner.flags import flags_of
from launcher.planner.plan_inputs import env_of, hosts_of, link_of, starts_of
from launcher.serving.serve_request import Request
from launcher.serving.start import StartSpec
from launcher.tools import vllm
from launcher.tools.placement import narrow
from launcher.tools.snapshot import ClusterSnapshot

_EXACT = 0.005  # how far a figure may be off that counts as the planned one


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """A server's plan: the question that it answers, its own split, and, where it differs, the
    split that the plan would have taken.
    """

    question: Question
    planned: Planned
    better: Planned | None = None

    @property
    def tokens(self) -> Range | None:
        """Tokens of all replicas' KV caches."""
        one, replicas = self.planned.estimate.tokens, self.planned.option.replicas
        return None if one is None else Range(*(value * replicas for value in astuple(one)))


def plan_of(snapshot: ClusterSnapshot, request: Request) -> ServePlan | None:
    """Return the plan of a server; None where not enough is known of model or GPUs."""
    question = _question(snapshot, request)
    split = request.placement
    if question is None or split.pcp > 1:
        return None
    option = Option(
        tp=split.tp,
        pp=split.pp,
        dp=split.dp,
        experts=question.flags.expert_parallel,
        exact=True,
    )
    planned = question.judged(option)
    cache_known = question.flags.cache_bytes or planned.estimate.at is not None
    if not question.cluster.smallest.memory_gib and not cache_known:
        return None
    other = choose(question)
    mine, its = planned.option, other.option
    same = (mine.tp, mine.pp, mine.replicas) == (its.tp, its.pp, its.replicas)
    better = None if same or other.verdict != "fits" else other
    return ServePlan(question=question, planned=planned, better=better)


def _question(snapshot: ClusterSnapshot, server: ServerSpec) -> Question | None:
    """Return the planner's question; None where not enough is known of model or GPUs."""
    site, inventory = snapshot.site, snapshot.site.inventory
    if snapshot.config is None or not snapshot.weight_bytes:
        return None
    flags = flags_of(server.args, env_of(inventory, server.env))
    here = narrow(inventory, server.nodes, server.gpus)
    try:
        shape = architecture_of(snapshot.config)
        hosts = hosts_of(replace(site, inventory=here))
    except RequestError:
        return None
    return Question(
        model=shape,
        weight_bytes=snapshot.weight_bytes,
        cluster=Cluster(hosts=hosts, link=link_of(site, Link(), snapshot.network)),
        want=Want(context=flags.length or shape.context or 4096),
        flags=flags,
        starts=starts_of(snapshot.answered, server.model, shape, inventory),
    )


def settled(spec: StartSpec, snapshot: ClusterSnapshot) -> StartSpec:
    """Return the request with the split that the plan chooses, one that runs with its own.

    Raises RequestError: not enough is known for a plan, or no split fits.
    """
    hint = f"see why: `vlaunch plan --model {spec.model}`; or name a split: `--tp N --pp N`"
    if (running := _as_it_runs(spec, snapshot)) is not None:
        return running
    question = _question(snapshot, spec)
    if question is None:
        raise RequestError(f"what {spec.model} is made of is not known on the nodes", hint=hint)
    chosen = choose(question, one_server=True)
    if chosen.verdict == "does-not-fit":
        raise RequestError(f"no split of {spec.model} fits this cluster", hint=hint)
    option = chosen.option
    more = option.experts and not question.flags.expert_parallel
    args = (*spec.args, *((vllm.EXPERT_PARALLEL,) if more else ()))
    return replace(spec, tp=option.tp, pp=option.pp, dp=option.dp, args=args)


def _as_it_runs(spec: StartSpec, snapshot: ClusterSnapshot) -> StartSpec | None:
    """Return the request with the split of the server that runs under its name with this model;
    None where there is none, or another one is to take its place.
    """
    there = next((each for each in snapshot.kept.running if each.name == spec.name), None)
    if there is None or there.desired is None or spec.replace_other or there.model != spec.model:
        return None
    said = there.desired.asked_for
    sizes: dict[str, Any] = {key: said.get(key) for key in ("tp", "pp", "dp")}
    if not all(isinstance(size, int) for size in sizes.values()):
        return None
    added = (*spec.args, vllm.EXPERT_PARALLEL)
    return replace(spec, **sizes, args=added if said.get("args") == list(added) else spec.args)


def tell(session: Session, plan: ServePlan, *, fixed: bool) -> None:
    """Say what is expected of a start; `fixed` is a split that somebody has named."""
    planned = plan.planned
    model = session.inventory.serve.model
    if planned.verdict == "does-not-fit":
        session.warn("plan", f"by the plan it DOES NOT FIT: {_short(plan)}; vLLM will tell")
    elif planned.verdict == "tight":
        session.warn("plan", f"by the plan it is TIGHT: {_short(plan)}; the start will tell")
    elif plan.tokens is not None:
        held = f"the KV cache should hold {_words(plan.tokens)} tokens"
        session.note("plan", f"{held} ({basis(planned.estimate, plan.question.model.modelled)})")
    if plan.better is not None and not fixed:
        ask = "vlaunch plan" + ("" if model else " --model MODEL")
        mine, its = (f"{each.requests('likely'):.0f}" for each in (planned, plan.better))
        beside = "as here" if its == mine else f"not {mine}"
        text = (
            f"the plan would take {plan.better.option.words} (`{arguments(plan.better.option)}`):"
            f" {its} requests of full length at once, {beside};"
            f" take it with `--plan auto`, see why with `{ask}`"
        )
        session.note("plan", text)


def _words(tokens: Range) -> str:
    if tokens.high - tokens.low <= _EXACT * tokens.low:
        return f"{int(tokens.likely):,}"
    return f"{int(tokens.low):,} to {int(tokens.high):,}"


def _short(plan: ServePlan) -> str:
    estimate = plan.planned.estimate
    stage, length = estimate.poorest, estimate.length
    if states := estimate.states():
        return (
            f"{estimate.sequences:,} sequences at once; with `-- --max-num-seqs {states}` it starts"
        )
    if stage.kv.likely <= 0:
        return (
            f"weights {stage.weights.likely:.1f} and working memory {stage.working.likely:.1f} GiB"
            f" of the {stage.budget:.1f} that a GPU may give"
        )
    return f"{stage.kv.likely:.1f} GiB of a GPU for a request of {length:,} tokens"


def compared(plan: ServePlan | None, tokens: int | None) -> str:
    """Say how the tokens that a server holds compare with the plan's; empty where one is not
    known.
    """
    planned = plan.tokens if plan is not None else None
    if planned is None or not tokens:
        return ""
    exact = _words(planned) == f"{int(planned.likely):,}"
    if exact and abs(tokens - planned.likely) <= _EXACT * planned.likely:
        return " (as planned)"
    return f" (planned {_words(planned)})"


def more_by_a_node(plan: ServePlan | None, tokens: int | None) -> str:
    """Say what one more node like the first would bring; empty where that is not known."""
    more = one_more_node(plan.question, plan.planned, tokens) if plan and tokens else None
    return f"{_words(more[0])} tokens more, as {more[1]}" if more else ""


def as_json(plan: ServePlan | None) -> dict[str, Any]:
    """Return what was planned, for machines."""
    if plan is None or plan.tokens is None:
        return {}
    tokens = plan.tokens
    return {
        "planned": {
            "verdict": plan.planned.verdict,
            "basis": basis(plan.planned.estimate, plan.question.model.modelled),
            "kv_cache_tokens": {key: int(value) for key, value in asdict(tokens).items()},
        }
    }
