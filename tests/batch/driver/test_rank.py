"""One rank: valid prompts for vLLM, one answer per row, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.batch.driver import rank

MOST = 8


class Tokenizer:
    """Fake tokenizer: a token per character, with a special one in front on request."""

    max_chars_per_token = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]


class Engine:
    """A fake that reverses prompts, rejects a batch with `wrong`, and dies of `fatal`."""

    model_config = SimpleNamespace(max_model_len=MOST)

    def __init__(self, wrong: str = "", fatal: str = "") -> None:
        self.wrong, self.fatal = wrong, fatal
        self.calls: list[list[str]] = []
        self.pending: list[Any] | None = None
        self.lost = 0

    def sleep(self, level: int, mode: str) -> None:
        assert (level, mode, self.pending) == (0, "keep", None)
        self.pending = []

    def enqueue(self, prompts: list[dict[str, list[int]]], params: object, use_tqdm: bool) -> None:
        assert self.pending == []  # while it is paused
        self.pending = [prompts, params]

    def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]

    def wait_for_completion(self, use_tqdm: bool) -> list[Any]:
        assert self.pending is not None
        outputs = self.generate(self.pending[0], self.pending[1], use_tqdm)
        self.pending = None
        return outputs[self.lost :]

    def generate(
        self, prompts: list[dict[str, list[int]]], params: object, use_tqdm: bool
    ) -> list[Any]:
        texts = ["".join(map(chr, filter(None, prompt["prompt_token_ids"]))) for prompt in prompts]
        self.calls.append(texts)
        if self.fatal in texts:
            raise type("EngineDeadError", (RuntimeError,), {})("gone")
        if self.wrong in texts:
            raise RuntimeError(f"no {self.wrong} here")
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[
                    SimpleNamespace(
                        text=text[::-1],
                        finish_reason="abort" if text == "ab" else "stop",
                        token_ids=[1, 2],
                    )
                ],
            )
            for prompt, text in zip(prompts, texts, strict=True)
        ]


class Prompter:
    """Prompts from the column `t`, as text or as a chat; a row without it has no prompt."""

    def __init__(self, chat: bool = False) -> None:
        self.is_chat = chat

    def __call__(self, columns: dict[str, str]) -> str | list[dict[str, str]]:
        return [{"role": "user", "content": columns["t"]}] if self.is_chat else columns["t"]

    def tools(self, columns: dict[str, str]) -> None:
        return None

    def check_template(self, tokenizer: object) -> None:
        return None

    def chat(self, tokenizer: object, messages: list[dict[str, str]], tools: None) -> str:
        return f"<{messages[0]['content']}>"


def create_rank(
    *,
    together: bool = False,
    chat: bool = False,
    wrong: str = "-",
    fatal: str = "-",
    order: str = "given",
) -> rank.Rank:
    """Return a loaded rank."""
    job: Any = SimpleNamespace(name="demo", sampling={}, engine=SimpleNamespace(order=order))
    converter: Any = SimpleNamespace(job=job, convert=lambda rows: rows)
    rank_actor = rank.Rank(converter, together)
    rank_actor.llm, rank_actor.tokenizer, rank_actor.params = (
        Engine(wrong, fatal),
        Tokenizer(),
        object(),
    )
    rank_actor.prompter = Prompter(chat)  # type: ignore[assignment]
    return rank_actor


def row(number: int, data: bytes) -> dict[str, Any]:
    """Return a row as sent by the driver."""
    return {"_row": number, "_raw": "raw", "_keep": b"", "_data": data}


def rows(*texts: str) -> list[dict[str, Any]]:
    """Return rows with numbers from 10."""
    return [row(10 + index, pickle.dumps({"t": text})) for index, text in enumerate(texts)]


def answer_rows(actor: rank.Rank, sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a rank's answers, before they are converted."""
    answers: Any = actor.answer(sent)
    return list(answers)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake of the used parts of vLLM."""
    module, inner = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    inner.StructuredOutputsParams = dict  # type: ignore[attr-defined]
    inner.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", inner)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("together", [False, True])
def test_good_rows_are_answered_around_bad_ones(together: bool) -> None:
    """One answer per row, in order, and one call of the engine for all."""
    rank_actor = create_rank(together=together)

    answers = answer_rows(
        rank_actor,
        [
            *rows("one"),
            row(20, pickle.dumps({"other": 1})),
            row(21, b"no pickle"),
            *rows("", "two", "far too long"),
        ],
    )

    assert [answer["_row"] for answer in answers] == [10, 20, 21, 10, 11, 12]
    assert answers[0] == {
        "_row": 10,
        "_keep": b"",
        "_error": "",
        "_stage": "",
        "_raw": "",
        "answer": "eno",
        "finish_reason": "stop",
        "prompt_tokens": 4,
        "output_tokens": 2,
        "_cached": 0,
    }
    assert [answer.get("answer") for answer in answers] == [
        "eno",
        None,
        None,
        "",
        "owt",
        None,
    ]
    assert answers[1]["_error"] == "KeyError: 't'"
    assert answers[2]["_error"].startswith("UnpicklingError")
    assert (
        answers[5]["_error"]
        == "the prompt has 13 tokens; with an answer, at most 7 fit (max_model_len)"
    )
    assert {answer["_stage"] for answer in answers if answer["_error"]} == {"prompt"}
    assert rank_actor.llm.calls == [["one", "", "two"]]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("together", [False, True])
def test_long_rows_run_early_and_answers_stay_in_order(together: bool) -> None:
    """Shared prefixes would be grouped; rows without a prompt are left out."""
    rank_actor = create_rank(together=together, order="prefix")

    answers = answer_rows(rank_actor, [*rows("a", "cccc"), row(20, b"no pickle"), *rows("bb")])

    assert rank_actor.llm.calls == [["cccc", "bb", "a"]]
    assert [answer.get("answer") for answer in answers] == ["a", "cccc", None, "bb"]


def test_a_huge_prompt_is_not_tokenized() -> None:
    """Megabytes are rejected by length."""
    (answer,) = answer_rows(create_rank(), rows("x" * (MOST * 2 + 1)))

    assert (
        answer["_error"]
        == "the prompt has 17 characters, more than 8 tokens can hold (max_model_len)"
    )


@pytest.mark.parametrize(("text", "error"), [("\ud800", "surrogate"), ("", "the prompt is empty")])
def test_invalid_text_is_the_rows_error(text: str, error: str) -> None:
    """A lone surrogate would break the tokenizer, an empty text the engine."""
    rank_actor = create_rank(chat=False)
    rank_actor.tokenizer.encode = lambda text, add_special_tokens=True: [
        ord(letter) for letter in text
    ]

    assert error in answer_rows(rank_actor, rows(text))[0]["_error"]


def test_a_chat_goes_through_the_template_and_has_no_special_tokens_added() -> None:
    """The template has already added them."""
    rank_actor = create_rank(chat=True)

    (answer,) = answer_rows(rank_actor, rows("hi"))

    assert (answer["answer"], answer["prompt_tokens"]) == (">ih<", 4)


def test_an_independent_engine_fails_only_the_rejected_row() -> None:
    """vLLM rejects the whole batch; then rows are queried one by one."""
    rank_actor = create_rank(wrong="bad")

    answers = answer_rows(rank_actor, rows("one", "bad", "two"))

    assert [answer.get("answer") for answer in answers] == ["eno", None, "owt"]
    assert (answers[1]["_error"], answers[1]["_stage"]) == (
        "RuntimeError: no bad here",
        "inference",
    )


def test_surplus_answers_are_an_error() -> None:
    """With more answers than prompts, no answer can be matched."""
    rank_actor = create_rank()
    generate = rank_actor.llm.generate
    rank_actor.llm.generate = lambda prompts, params, use_tqdm: generate(
        [*prompts[:1], *prompts], params, use_tqdm
    )

    answers = answer_rows(rank_actor, rows("one", "two"))

    assert [answer["_row"] for answer in answers if "answer" not in answer] == [10, 11]
    assert answers[0]["_error"] == "RuntimeError: vLLM was given 1 prompts and returned 2 answers"


@pytest.mark.usefixtures("vllm")
def test_a_rank_in_step_never_calls_its_engine_twice() -> None:
    """A second call would wait for ranks that do not call theirs."""
    rank_actor = create_rank(together=True, wrong="bad")

    with pytest.raises(RuntimeError, match="no bad here"):
        answer_rows(rank_actor, rows("one", "bad"))
    assert len(rank_actor.llm.calls) == 1


@pytest.mark.usefixtures("vllm")
def test_a_rank_in_step_without_a_good_row_sends_a_placeholder() -> None:
    """Its engine must take part in the round; its output is discarded."""
    rank_actor = create_rank(together=True)

    assert rank_actor.answer([]) == []
    assert answer_rows(rank_actor, rows("far too long"))[0]["_error"]
    assert rank_actor.llm.calls == [["placeholder"], ["placeholder"]]


@pytest.mark.usefixtures("vllm")
def test_a_missing_answer_fails_the_rank() -> None:
    """Its row is unknown."""
    rank_actor = create_rank(together=True)
    rank_actor.llm.lost = 1

    with pytest.raises(RuntimeError, match="given 2 prompts and returned 1 answers"):
        answer_rows(rank_actor, rows("one", "two"))


def test_an_independent_engine_is_not_called_without_rows() -> None:
    """No other rank waits for it."""
    rank_actor = create_rank()

    assert rank_actor.answer([]) == []
    assert rank_actor.llm.calls == []


@pytest.mark.parametrize("texts", [("fatal",), ("bad", "fatal")])
def test_a_dead_engine_is_no_error_of_a_row(texts: tuple[str, ...]) -> None:
    """Neither for a batch nor for a single row."""
    rank_actor = create_rank(wrong="bad" if "bad" in texts else "-", fatal="fatal")

    with pytest.raises(RuntimeError, match="gone"):
        answer_rows(rank_actor, rows(*texts))


def test_an_aborted_request_is_an_error_row() -> None:
    """It has partial text."""
    (answer,) = answer_rows(create_rank(), rows("ab"))

    assert (answer["_error"], answer["_stage"]) == ("vLLM aborted this request: abort", "inference")


@pytest.mark.usefixtures("vllm")
def test_loading_sets_this_runs_variables_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM rejects a dense model with data-parallel variables of another run. A loaded engine is
    watched: without its process the rank would wait forever.
    """
    calls: list[dict[str, str]] = []
    watched: list[object] = []

    class LLM:
        def __init__(self, **arguments: object) -> None:
            calls.append(
                {name: value for name, value in os.environ.items() if name.startswith("VLLM_DP_")}
            )
            assert arguments == {"model": "m"}

        def get_tokenizer(self) -> Tokenizer:
            return Tokenizer()

    sys.modules["vllm"].LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setattr(rank, "Prompter", lambda job: Prompter())
    monkeypatch.setattr(rank, "watch_engine", watched.append)
    monkeypatch.setenv("VLLM_DP_SIZE", "7")
    rank_actor = create_rank()

    rank_actor.load(rank.RankSettings(arguments={"model": "m"}))
    rank_actor.load(rank.RankSettings(environment={"VLLM_DP_RANK": "1"}, arguments={"model": "m"}))

    assert calls == [{}, {"VLLM_DP_RANK": "1"}]
    assert watched[-1] is rank_actor.llm
    monkeypatch.delenv("VLLM_DP_RANK")


