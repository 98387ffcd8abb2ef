"""Failures in plain words: exceptions of Ray, vLLM and user code as message, evidence and hint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ... import upstream
from ...agent import cause
from ...failures.match import first_failure
from .job_file import Failed

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


def match_failure(text: str, mode: str, *, certain: bool = False) -> Failed | None:
    """Return the known failure in a text, if any; with `certain`, none that is only possible, such
    as a warning before a process was killed.
    """
    lines = text.splitlines()
    match = first_failure(lines, mode=mode)
    if match is None or match.failure.kind == "effect":
        return None
    if certain and match.failure.kind == "possible":
        return None
    evidence = find_evidence(lines[match.line :], max(3, match.failure.lines))
    return Failed(match.cause, evidence, match.choose_fix(mode=mode))


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


def find_evidence(lines: Sequence[str], count: int) -> str:
    """Return the first lines that say something."""
    shown = [line[:400] for line in lines if not NOISE.search(line)]
    return "\n".join(shown[:count])


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
