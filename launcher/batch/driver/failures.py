"""Failures in plain words: exceptions of Ray, vLLM and user code as message, evidence and hint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import upstream
from ...agent import cause
from ...core import patterns
from .job import Failed

LINES = 12
NOISE = re.compile(
    r"^\s*$|^\s*[\^~]+\s*$|^The above exception was|^During handling of the above|^StopIteration"
    rf"|^(?:{upstream.any_of('ray.udf-failed', 'ray.udf-retry')})"
    rf"|\b(?:{upstream.any_of('ray.system-exception', 'ray.user-exception')})\b"
    rf"|{upstream.any_of('ray.stream-end', 'ray.remote-process')}"
    r"|^Traceback \(|For further information visit"
)
RAISED = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|NotABatch)\b(?::.*)?)$")
# Prefix of vLLM's process lines, after Ray's own.
LOG_PREFIX = re.compile(
    r"^(?:(?:\x1b\[\d*m)*\([^()]*\bpid=[^()]*\)(?:\x1b\[\d*m)* ?)*(?:ERROR \S+ \S+ \[[^\]]*\] ?)?"
)
RAISED_FROM = "The above exception was the direct cause"
# an exception that only refers to another one
POINTER = re.compile(
    rf"(?i){upstream.any_of('vllm.root-cause-pointer', 'vllm.stack-trace-pointer')}"
)
# message for an engine process that exited without an exception in its log
NO_ERROR_LOGGED = "the engine's process ended without an error in its log"
VLLM_MODES = ("engine", "data-parallel")
ALL_MODES = (*VLLM_MODES, "predict")
HOST_MEMORY = "(?i)" + upstream.any_of(
    "ray.memory-task", "ray.memory-node", "ray.memory-exception", "ray.memory-code"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePattern:
    """A failure recognized by a pattern anywhere in its text.

    `{0}` is the first group that matched.
    """

    pattern: str
    message: str
    hint: str
    modes: tuple[str, ...] = ALL_MODES


def _shared(failure: patterns.SharedFailure, flags: str = "(?i)") -> FailurePattern:
    """Return a failure of vLLM that the launcher describes in the same way."""
    pattern = flags + failure.pattern
    return FailurePattern(
        pattern=pattern, message=failure.cause, hint=failure.batch, modes=VLLM_MODES
    )


FAILURE_PATTERNS = (
    FailurePattern(
        pattern=rf"(?i){patterns.DISK_FULL}|Errno 28\b|Disk quota exceeded",
        message="the disk is full",
        hint=(
            "free space (`df -h`), or write elsewhere with `write.path`; then run the job"
            " again: it continues"
        ),
    ),
    FailurePattern(
        pattern=rf"(?i){patterns.GATED}|401 Client Error.*huggingface",
        message="the model is gated, and this cluster has no access to it",
        hint=(
            "accept its license with your account, then set that account's"
            " HF_TOKEN in the inventory's secrets"
        ),
    ),
    FailurePattern(
        pattern=(
            rf"(?i){patterns.NO_REPOSITORY}|{patterns.NO_MODEL}|{patterns.NOT_CACHED}"
            r"|can't load (?:the )?(?:configuration|model)"
        ),
        message="the model is neither on this node nor available for download",
        hint="set `model` to a name that the cluster can download, or a path on every node",
    ),
    FailurePattern(
        pattern=rf"(?i){patterns.KV_CACHE_SHORT}",
        message="the model fits, but no GPU memory is left for its KV cache",
        hint=(
            "lower `engine.args.max_model_len`, raise `engine.args.gpu_memory_utilization`, or set"
            " `engine.tp` higher"
        ),
        modes=VLLM_MODES,
    ),
    _shared(patterns.GPU_MEMORY_IN_USE),
    _shared(patterns.CPU_MEMORY_IN_USE),
    _shared(patterns.NO_COMPILER, "(?im)"),
    _shared(patterns.CONTEXT_TOO_LONG),
    FailurePattern(
        pattern=rf"(?i){patterns.GPU_MEMORY_SHORT}",
        message="a GPU ran out of memory",
        hint=(
            "lower `engine.args.gpu_memory_utilization` or `engine.args.max_model_len`, or set"
            " `engine.tp` higher"
        ),
        modes=VLLM_MODES,
    ),
    FailurePattern(
        pattern=rf"(?i){patterns.GPU_MEMORY_SHORT}",
        message="a GPU ran out of memory",
        hint=(
            "lower `predict.batch_size`, or give each replica more of a GPU with `predict.num_gpus`"
        ),
        modes=("predict",),
    ),
    FailurePattern(
        pattern=HOST_MEMORY,
        message="a node ran out of host memory, and Ray killed a replica",
        hint="lower `engine.replicas` or `engine.batch_size`, or use nodes with more memory",
        modes=("engine",),
    ),
    FailurePattern(
        pattern=HOST_MEMORY,
        message="a node ran out of host memory, and Ray killed a rank",
        hint=(
            "lower `data_parallel.size` or `data_parallel.round_rows`, or use nodes with more"
            " memory"
        ),
        modes=("data-parallel",),
    ),
    FailurePattern(
        pattern=HOST_MEMORY,
        message="a node ran out of host memory, and Ray killed a replica",
        hint="raise `predict.num_cpus` (fewer replicas on a node), or lower `predict.batch_size`",
        modes=("predict",),
    ),
    FailurePattern(
        pattern=patterns.UNKNOWN_ARGUMENT.pattern,
        message="vLLM has no engine argument `{0}`",
        hint=patterns.UNKNOWN_ARGUMENT.batch,
        modes=VLLM_MODES,
    ),
    FailurePattern(
        pattern=(
            r"TypeError: (\S+ (?:got an unexpected keyword|takes no arguments|missing \d+"
            r" required).*)"
        ),
        message="the class cannot be created: {0}",
        hint="compare `predict.args` with the arguments of its `__init__`",
        modes=("predict",),
    ),
    FailurePattern(
        pattern=r"ModuleNotFoundError: No module named '([^']+)'",
        message="the code imports `{0}`, which this image does not have",
        hint="use an image that has it, or ship the module with the code",
    ),
    FailurePattern(
        pattern=r"ImportError: (\S+ has no `.+`)",
        message="{0}",
        hint="compare `predict.class` or `preprocess.function` with the names in that file",
    ),
    FailurePattern(
        pattern=r"validation errors? for (\w+)",
        message="vLLM rejected these engine arguments (`{0}`)",
        hint="change `engine.args` as the lines above describe",
        modes=VLLM_MODES,
    ),
    FailurePattern(
        pattern=rf"(?i){patterns.NO_PLACEMENT_GROUP}",
        message="replicas of this size cannot be placed on the cluster",
        hint=(
            "compare `engine.tp`, `engine.pp` and `engine.placement` with what `vlaunch status`"
            " shows"
        ),
        modes=("engine",),
    ),
    FailurePattern(
        pattern=(
            rf"{patterns.GCS_UNREACHABLE}|{upstream.any_of('ray.no-running-ray', 'ray.gcs-dead')}"
        ),
        message="cannot reach Ray on the head",
        hint="see `vlaunch status`, then run the job again: it continues where it stopped",
    ),
    FailurePattern(
        pattern=rf"(?i){patterns.ENGINE_KILLED.pattern}|{NO_ERROR_LOGGED}",
        message=patterns.ENGINE_KILLED.cause,
        hint=patterns.ENGINE_KILLED.batch,
        modes=VLLM_MODES,
    ),
)


def explain(problem: BaseException, mode: str) -> Failed:
    """Return the failure that describes an exception of the pipeline."""
    for raised in exception_chain(problem):
        if isinstance(raised, Failed):
            return raised
    # A remote traceback has the innermost exception first, as all logs do.
    texts = [exception_text(error) for error in reversed(exception_chain(problem))]
    text = "\n".join(
        sorted(texts, key=lambda text: "Traceback" not in text and "ray::" not in text)
    )
    return match_failure(text, mode) or describe_unknown(problem, text)


def match_failure(text: str, mode: str) -> Failed | None:
    """Return the failure whose pattern matches a text, if any."""
    for failure in FAILURE_PATTERNS:
        match = re.search(failure.pattern, text) if mode in failure.modes else None
        if match:
            groups = [group for group in match.groups() if group is not None]
            return Failed(
                failure.message.format(*groups or [""]),
                find_evidence(text, match.group(0)),
                failure.hint,
            )
    return None


def describe_unknown(problem: BaseException, text: str) -> Failed:
    """Return a failure without a pattern: the first raised exception is the message."""
    lines = [line for line in text.splitlines() if not NOISE.search(line)]
    raised = [match.group(1) for line in lines if (match := RAISED.match(line))]
    last_line = lines[-1].strip() if lines else type(problem).__name__
    exception = cause.find_exception(text.splitlines())
    message = exception.text if exception else next(iter(raised), last_line)
    where = " on ".join(filter(None, (exception.process, exception.address))) if exception else ""
    hint = (
        "the full traceback is in the job's log; fix the cause, then run the job again:"
        " it continues where it stopped"
    )
    shown = "\n".join(line[:400] for line in lines[-LINES:])
    return Failed(f"{message[:300]} ({where})" if where else message[:300], shown, hint)


def root_cause_lines(lines: Sequence[str], address: str = "") -> list[str]:
    """Return the lines up to the exception that caused a failed start, which is the last line.

    That line names the process and the node at `address`. An exception raised from it on purpose
    replaces it.
    """
    bare = [LOG_PREFIX.sub("", line) for line in lines]
    raised = cause.find_exception(lines)
    if raised is None:
        return []
    end = raised.last + 1
    for index in range(end, len(bare)):
        if RAISED.match(bare[index]) and not POINTER.search(bare[index]):
            if not any(line.startswith(RAISED_FROM) for line in bare[end:index]):
                break
            end = index + 1
    raising = (index for index in range(raised.last, -1, -1) if RAISED.match(bare[index]))
    raising_index = next(raising, raised.last)
    if raised.process and (raised.address or address):
        bare[raising_index] = (
            f"({raised.process}, ip={raised.address or address}) {bare[raising_index]}"
        )
    return [line for line in bare[:end] if not NOISE.search(line)][1 - LINES :]


def find_evidence(text: str, matched: str) -> str:
    """Return the matched line and the two below it."""
    lines = [line for line in text.splitlines() if not NOISE.search(line)]
    first = matched.splitlines()[0] if matched else ""
    position = next((index for index, line in enumerate(lines) if first and first in line), None)
    shown = lines[-4:] if position is None else lines[position : position + 3]
    return "\n".join(line[:400] for line in shown)


def exception_chain(problem: BaseException) -> list[BaseException]:
    """Return an exception and those it was raised from; Ray stores the original in `cause`."""
    out: list[BaseException] = []
    todo: list[Any] = [problem]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseException) and error not in out:
            out.append(error)
            todo += [getattr(error, "cause", None), error.__cause__, error.__context__]
    return out


def exception_text(problem: BaseException) -> str:
    """Return an exception's name and text; Ray's own contain the remote traceback."""
    text = str(problem)
    return text if "Traceback" in text else f"{type(problem).__name__}: {text}"
