"""What is asked of a model that generates, and what is made of its outputs: the same in replicas
and in ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .engine_loop import NoAnswer, prompt_counts
from .job import Failed

if TYPE_CHECKING:
    from vllm import SamplingParams

# exceptions whose text is a sentence about the row
PLAIN = ("PromptError", "NoAnswer", "VLLMValidationError")


def sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Make vLLM's sampling parameters, once, before the model is loaded: what is wrong in them is
    wrong for every row.

    Raises:
        Failed: vLLM does not take them.
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
            "vLLM refuses these sampling parameters",
            error_reason(problem),
            "change `sampling` as that says",
        ) from problem
    # Else vLLM hands out every row at every token.
    params.output_kind = RequestOutputKind.FINAL_ONLY
    # Each request gets a copy; nobody changes what is in these, which a deep one would be for.
    params.skip_clone = True
    return params


def answer_columns(output: Any) -> dict[str, Any]:
    """Return what vLLM answered; a request that it gave up has no answer, however much there is.

    Raises:
        NoAnswer: It gave this one up.
    """
    first = output.outputs[0]
    ended = str(first.finish_reason or "")
    if ended in ("abort", "error"):
        raise NoAnswer(f"vLLM ended this request: {ended}")
    return {
        "answer": first.text,
        "finish_reason": ended,
        **prompt_counts(output),
        "output_tokens": len(first.token_ids),
    }


def error_reason(problem: BaseException) -> str:
    """Return what to write into an error row for this exception."""
    if isinstance(problem, UnicodeEncodeError):
        return "the prompt holds half of a surrogate pair, which is not text"
    name, text = type(problem).__name__, str(problem).strip()
    if name in PLAIN:
        return text
    return f"{name}: {text}" if text else name
