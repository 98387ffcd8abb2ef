"""Keeps one engine of vLLM busy: requests of several batches are in it at the same time, one thread
takes its steps, and each output goes to its batch when it ends. Nothing of Ray.

An `AsyncLLM` wakes a coroutine for every row at every step; `LLM.generate` takes no row before all
are done. This does what `LLM` does between its first request and its last, without a last one.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from .job import CACHED_TOKENS

PULSE = 1.0  # seconds between two looks at whether an engine lives


class VllmEngine(Protocol):
    """What is used of `vllm.LLMEngine`."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        """Take a request; raise what is wrong with it."""

    def step(self) -> Iterable[Any]:
        """Wait for the next outputs; those that are `finished` are whole."""


class PendingCall:
    """The prompts of one call, whose outputs come in any order."""

    def __init__(self, prompts: int) -> None:
        self.outputs: list[Any] = [None] * prompts
        self.remaining = prompts
        self.done = threading.Event()
        if not prompts:
            self.done.set()

    def put(self, index: int, output: Any) -> None:
        """Take an output, or the exception in place of one; of the engine's thread alone."""
        self.outputs[index] = output
        self.remaining -= 1
        if not self.remaining:
            self.done.set()


def exit_process() -> None:
    """End this process, whatever its threads wait for: Ray starts another one, and its rows are
    handed out again.
    """
    os._exit(1)


def watch_process(
    alive: Callable[[], bool], end: Callable[[], None] = exit_process
) -> threading.Event:
    """Look from a thread whether an engine lives, and end this process when it does not, until the
    event that is returned is set.

    Who waits for the next step of an engine whose process was killed waits for ever: vLLM's client
    takes a note of its end, and tells nobody (0.32, `SyncMPClient` in v1/engine/core_client.py).
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(PULSE):
            if not alive():
                sys.stderr.write("the engine's process is gone\n")
                end()
                return

    threading.Thread(target=look, name="pulse", daemon=True).start()
    return over


def is_alive(llm: Any) -> bool:
    """Tell whether an engine's process lives, as vLLM's client of it has noted; an engine in this
    process has none.
    """
    return not getattr(getattr(llm.llm_engine.engine_core, "resources", None), "engine_dead", False)


def watch_engine(llm: Any) -> threading.Event:
    """End this process when the one of an engine is gone, as `watch` does."""
    return watch_process(partial(is_alive, llm))


class EngineLoop:
    """An engine and its thread.

    Args:
        engine: whose `add_request` and `step` are called by that thread alone.
        params: of every request.
        render: makes what an engine takes of a prompt, in the thread of the caller, so that
            tokenizing goes on beside the steps; one prompt at a time, as tokenizers want it.
        tokenizing: `add_request` needs the tokenizer, too, as for words that are forbidden: it and
            `render` wait for each other.
        end: is called when the engine cannot go on.
    """

    def __init__(
        self,
        engine: VllmEngine,
        params: Any,
        render: Callable[[Any], Any],
        *,
        tokenizing: bool = False,
        end: Callable[[], None] = exit_process,
    ) -> None:
        self.engine, self.params, self.render, self.end = engine, params, render, end
        self.incoming: queue.SimpleQueue[tuple[PendingCall, int, Any] | None] = queue.SimpleQueue()
        self.active: dict[
            str, tuple[PendingCall, int]
        ] = {}  # requests that the engine has, by their ids
        self.request_count = 0
        self.call_lock, self.tokenizer = threading.Lock(), threading.Lock()
        self.add_lock: AbstractContextManager[Any] = self.tokenizer if tokenizing else nullcontext()
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    def answer(self, prompts: Sequence[Any]) -> list[Any]:
        """Return each prompt's output, or the exception that it ended with, in their order.

        Many threads may call it at the same time.
        """
        call = PendingCall(len(prompts))
        with self.call_lock:  # one call after the other: what is in order stays so
            for index, prompt in enumerate(prompts):
                try:
                    with self.tokenizer:
                        request = self.render(prompt)
                except Exception as problem:  # whatever a tokenizer says of a prompt is that row's
                    request = problem
                self.incoming.put((call, index, request))
        call.done.wait()
        return call.outputs

    def close(self) -> None:
        """End the thread, which must have nothing to do any more."""
        self.incoming.put(None)

    def run(self) -> None:
        """Take steps for as long as there is anything to do, and wait where there is not."""
        try:
            while self.take():
                for output in self.engine.step():
                    if output.finished:
                        call, index = self.active.pop(output.request_id)
                        call.put(index, output)
        # An engine that raises in a step has lost its requests, and with them somebody's rows.
        except BaseException:
            traceback.print_exc()
            self.end()

    def take(self) -> bool:
        """Hand over what has come, and wait for something when the engine has nothing; return
        whether to go on.
        """
        while True:
            try:
                came = self.incoming.get(block=not self.active)
            except queue.Empty:
                return True
            if came is None:
                return False
            self.add(*came)

    def add(self, call: PendingCall, index: int, request: Any) -> None:
        if isinstance(request, Exception):
            call.put(index, request)
            return
        self.request_count += 1
        name = str(self.request_count)
        try:
            with self.add_lock:
                self.engine.add_request(name, request, self.params)
        except Exception as problem:
            if is_engine_dead(problem):
                raise
            call.put(index, problem)
        else:
            self.active[name] = call, index


def prompt_counts(output: Any) -> dict[str, int]:
    """Return how many tokens a prompt has, and how many of them vLLM had in its cache."""
    cached = getattr(output, "num_cached_tokens", None)
    return {"prompt_tokens": len(output.prompt_token_ids), CACHED_TOKENS: cached or 0}


class NoAnswer(Exception):
    """Why vLLM gave up a request."""


def is_engine_dead(problem: BaseException) -> bool:
    """Tell whether an exception means that the engine is gone, not that a request was wrong."""
    return type(problem).__name__.startswith("EngineDead")
