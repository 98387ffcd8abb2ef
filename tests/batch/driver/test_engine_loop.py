"""The engine's thread: outputs in the order of prompts, for any caller and order of completion."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.batch.driver import engine_loop
from launcher.batch.driver.engine_loop import EngineLoop, is_engine_dead, watch_process

PATIENCE = 10  # seconds


class EngineDeadError(Exception):
    """vLLM's name for the exception."""


class Engine:
    """Fake engine that reverses prompts, the latest first; rejects `wrong`, and dies at `fatal`.

    Also yields outputs of unfinished requests.
    """

    def __init__(self, at_once: int = 2) -> None:
        self.at_once, self.had = at_once, 0
        self.inside: dict[str, str] = {}
        self.threads: set[str] = set()
        self.waiting: queue.SimpleQueue[None] = queue.SimpleQueue()

    def add_request(self, request_id: str, prompt: str, params: object) -> None:
        self.threads.add(threading.current_thread().name)
        assert params == "the parameters"
        if prompt == "wrong":
            raise ValueError("no such prompt")
        if prompt == "fatal":
            raise EngineDeadError
        self.inside[request_id] = prompt

    def step(self) -> Iterator[Any]:
        self.threads.add(threading.current_thread().name)
        assert self.inside, "a step without requests blocks forever"
        self.had = max(self.had, len(self.inside))
        if "last words" in self.inside.values():
            raise RuntimeError("the engine failed")
        unfinished = next(iter(self.inside))
        yield SimpleNamespace(request_id=unfinished, finished=False)
        for name in list(self.inside)[: -self.at_once - 1 : -1]:
            text = self.inside.pop(name)[::-1]
            yield SimpleNamespace(request_id=name, finished=True, text=text)


@contextmanager
def running(engine: Engine, **changes: Any) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, "the parameters", lambda prompt: prompt.lower(), **changes)
    try:
        yield loop
    finally:
        loop.close()
        loop.thread.join(PATIENCE)
        assert not loop.thread.is_alive()


def texts(outputs: list[Any]) -> list[str]:
    return [str(output) if isinstance(output, Exception) else output.text for output in outputs]


def test_outputs_are_in_the_order_of_the_prompts() -> None:
    """For any order of completion; prompts are rendered in the order of the calls."""
    with running(Engine()) as loop:
        assert texts(loop.answer(["AB", "CD", "EF"])) == ["ba", "dc", "fe"]
        assert loop.answer([]) == []
        assert texts(loop.answer(["GH"])) == ["hg"]


def test_calls_of_many_threads_get_their_own_outputs() -> None:
    """Their requests run together, and only the engine's thread uses it."""
    engine = Engine()
    with running(engine) as loop, ThreadPoolExecutor(8) as threads:
        requests = [[f"{call}-{row}" for row in range(50)] for call in range(40)]
        answers = list(threads.map(loop.answer, requests))

    assert [texts(answer) for answer in answers] == [
        [row[::-1] for row in rows] for rows in requests
    ]
    assert engine.had > 1
    assert engine.threads == {"engine"}


def test_ordered_calls_are_not_mixed() -> None:
    """Rows with a common prefix must stay together."""
    calls: list[str] = []
    started, mixed = threading.Event(), threading.Event()

    def render(prompt: str) -> str:
        calls.append(prompt)
        if prompt == "a1":
            started.set()
            mixed.wait(0.2)  # enough time for the other call to interfere
        elif prompt == "b1":
            mixed.set()
        return prompt

    engine = Engine()
    loop = EngineLoop(engine, "the parameters", render)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(loop.answer, ["a1", "a2", "a3"])
        assert started.wait(PATIENCE)
        second = threads.submit(loop.answer, ["b1", "b2"])
        assert (texts(first.result()), texts(second.result())) == (["1a", "2a", "3a"], ["1b", "2b"])
    loop.close()

    assert calls == ["a1", "a2", "a3", "b1", "b2"]


def test_a_rejected_prompt_is_an_exception_in_its_place() -> None:
    """By the tokenizer or by the engine; the others are answered."""
    with running(Engine()) as loop:
        outputs = loop.answer(["ab", "wrong", None, "cd"])

    assert texts(outputs[:2] + outputs[3:]) == ["ba", "no such prompt", "dc"]
    assert isinstance(outputs[2], AttributeError)


@pytest.mark.parametrize("prompt", ["fatal", "last words"])
def test_a_dead_engine_exits_its_process(prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason in its log: its rows are assigned to other replicas."""
    ended = threading.Event()
    loop = EngineLoop(Engine(), "the parameters", str, end=ended.set)
    caller = threading.Thread(target=loop.answer, args=[["one", prompt]], daemon=True)
    caller.start()

    assert ended.wait(PATIENCE)
    loop.thread.join(PATIENCE)
    assert caller.is_alive()  # no row is reported as failed
    assert "Error" in capsys.readouterr().err


def test_a_killed_engine_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its step never returns. A deliberate shutdown does not count."""
    monkeypatch.setattr(engine_loop, "PULSE", 0.01)
    states, ended = [True, True, False], threading.Event()
    watch_process(lambda: states.pop(0) if len(states) > 1 else states[0], ended.set)
    looked, wrong = threading.Event(), threading.Event()
    over = watch_process(lambda: looked.set() or True, wrong.set)

    assert ended.wait(PATIENCE)
    assert looked.wait(PATIENCE)
    over.set()
    assert not wrong.is_set()


def test_requests_wait_for_the_shared_tokenizer() -> None:
    """An engine that tokenizes requests receives none while a prompt is rendered."""
    locked: list[bool] = []

    class Tokenizing(Engine):
        def add_request(self, request_id: str, prompt: str, params: object) -> None:
            locked.append(loop.tokenizer.locked())
            super().add_request(request_id, prompt, params)

    with running(Tokenizing(), tokenizing=True) as loop:
        assert texts(loop.answer(["ab"])) == ["ba"]
    assert locked == [True]


def test_only_a_dead_engine_is_fatal() -> None:
    """By the name of its exception, in any module of vLLM."""
    assert is_engine_dead(EngineDeadError())
    assert not is_engine_dead(ValueError("the prompt is too long"))


def test_vllm_detects_an_exited_engine_process() -> None:
    """An in-process engine has none."""
    core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    before = engine_loop.is_alive(llm)
    core.resources.engine_dead = True

    assert (before, engine_loop.is_alive(llm)) == (True, False)
    assert engine_loop.is_alive(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=object())))
