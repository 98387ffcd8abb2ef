"""One replica of mode `engine`: an actor that holds one engine of vLLM and answers blocks of
prepared rows, several at the same time.
"""

from __future__ import annotations

import array
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from . import cluster, failures, lines, pooling, postmortem, source
from .engine_loop import EngineLoop, NoAnswer, watch_engine
from .job import RESULTS, Failed, Task

MANY = 10_000  # lines of a log, of which no more than the last 64 KiB are read
TOKENS = "i"  # how tokens travel: as C's integers, of four bytes each
CARRIED = ("_row", "_keep")
# what of sampling parameters vLLM turns into tokens, or into a grammar over them, with each request
TOKENIZED = ("bad_words", "structured_outputs")


class Replica:
    """One vLLM engine.

    `arguments` are those of `vllm.LLM`. What its constructor raises ends the job.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        task: Task,
        sampling: Mapping[str, Any],
        gate: Any = None,
    ) -> None:
        params = parameters(sampling) if task == "generate" else pooling.parameters()
        with explained():
            from vllm import LLM

            self.llm = LLM(**arguments)
        self.over = watch_engine(self.llm)
        self.task = task
        self.engine: EngineLoop | pooling.Scores
        if task == "score":
            self.engine = pooling.Scores(self.llm)
        else:
            self.engine = EngineLoop(
                self.llm.llm_engine,
                params,
                partial(rendered, self.llm),
                tokenizing=any(name in sampling for name in TOKENIZED),
            )
        cluster.arrive(gate)

    def __call__(self, table: Any) -> Any:
        """Answer a block; rows that failed before pass by."""
        rows = table.to_pylist()
        results, columns = RESULTS[self.task], COLUMNS[self.task]
        outputs = iter(self.engine.answer([prompt(row) for row in rows if not row["_error"]]))
        done = [row if row["_error"] else answered(row, next(outputs), columns) for row in rows]
        nothing = {name: NOTHING[type_] for name, type_ in results.items()}
        return source.block([{**nothing, **row} for row in done], tuple(results))

    def __del__(self) -> None:
        """End the engine's processes with the actor, as Ray Data ends it."""
        if hasattr(self, "engine"):
            self.over.set()
            self.engine.close()
            self.llm.llm_engine.engine_core.shutdown()


# what stands in the columns of a row that has none of them, by their types
NOTHING: Mapping[str, Any] = {"text": "", "integer": 0, "number": 0.0, "vector": b""}


def prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prepared row's prompt as vLLM takes it: tokens where it has them, else text; the
    second text of a pair beside it.
    """
    if row["_second"]:
        return {"prompt": row["_prompt"], "second": row["_second"]}
    if row["_tokens"]:
        return {"prompt_token_ids": array.array(TOKENS, row["_tokens"]).tolist()}
    return {"prompt": row["_prompt"]}


def rendered(llm: Any, prompt: Any) -> Any:
    """Return what an engine takes of a prompt: its tokens, of which there are not too many.

    For models that encode before they decode, the engine makes two prompts of one itself.
    """
    return prompt if llm.model_config.is_encoder_decoder else llm.renderer.render_cmpl([prompt])[0]


def answered(
    row: Mapping[str, Any], output: Any, columns: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """Return a row with what vLLM made of it: the columns of an output, or why there are none; what
    is needed only for an error row stays behind.
    """
    carried = {name: row[name] for name in CARRIED}
    try:
        if isinstance(output, Exception):
            raise output
        return {**carried, "_error": "", "_stage": "", "_raw": "", **columns(output)}
    except Exception as problem:
        said = {"_error": lines.shown(reason(problem)), "_stage": "inference", "_raw": row["_raw"]}
        return {**carried, **said}


def generated(output: Any) -> dict[str, Any]:
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
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(first.token_ids),
    }


COLUMNS: Mapping[Task, Callable[[Any], dict[str, Any]]] = {
    "generate": generated,
    "embed": pooling.embedded,
    "score": pooling.scored,
}


def reason(problem: BaseException) -> str:
    """Return what to write into an error row for this exception."""
    if isinstance(problem, UnicodeEncodeError):
        return "the prompt holds half of a surrogate pair, which is not text"
    name = type(problem).__name__
    text = str(problem).strip()
    if name in ("PromptError", "NoAnswer"):
        return text
    return f"{name}: {text}" if text else name


def parameters(sampling: Mapping[str, Any]) -> Any:
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
        made = StructuredOutputsParams(**structured) if structured else None
        params = SamplingParams(**plain, structured_outputs=made)
    except Exception as problem:
        raise Failed(
            "vLLM refuses these sampling parameters",
            reason(problem),
            "change `sampling` as that says",
        ) from problem
    # Else vLLM hands out every row at every token.
    params.output_kind = RequestOutputKind.FINAL_ONLY
    # Each request gets a copy; nobody changes what is in these, which a deep one would be for.
    params.skip_clone = True
    return params


class NotStarted(Exception):
    """What the log of a replica says of an engine that did not start.

    Ray passes on only the text of such an exception.
    """


def logs() -> dict[str, int]:
    """Return the files that this process and its children print to, with their lengths; vLLM's log
    comes first, on stdout.
    """
    sizes = {f"/proc/self/fd/{number}": os.fstat(number) for number in (1, 2)}
    return {path: info.st_size for path, info in sizes.items() if stat.S_ISREG(info.st_mode)}


def cause(problem: BaseException, before: Mapping[str, int]) -> list[str]:
    """Return what an engine's own processes said, since the logs were so long, of what `problem`
    only points to; or nothing.
    """
    if not failures.POINTER.search(str(problem)):
        return []
    try:
        return failures.root(
            line for path, size in before.items() for line in postmortem.tail(path, MANY, size)
        )
    except OSError:  # what it says only explains
        return []


@contextmanager
def explained() -> Iterator[None]:
    """Say why an engine does not start in its own words, where its logs have them."""
    before = logs()
    try:
        yield
    except Exception as problem:
        if not (found := cause(problem, before)):
            raise
        raise NotStarted("\n".join(["the engine did not start:", *found])) from problem
