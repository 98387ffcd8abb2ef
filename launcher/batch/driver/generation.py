"""Sampling parameters and answers of generating models, for replicas and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import lines
from .engine_loop import NoAnswer, prompt_counts
from .job_file import Failed
from .results import Row
from .source import raw_input

if TYPE_CHECKING:
    from vllm import SamplingParams

# exceptions with a readable text, shown without their names
PLAIN = ("PromptError", "NoAnswer", "RequestError", "VLLMValidationError")


def sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Create vLLM's sampling parameters before the model loads: an error would affect every row.

    Raises:
        Failed: vLLM rejects them.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    plain = dict(sampling)
    structured = plain.pop("structured_outputs", None)
    try:
        structured_params = StructuredOutputsParams(**structured) if structured else None
        params = SamplingParams(**plain, structured_outputs=structured_params)
    except Exception as problem:
        raise Failed(
            "vLLM rejected these sampling parameters",
            error_reason(problem),
            "change `sampling` as the message describes",
        ) from problem
    # Otherwise vLLM returns every row at every token.
    params.output_kind = RequestOutputKind.FINAL_ONLY
    # A deep copy per request is unnecessary: the parameters are never modified.
    params.skip_clone = True
    return params


def answer_columns(output: Any) -> dict[str, Any]:
    """Return an output's columns.

    Raises:
        NoAnswer: vLLM aborted the request, even after partial text.
    """
    first = output.outputs[0]
    finish_reason = str(first.finish_reason or "")
    if finish_reason in ("abort", "error"):
        raise NoAnswer(f"vLLM aborted this request: {finish_reason}")
    return {
        "answer": first.text,
        "finish_reason": finish_reason,
        **prompt_counts(output),
        "output_tokens": len(first.token_ids),
    }


def with_output(
    row: Row, output: Any, columns: Callable[[Any], Row], stage: str = "inference"
) -> Row:
    """Return a row with its output's columns, or as an error row for an exception."""
    carried = {"_row": row["_row"], "_keep": row["_keep"]}
    try:
        if isinstance(output, Exception):
            raise output
        return {**columns(output), **carried, "_error": "", "_stage": "", "_raw": ""}
    except Exception as problem:
        reason = lines.excerpt(error_reason(problem))
        return {**carried, "_error": reason, "_stage": stage, "_raw": raw_input(row)}


def error_reason(problem: BaseException) -> str:
    """Return an error row's reason for this exception."""
    if isinstance(problem, UnicodeEncodeError):
        return "the prompt holds half of a surrogate pair, which is not text"
    name, text = type(problem).__name__, str(problem).strip()
    if name in PLAIN:
        return text
    return f"{name}: {text}" if text else name
