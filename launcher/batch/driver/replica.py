"""Replica of mode `engine`: an actor with a vLLM engine that answers several blocks at once."""

from __future__ import annotations

import array
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ... import upstream
from ..job import to_json
from ..job_values import RowKind
from . import adapters, cluster, failures, order, pooling, postmortem, results
from .engine_loop import EngineLoop, watch_engine
from .generation import answer_columns, sampling_params, with_output
from .openai_format.server import ApiServer, response_columns
from .ray_internals import log_paths
from .results import Converter

# vLLM's message for a dead process without an exit code yet
UNKNOWN_EXIT = upstream.text("vllm.engine-exit-unknown")
NOT_STARTED = "vlaunch: the engine did not start"  # marks the end of the output in the log
LOG_LINES = 10_000  # lines of a log; at most its last 64 KiB are read
# sampling parameters that vLLM tokenizes, or compiles to a grammar, per request
TOKENIZED = ("bad_words", "structured_outputs")


class Replica:
    """One vLLM engine.

    `arguments` are those of `vllm.LLM`, or of `vllm serve` for requests. An exception in its
    constructor ends the job.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        converter: Converter,
        gate: Any = None,
    ) -> None:
        self.cleanup = ExitStack()
        job = converter.job
        cluster.label_log(job.name)
        self.kind, self.order, self.converter = job.row_kind, job.engine.order, converter
        self.engine: EngineLoop | pooling.Scorer | ApiServer
        if self.kind == "request":
            with explain_start():
                self.engine = ApiServer(arguments)
        else:
            self.engine = self.start_engine(arguments, self.kind, to_json(job.sampling), job.lora)
        self.cleanup.callback(self.engine.close)
        cluster.wait_at_gate(gate)

    def start_engine(
        self,
        arguments: Mapping[str, Any],
        kind: RowKind,
        sampling: Mapping[str, Any],
        lora: Mapping[str, str] | None,
    ) -> EngineLoop | pooling.Scorer:
        """Load the model and its adapter, after checks of the parameters."""
        params = sampling_params(sampling) if kind == "generate" else pooling.pooling_params()
        with explain_start():
            from vllm import LLM

            self.llm = LLM(**arguments)
            if adapter := adapters.adapter_request(lora):
                # with the first row, a missing adapter would end the engine
                self.llm.llm_engine.add_lora(adapter)
        self.cleanup.callback(self.llm.llm_engine.engine_core.shutdown)
        self.cleanup.callback(watch_engine(self.llm).set)
        if kind == "score":
            return pooling.Scorer(self.llm)
        return EngineLoop(
            self.llm.llm_engine,
            params,
            partial(render_prompt, self.llm),
            tokenizing=any(name in sampling for name in TOKENIZED),
            options={"lora_request": adapter} if adapter else {},
        )

    def __call__(self, table: Any) -> Any:
        """Answer a block."""
        return results.pack(self.converter.convert(self.answer(table.to_pylist())))

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer prepared rows; those that failed before are passed on."""
        columns = COLUMN_BUILDERS[self.kind]
        good = [row for row in rows if not row["_error"]]
        outputs = iter(order.ask_in_order(self.ask_engine, good, self.order, order.prompt_key))
        return [row if row["_error"] else with_output(row, next(outputs), columns) for row in rows]

    def ask_engine(self, rows: list[dict[str, Any]]) -> list[Any]:
        """Answer prepared rows; return an output or an exception for each."""
        return list(self.engine.answer([vllm_prompt(row) for row in rows]))

    def __del__(self) -> None:
        """Shut down the engine's processes with the actor, as Ray Data ends it."""
        self.cleanup.close()


def vllm_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prepared row's prompt for vLLM: tokens if present, else text; a pair has a second
    text, a request its path.
    """
    if row["_second"]:
        return {"prompt": row["_prompt"], "second": row["_second"]}
    if row["_tokens"]:
        return {"prompt_token_ids": array.array(order.TOKENS, row["_tokens"]).tolist()}
    return {"prompt": row["_prompt"]}


def render_prompt(llm: Any, prompt: Any) -> Any:
    """Return the engine's input for a prompt: token ids, checked for length.

    Encoder-decoder engines split a prompt into two themselves.
    """
    return prompt if llm.model_config.is_encoder_decoder else llm.renderer.render_cmpl([prompt])[0]


COLUMN_BUILDERS: Mapping[RowKind, Callable[[Any], dict[str, Any]]] = {
    "generate": answer_columns,
    "embed": pooling.embedding_columns,
    "score": pooling.require_columns,
    "request": response_columns,
}


class NotStarted(Exception):
    """An engine that did not start, with the lines of its log.

    Ray passes on only the text of such an exception.
    """


def log_sizes() -> dict[str, int]:
    """Return this process's log files and their sizes; stdout, with vLLM's log, comes first."""
    return {path: os.path.getsize(path) for path in log_paths() if os.path.isfile(path)}


def await_output(path: str, seconds: float = 2.0) -> None:
    """Wait until all output so far is in the log: Ray forwards it."""
    mark = f"{NOT_STARTED} ({time.monotonic_ns()})"
    os.write(1, f"\n{mark}\n".encode())
    end = time.monotonic() + seconds
    while mark not in postmortem.read_tail(path, 20) and time.monotonic() < end:
        time.sleep(0.01)


def start_failure(problem: BaseException, before: Mapping[str, int]) -> list[str]:
    """Return the engine processes' log lines since `before` that `problem` refers to."""
    if not failures.POINTER.search(str(problem)):
        return []
    try:
        for path in list(before)[:1]:
            await_output(path)
        tails = [postmortem.read_tail(path, LOG_LINES, size) for path, size in before.items()]
    except OSError:  # the log only adds an explanation
        return []
    lines = [line for tail in tails for line in tail if NOT_STARTED not in line]
    wordless = (
        [failures.NO_ERROR_LOGGED, *lines[-2:]] if lines and UNKNOWN_EXIT in str(problem) else []
    )
    return failures.root_cause_lines(lines, cluster.node_address()) or wordless


@contextmanager
def explain_start() -> Iterator[None]:
    """Replace the exception of a failed engine start with the cause from its logs, if any."""
    before = log_sizes()
    try:
        yield
    except Exception as problem:
        if not (cause_lines := start_failure(problem, before)):
            raise
        raise NotStarted("\n".join(["the engine did not start:", *cause_lines])) from problem
