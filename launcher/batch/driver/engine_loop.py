"""Loop that keeps one vLLM engine busy with requests of several batches; one thread steps it. No
Ray.

`AsyncLLM` wakes a coroutine for every row at every step; `LLM.generate` takes no row before all are
done. This does the same as `LLM` between its first and last request, without a last one.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from ... import upstream
from ..job import CACHED_TOKENS

PULSE = 1.0  # seconds between checks of the engine


class VllmEngine(Protocol):
    """The used part of `vllm.LLMEngine`."""

    def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        """Add a request; raises for an invalid one."""

    def step(self) -> Iterable[Any]:
        """Wait for the next outputs; those that are `finished` are complete."""


class PendingCall:
    """Prompts of one call; outputs arrive in any order."""

    def __init__(self, prompts: int) -> None:
        self.outputs: list[Any] = [None] * prompts
        self.remaining = prompts
        self.done = threading.Event()
        if not prompts:
            self.done.set()

    def put(self, index: int, output: Any) -> None:
        """Store an output or exception; called by the engine's thread only."""
        self.outputs[index] = output
        self.remaining -= 1
        if not self.remaining:
            self.done.set()


def exit_process() -> None:
    """Exit, whatever the threads wait for: Ray restarts the replica and reassigns its rows."""
    os._exit(1)


def watch_process(
    alive: Callable[[], bool], end: Callable[[], None] = exit_process
) -> threading.Event:
    """Watch an engine from a thread, and exit this process when it dies, until the returned event
    is set.

    Waiting for a step of a killed engine would block forever: vLLM's client only records its end
    (0.32, `SyncMPClient` in v1/engine/core_client.py).
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
    """Return True unless vLLM's client has recorded its engine's death; an in-process engine has
    none.
    """
    return not getattr(getattr(llm.llm_engine.engine_core, "resources", None), "engine_dead", False)


def watch_engine(llm: Any) -> threading.Event:
    """Exit this process when an engine's process dies, as `watch_process` does."""
    return watch_process(partial(is_alive, llm))


class EngineLoop:
    """An engine and its thread.

    Args:
        engine: only the loop's thread calls its `add_request` and `step`.
        params: of every request.
        render: turns a prompt into engine input, in the caller's thread, so that tokenizing
            overlaps
            with steps; one prompt at a time, as tokenizers require.
        tokenizing: `add_request` uses the tokenizer too (as for forbidden words): it and `render`
            exclude each other.
        end: called when the engine has failed.
        options: further arguments of `add_request`.
    """

    def __init__(
        self,
        engine: VllmEngine,
        params: Any,
        render: Callable[[Any], Any],
        *,
        tokenizing: bool = False,
        end: Callable[[], None] = exit_process,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine, self.params, self.render, self.end = engine, params, render, end
        self.options = options or {}
        self.incoming: queue.SimpleQueue[tuple[PendingCall, int, Any] | None] = queue.SimpleQueue()
        self.active: dict[str, tuple[PendingCall, int]] = {}  # the engine's requests by id
        self.request_count = 0
        self.call_lock, self.tokenizer = threading.Lock(), threading.Lock()
        self.add_lock: AbstractContextManager[Any] = self.tokenizer if tokenizing else nullcontext()
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    def answer(self, prompts: Sequence[Any]) -> list[Any]:
        """Return each prompt's output or exception, in the order of the prompts; thread-safe."""
        call = PendingCall(len(prompts))
        with self.call_lock:  # one call at a time, to keep its prompts in order
            for index, prompt in enumerate(prompts):
                try:
                    with self.tokenizer:
                        request = self.render(prompt)
                except Exception as problem:  # any tokenizer error belongs to its row
                    request = problem
                self.incoming.put((call, index, request))
        call.done.wait()
        return call.outputs

    def close(self) -> None:
        """Stop the thread, which must be idle."""
        self.incoming.put(None)

    def run(self) -> None:
        """Step while requests are active, else wait for the next one."""
        try:
            while self.take():
                for output in self.engine.step():
                    if output.finished:
                        call, index = self.active.pop(output.request_id)
                        call.put(index, output)
        # An engine that raises in a step has lost its requests, and so rows of several calls.
        except BaseException:
            traceback.print_exc()
            self.end()

    def take(self) -> bool:
        """Submit queued requests, waiting for one when the engine is idle; return False to stop."""
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
                self.engine.add_request(name, request, self.params, **self.options)
        except Exception as problem:
            if is_engine_dead(problem):
                raise
            call.put(index, problem)
        else:
            self.active[name] = call, index


def prompt_counts(output: Any) -> dict[str, int]:
    """Return a prompt's tokens and its tokens from vLLM's cache."""
    cached = getattr(output, "num_cached_tokens", None)
    return {"prompt_tokens": len(output.prompt_token_ids), CACHED_TOKENS: cached or 0}


class NoAnswer(Exception):
    """A request that vLLM aborted."""


def is_engine_dead(problem: BaseException) -> bool:
    """Return True if an exception means a dead engine, not an invalid request."""
    return type(problem).__name__.startswith(upstream.text("vllm.engine-dead"))
