"""Sampling parameters and answers of replicas and ranks."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.batch.driver import generation
from launcher.batch.driver.engine_loop import NoAnswer
from launcher.batch.driver.job_file import Failed
from launcher.batch.driver.prompts import PromptError


class VLLMValidationError(ValueError):
    """vLLM's name for the exception."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of vLLM's sampling parameters."""
    vllm_module, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")

    def parameters(temperature: float = 1.0, structured_outputs: Any = None) -> SimpleNamespace:
        if temperature < 0:
            raise ValueError("temperature must be non-negative, got -1")
        return SimpleNamespace(temperature=temperature, structured_outputs=structured_outputs)

    vllm_module.SamplingParams = parameters  # type: ignore[attr-defined]
    sampling.StructuredOutputsParams = lambda **spec: ("structured", spec)  # type: ignore[attr-defined]
    sampling.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm_module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)


@pytest.mark.usefixtures("vllm")
def test_sampling_parameters_are_vllms() -> None:
    """Nested objects are created from the job's values; only final outputs are returned."""
    params = generation.sampling_params({"temperature": 0.5, "structured_outputs": {"regex": "a"}})

    assert (params.temperature, params.structured_outputs) == (0.5, ("structured", {"regex": "a"}))
    assert (params.output_kind, params.skip_clone) == ("final", True)
    assert generation.sampling_params({}).structured_outputs is None


@pytest.mark.usefixtures("vllm")
def test_rejected_sampling_parameters_fail_the_job() -> None:
    """They are wrong for every row."""
    with pytest.raises(Failed, match="rejected these sampling parameters") as raised:
        generation.sampling_params({"temperature": -1})

    assert "must be non-negative" in raised.value.evidence


def output(ended: str | None, **changes: Any) -> SimpleNamespace:
    first = SimpleNamespace(text="ja", finish_reason=ended, token_ids=[1, 2])
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[first], **changes)


def test_the_fields_of_an_answer() -> None:
    """Text, finish reason and tokens, with the prompt's cached tokens."""
    result = generation.answer_columns(output("length", num_cached_tokens=2))

    assert result == {
        "answer": "ja",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "output_tokens": 2,
        "_cached": 2,
    }
    assert generation.answer_columns(output(None))["_cached"] == 0


@pytest.mark.parametrize("ended", ["abort", "error"])
def test_an_aborted_request_has_no_answer(ended: str) -> None:
    """It has partial text."""
    with pytest.raises(NoAnswer, match=f"vLLM aborted this request: {ended}"):
        generation.answer_columns(output(ended))


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (PromptError("the prompt is empty"), "the prompt is empty"),
        (NoAnswer("vLLM aborted this request: abort"), "vLLM aborted this request: abort"),
        (VLLMValidationError("too many tokens"), "too many tokens"),
        (KeyError("t"), "KeyError: 't'"),
        (RuntimeError(), "RuntimeError"),
        (
            UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"),
            "the prompt holds half of a surrogate pair, which is not text",
        ),
    ],
)
def test_a_reason_is_a_sentence_or_names_its_exception(problem: Exception, expected: str) -> None:
    """Readable exceptions are shown without their names."""
    assert generation.error_reason(problem) == expected
