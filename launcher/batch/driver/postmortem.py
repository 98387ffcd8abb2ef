"""Why a rank of a data-parallel run ended: read from what Ray says of its process, and from the end
of its log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...agent import cause

LINES = 20  # of a log, in a failure
SEEN = 400  # of a log, among which a known cause is looked for
CRASH = (re.compile(r"(Fatal Python error: .*)"),)
DIED = (re.compile(r"(Worker proc \S+ died unexpectedly(?: \(exit code: -?\d+\))?)"),)
PLACES = re.compile(r'^\s*File ".*", line \d+|^\s*[\^~]+\s*$')
# What a rank says that lost another one.
PEER = re.compile(
    r"(Connection closed by peer|Connection reset by peer|NCCL.*remote process exited)"
)


def blamed(lost: Mapping[int, BaseException], logs: Mapping[int, Sequence[str]]) -> int:
    """Return the rank that failed first, as far as can be told: one that is gone explains those
    that lost it.
    """
    return min(lost, key=lambda rank: (not died(lost[rank]), bool(find(PEER, logs[rank])), rank))


def died(problem: BaseException) -> bool:
    """Tell whether an exception means that the rank's process or node is gone."""
    import ray

    return isinstance(
        problem,
        (
            ray.exceptions.RayActorError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.OutOfMemoryError,
        ),
    )


def said(problem: BaseException) -> str:
    """Return an exception of Ray's as one line: the cause in the rank, or how its process ended."""
    inner = getattr(problem, "cause", None)
    if isinstance(inner, BaseException):
        problem = inner
    text = f"{type(problem).__name__}: {problem}"
    if detail := re.search(r"Worker exit detail: (.*)", text):
        return detail[1].strip()
    lines = text.splitlines()
    return cause.root(lines, reports=True) or lines[0][:400]


def how(problem: BaseException, lines: Sequence[str]) -> str:
    """Say how a rank failed, as far as Ray and its log tell: Ray does not learn the status of a
    process that was killed.
    """
    text = said(problem)
    if not died(problem):
        return (why(lines) if points(text) else "") or text
    if re.search(r"(?i)node.*(?:died|dead)", text):
        return "its node is gone"
    if crash := first_found(CRASH, lines):
        return crash
    if code := re.search(r"exit code (-?\d+)", text):
        return f"exit status {code[1]}"
    return "its process was killed (SIGKILL: by the kernel for want of memory, or by somebody)"


def points(text: str) -> bool:
    """True for what a rank says of an engine whose processes told it only that they are gone; why
    is in the log.
    """
    return text.startswith("EngineDead") or "ngine core" in text


def why(lines: Sequence[str]) -> str:
    """Return what a rank's log says of its engine's end, or nothing."""
    return first_found(CRASH, lines) or cause.root(lines) or first_found(DIED, lines)


def first_found(patterns: Sequence[re.Pattern[str]], lines: Sequence[str]) -> str:
    """Return what the first pattern that is in the log finds there, or nothing."""
    return next(filter(None, (find(pattern, lines) for pattern in patterns)), "")


def find(pattern: re.Pattern[str], lines: Sequence[str]) -> str:
    """Return what a pattern's group is in the last line that has it, or nothing."""
    return next((found[1] for line in reversed(lines) if (found := pattern.search(line))), "")


def evidence(lines: Sequence[str], notes: Sequence[str] = ()) -> str:
    """Return the end of a log, without what only places the lines of a traceback, and what else is
    known.
    """
    kept = [line for line in lines if not PLACES.search(line)]
    return "\n".join([*(line[:300] for line in kept[-LINES:]), *notes])


def tail(path: str, lines: int, begin: int = 0) -> list[str]:
    """Return the last lines of a file, from byte `begin` on, without Ray's own marks.

    Runs on the node that has the file.
    """
    with open(path, "rb") as file:
        file.seek(max(begin, file.seek(0, 2) - 64 * 1024))
        text = file.read().decode(errors="backslashreplace")
    marks = (":job_id:", ":actor_name:", ":task_name:")
    kept = [line for line in text.splitlines() if line.strip() and not line.startswith(marks)]
    return [line[:400] for line in kept[-lines:]]
