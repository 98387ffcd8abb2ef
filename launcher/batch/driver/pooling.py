"""Outputs of pooling models: a vector per text, a score per pair of texts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import batches
from .engine_loop import NoAnswer, exit_process, is_engine_dead, prompt_counts

if TYPE_CHECKING:
    from vllm import LLM, PoolingParams


def pooling_params() -> PoolingParams:
    """Create vLLM's parameters for a vector; the rest are the model's defaults, as in
    `/v1/embeddings`.
    """
    from vllm import PoolingParams

    return PoolingParams(task="embed")


def embedding_columns(output: Any) -> dict[str, Any]:
    """Return a text's vector as float32 bytes.

    Raises:
        NoAnswer: vLLM gave the request up, or the model has no vector for a whole text.
    """
    check_output(output)
    vector = output.outputs.data.float().cpu().numpy()
    if vector.ndim != 1:
        raise NoAnswer("the model has a vector for each token, not one for the text")
    return {"embedding": vector.tobytes(), **prompt_counts(output)}


def check_output(output: Any) -> None:
    """Raise NoAnswer with vLLM's reason for aborting a request, if it did."""
    if output.error is not None:
        raise NoAnswer(f"vLLM aborted this request: {output.error.message}")


class Scorer:
    """Wrapper of `LLM.score` for one batch at a time; vLLM chooses one prompt or two vectors by
    model.

    Args:
        llm: a `vllm.LLM`.
        end: called when the engine has failed.
    """

    def __init__(self, llm: LLM, end: Callable[[], None] = exit_process) -> None:
        self.llm, self.end = llm, end
        self.lock = threading.Lock()

    def answer(self, prompts: Sequence[Mapping[str, str]]) -> list[batches.Answer]:
        """Return each pair's columns or error; a batch that vLLM rejects is bisected."""
        with self.lock:
            return batches.bisect_failures(prompts, self.score_prompts, [])

    def score_prompts(self, prompts: Sequence[Mapping[str, str]]) -> list[batches.Answer]:
        first = [prompt["prompt"] for prompt in prompts]
        second = [prompt["second"] for prompt in prompts]
        try:
            outputs = self.llm.score(first, second, use_tqdm=False)
        except Exception as problem:
            if is_engine_dead(problem):
                self.end()
            raise
        return [score_columns(output) for output in outputs]

    def close(self) -> None:
        """Do nothing: no state outlives a batch."""


def score_columns(output: Any) -> batches.Answer:
    """Return an output's columns, or the reason for none."""
    try:
        check_output(output)
    except NoAnswer as problem:
        return str(problem)
    return {"score": float(output.outputs.score), **prompt_counts(output)}


def require_columns(answer: batches.Answer) -> dict[str, Any]:
    """Return a pair's columns.

    Raises:
        NoAnswer: it has none.
    """
    if isinstance(answer, str):
        raise NoAnswer(answer)
    return answer