def test_processes_of_a_killed_rank_are_killed() -> None:
    """The engine's processes would occupy the device; they are in the rank's process group, which
    is watched.
    """
    program = """
import dataclasses, json, subprocess, sys, types
from launcher.batch.driver import rank
rank.log_paths = lambda: ("worker.out", "worker.err")
from launcher.batch.driver.rank import Rank
card = Rank(types.SimpleNamespace(job=None), False).hello()
subprocess.Popen(["sleep", "300"])
print(json.dumps(dataclasses.asdict(card)), flush=True)
print("an error", file=sys.stderr, flush=True)
sys.stdin.read()
"""
    leader = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert leader.stdout is not None
    assert leader.stdin is not None
    try:
        card = json.loads(leader.stdout.readline())
        assert card["pid"] == leader.pid == os.getpgid(leader.pid)
        assert card["log"] == "worker.out"  # not Ray's pipe
        assert leader.stdout.readline() == b"an error\n"  # one log for both streams
        leader.send_signal(signal.SIGKILL)
        leader.wait(60)

        # The pipe is open in `sleep`, and in the process that waits for the leader's exit.
        ready, _, _ = select.select([leader.stdout], [], [], 20)
        assert ready
        assert leader.stdout.read() == b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.stdin.close()
        leader.stdout.close()
        leader.wait(60)
