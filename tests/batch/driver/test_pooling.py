"""Vectors and scores of a pooling model, from a replica."""

from __future__ import annotations

import array
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launcher.batch.driver import engine, replica
from launcher.batch.driver.results import Converter
from tests.batch.driver.jobs import job
from tests.batch.driver.test_engine import prepared


class EngineDeadError(Exception):
    """vLLM's name for the exception."""


def tensor(values: Any) -> Any:
    """Return a fake tensor."""
    result = SimpleNamespace(numpy=lambda: np.array(values, dtype=np.float32))
    result.float = result.cpu = lambda: result
    return result


class LLM:
    """A fake with a vector of a text's first characters, and a score from the lengths of two texts.
    Texts with `!` are rejected or aborted.
    """

    def __init__(self, **arguments: Any) -> None:
        assert arguments == {"model": "tiny", "runner": "pooling"}
        self.llm_engine = self
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.renderer = SimpleNamespace(render_cmpl=lambda prompts: prompts)
        self.inside: list[Any] = []
        self.batches: list[int] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        assert params.task == "embed"
        text = prompt["prompt"]
        values: Any = [float(ord(letter)) for letter in text[:2]]
        error = SimpleNamespace(message="no room") if text == "!" else None
        self.inside.append(
            SimpleNamespace(
                request_id=request_id,
                finished=True,
                prompt_token_ids=list(text),
                outputs=SimpleNamespace(data=tensor([values] if text == "many" else values)),
                error=error,
            )
        )

    def step(self) -> list[Any]:
        outputs, self.inside = self.inside, []
        return outputs

    def score(self, first: list[str], second: list[str], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.batches.append(len(first))
        if any(text.startswith("!refused") for text in first):
            raise ValueError("the prompt is too long")
        if "!dead" in first:
            raise EngineDeadError
        return [
            SimpleNamespace(
                prompt_token_ids=list(item + other),
                outputs=SimpleNamespace(score=len(item) / len(other)),
                error=SimpleNamespace(message="no room") if item == "!" else None,
            )
            for item, other in zip(first, second, strict=True)
        ]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of vLLM."""
    vllm_module = ModuleType("vllm")
    vllm_module.LLM, vllm_module.PoolingParams = LLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm_module)


def answer_columns(spec: Any, *columns: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Return a replica's results, as the sink gets them."""
    rows = prepared(spec, *columns)
    arguments = engine.engine_arguments(spec)
    arguments = {name: arguments[name] for name in ("model", "runner")}
    loaded = replica.Replica(arguments, Converter(spec, {}))
    return loaded, loaded.answer(rows)


def test_a_vector_is_sent_as_bytes(tmp_path: Path) -> None:
    """Aborted requests are error rows, and so are texts with several vectors."""
    spec = job(tmp_path, task="embed")
    _, result = answer_columns(spec, {"text": "ab"}, {"text": "!"}, {"text": "many"}, {"none": 1})

    assert result[0] == {
        "_row": 0,
        "_error": "",
        "_stage": "",
        "_raw": "",
        "_keep": b"",
        "embedding": array.array("f", [97, 98]).tobytes(),
        "prompt_tokens": 2,
        "_cached": 0,
    }
    assert [(row["_error"], row["_raw"]) for row in result[1:]] == [
        ("vLLM aborted this request: no room", "!"),
        ("the model has a vector for each token, not one for the text", "many"),
        ("the prompt is column `text`, which this row lacks", '{"none": 1}'),
    ]


PAIR = {"column": None, "pair": ["{{ a }}", "{{ b }}"]}


def test_a_score_is_of_two_texts(tmp_path: Path) -> None:
    """A rejected batch is bisected down to the pair at fault."""
    spec = job(tmp_path, task="score", prompt=PAIR)
    loaded, result = answer_columns(
        spec,
        {"a": "four", "b": "xx"},
        {"a": "!refused", "b": "x"},
        {"a": "!", "b": "x"},
        {"a": " ", "b": "x"},
        {"a": "one"},
    )

    assert (result[0]["score"], result[0]["prompt_tokens"]) == (2.0, 6)
    assert [row["_error"] for row in result[1:]] == [
        "ValueError: the prompt is too long",
        "vLLM aborted this request: no room",
        "one of the two texts is empty",
        "the template names `b`, which this row lacks",
    ]
    assert loaded.llm.batches == [3, 1, 2]


def test_a_dead_engine_exits_its_process(tmp_path: Path) -> None:
    """No row has failed: they are assigned again."""
    spec = job(tmp_path, task="score", prompt=PAIR)
    loaded, _ = answer_columns(spec, {"a": "four", "b": "xx"})

    def end() -> None:
        raise SystemError

    loaded.engine.end = end
    with pytest.raises(SystemError):
        loaded.engine.score_prompts([{"prompt": "!dead", "second": "x"}])
