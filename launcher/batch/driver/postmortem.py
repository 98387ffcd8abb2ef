"""Cause of a rank's end, from Ray's report on its process and the end of its log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ... import upstream
from ...agent import cause

LINES = 20  # log lines in a failure
SEARCHED_LINES = 400  # last lines of a log, searched for a known cause
CRASH = (re.compile(r"(Fatal Python error: .*)"),)
WORKER_DIED = (re.compile(f"({upstream.text('vllm.worker-died')})"),)
TRACE_LINE = re.compile(r'^\s*File ".*", line \d+|^\s*[\^~]+\s*$')
# Lines that Ray adds to logs.
MARKERS = tuple(
    map(upstream.text, ("ray.log-marker-job", "ray.log-marker-actor", "ray.log-marker-task"))
)
# Error of a rank that lost another one.
PEER_LOST = re.compile(
    f"(Connection closed by peer|Connection reset by peer|{upstream.text('nccl.process-exited')})"
)


def first_failed(lost: Mapping[int, BaseException], logs: Mapping[int, Sequence[str]]) -> int:
    """Return the rank that most likely failed first: a dead rank explains those that lost it."""
    return min(
        lost,
        key=lambda rank: (
            not is_process_gone(lost[rank]),
            bool(last_match(PEER_LOST, logs[rank])),
            rank,
        ),
    )


def is_process_gone(problem: BaseException) -> bool:
    """Return True if an exception means that the rank's process or node died."""
    import ray

    return isinstance(
        problem,
        (
            ray.exceptions.RayActorError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.OutOfMemoryError,
        ),
    )


def describe_exception(problem: BaseException) -> str:
    """Return a Ray exception as one line: the cause in the rank, or its process's exit."""
    inner = getattr(problem, "cause", None)
    if isinstance(inner, BaseException):
        problem = inner
    text = f"{type(problem).__name__}: {problem}"
    if detail := re.search(upstream.text("ray.worker-exit-detail"), text):
        return detail[1].strip()
    lines = text.splitlines()
    return cause.root_cause(lines, or_consequence=True) or lines[0][:400]


def describe_failure(problem: BaseException, lines: Sequence[str]) -> str:
    """Describe a rank's failure by Ray and log: Ray does not see a killed process's status."""
    text = describe_exception(problem)
    if not is_process_gone(problem):
        return (log_cause(lines) if points_to_log(text) else "") or text
    if re.search(r"(?i)node.*(?:died|dead)", text):
        return "its node is gone"
    if crash := first_match(CRASH, lines):
        return crash
    if code := re.search(upstream.text("ray.worker-exit-code"), text):
        return f"exit status {code[1]}"
    return "its process was killed (SIGKILL: out of memory, or by an operator)"


def points_to_log(text: str) -> bool:
    """Return True if an engine only reports that its processes died; the log has the cause."""
    return text.startswith(upstream.text("vllm.engine-dead")) or (
        upstream.text("vllm.engine-core-message") in text
    )


def log_cause(lines: Sequence[str]) -> str:
    """Return the cause of an engine's end from a rank's log, or nothing."""
    return first_match(CRASH, lines) or cause.root_cause(lines) or first_match(WORKER_DIED, lines)


def first_match(patterns: Sequence[re.Pattern[str]], lines: Sequence[str]) -> str:
    """Return the first group that any pattern matches in the log, or nothing."""
    return next(filter(None, (last_match(pattern, lines) for pattern in patterns)), "")


def last_match(pattern: re.Pattern[str], lines: Sequence[str]) -> str:
    """Return a pattern's group in the last matching line, or nothing."""
    return next((match[1] for line in reversed(lines) if (match := pattern.search(line))), "")


def log_evidence(lines: Sequence[str], notes: Sequence[str] = ()) -> str:
    """Return the end of a log, without the source lines of tracebacks, and `notes`."""
    messages = [line for line in lines if not TRACE_LINE.search(line)]
    return "\n".join([*(line[:300] for line in messages[-LINES:]), *notes])


def read_tail(path: str, lines: int, begin: int = 0) -> list[str]:
    """Return the last lines of a file after byte `begin`, without Ray's markers.

    Runs on the node that has the file.
    """
    with open(path, "rb") as file:
        file.seek(max(begin, file.seek(0, 2) - 64 * 1024))
        text = file.read().decode(errors="backslashreplace")
    messages = [line for line in text.splitlines() if line.strip() and not line.startswith(MARKERS)]
    return [line[:400] for line in messages[-lines:]]
