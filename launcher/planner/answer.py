"""A plan in machine form: what `vlaunch plan --json` prints. Pure; figures are GiB and tokens."""

from __future__ import annotations

from typing import Any

from launcher.planner.advice import Alternative, alternatives
from launcher.planner.choice import Planned, Question, Reason, remarks
from launcher.planner.estimate import Estimate, Range, Stage

Json = dict[str, Any]


def answer(question: Question, planned: Planned) -> Json:
    """Return a plan with its reasons and alternatives."""
    why = remarks(question, planned)
    return {
        **_figures(planned.estimate, question.model.modelled),
        "verdict": planned.verdict,
        "max_concurrency": _range(planned.estimate.concurrency, planned.option.replicas),
        "split": _split(planned),
        "why": [_reason(reason) for reason in why],
        "alternatives": [_alternative(each) for each in alternatives(question, planned)],
    }


def basis(found: Estimate, unknown: str) -> str:
    """Name what the figures rest on; `unknown` says why a model is not modelled."""
    if found.at is not None:
        return "measured"
    return "weights-only" if unknown else "estimate"


def _figures(found: Estimate, unknown: str) -> Json:
    poorest = found.poorest
    return {
        "basis": basis(found, unknown),
        **({"measured_at": found.at} if found.at is not None else {}),
        **({"not_modelled": unknown} if unknown else {}),
        "context": found.length,
        **_stage(poorest),
        "kv_tokens": _range(found.tokens),
        "stages": [{"layers": stage.layers, **_stage(stage)} for stage in found.stages],
    }


def _stage(stage: Stage) -> Json:
    return {
        "budget_gib": round(stage.budget, 3),
        "weights_gib": _range(stage.weights),
        "working_gib": _range(stage.working),
        "kv_gib": _range(stage.kv),
    }


def _range(found: Range | None, times: int = 1) -> Json | None:
    if found is None:
        return None
    values = {"low": found.low, "likely": found.likely, "high": found.high}
    return {
        name: value * times if isinstance(value, int) else round(value * times, 3)
        for name, value in values.items()
    }


def _split(planned: Planned) -> Json:
    option = planned.option
    return {
        "tp": option.tp,
        "pp": option.pp,
        "dp": option.dp,
        "servers": option.servers,
        "expert_parallel": option.experts,
        "nodes": [{"name": name, "gpus": gpus} for name, gpus in planned.placement],
    }


def _reason(reason: Reason) -> Json:
    return {"rule": reason.rule, "text": reason.text, "source": reason.source}


def _alternative(each: Alternative) -> Json:
    planned = each.planned
    return {
        "change": each.change,
        "better": each.better,
        "verdict": planned.verdict,
        "split": _split(planned),
        **_stage(planned.estimate.poorest),
        "kv_tokens": _range(planned.estimate.tokens),
        "max_concurrency": _range(planned.estimate.concurrency, planned.option.replicas),
    }
