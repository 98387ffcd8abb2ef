"""A plan as JSON, for `vlaunch plan --json`. Pure; figures are GiB and tokens."""

from typing import Any

from launcher.planner.advice import Alternative, list_alternatives
from launcher.planner.choice import PlannedLayout, PlanQuestion, Reason, explain_layout
from launcher.planner.estimate import Estimate, Range, StageMemory

Json = dict[str, Any]


def plan_json(question: PlanQuestion, plan: PlannedLayout) -> Json:
    """Return a plan with its reasons and alternatives."""
    reasons = explain_layout(question, plan)
    return {
        **_figures_json(plan.estimate, question.model.unmodelled_reason),
        "verdict": plan.verdict,
        "max_concurrency": _range_json(plan.estimate.concurrency, plan.layout.replicas),
        "split": _layout_json(plan),
        "why": [_reason_json(reason) for reason in reasons],
        "alternatives": list(map(_alternative_json, list_alternatives(question, plan))),
    }


def figures_basis(estimate: Estimate, unmodelled_reason: str) -> str:
    """Return the basis of the figures; `unmodelled_reason` is empty for a modelled model."""
    if estimate.measured_at is not None:
        return "measured"
    return "weights-only" if unmodelled_reason else "estimate"


def _figures_json(estimate: Estimate, unmodelled_reason: str) -> Json:
    poorest = estimate.poorest
    return {
        "basis": figures_basis(estimate, unmodelled_reason),
        **({"measured_at": estimate.measured_at} if estimate.measured_at is not None else {}),
        **({"not_modelled": unmodelled_reason} if unmodelled_reason else {}),
        "context": estimate.length,
        **_stage_json(poorest),
        "kv_tokens": _range_json(estimate.tokens),
        "stages": [{"layers": stage.layers, **_stage_json(stage)} for stage in estimate.stages],
    }


def _stage_json(stage: StageMemory) -> Json:
    return {
        "budget_gib": round(stage.budget, 3),
        "weights_gib": _range_json(stage.weights),
        "working_gib": _range_json(stage.working),
        "kv_gib": _range_json(stage.kv),
    }


def _range_json(value_range: Range | None, factor: int = 1) -> Json | None:
    if value_range is None:
        return None
    values = {"low": value_range.low, "likely": value_range.likely, "high": value_range.high}
    return {
        name: value * factor if isinstance(value, int) else round(value * factor, 3)
        for name, value in values.items()
    }


def _layout_json(plan: PlannedLayout) -> Json:
    layout = plan.layout
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "servers": layout.servers,
        "expert_parallel": layout.experts,
        "nodes": [{"name": name, "gpus": gpus} for name, gpus in plan.placement],
    }


def _reason_json(reason: Reason) -> Json:
    return {"rule": reason.rule, "text": reason.text, "source": reason.source}


def _alternative_json(alternative: Alternative) -> Json:
    plan = alternative.planned
    return {
        "change": alternative.change,
        "better": alternative.better,
        "verdict": plan.verdict,
        "split": _layout_json(plan),
        **_stage_json(plan.estimate.poorest),
        "kv_tokens": _range_json(plan.estimate.tokens),
        "max_concurrency": _range_json(plan.estimate.concurrency, plan.layout.replicas),
    }
