"""Root cause in an engine's log: its first exception that is no consequence of another failure.

Standard library only; the agent, the driver of batches (whose archive includes this file) and the
launcher parse logs with the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import upstream

_RELEVANT = re.compile(
    upstream.any_of("vllm.died-unexpectedly", "vllm.engine-dead", "ray.task-error", "nccl.warning")
    + r"|Assertion `.*` failed|fatal error|Error:|Exception:|CUDA error|out of memory|Killed|"
    r"SIGSEGV|Connection closed|Connection reset|Segmentation fault|Aborted|timed"
    r" out|(?:Error|Exception)$|(?:Value|Assertion) error, |\[type=\w+, input_"
)
# Levels below an error: `INFO 11-24 11:16:45` of vLLM, `[2026-11-24 11:16:45,123 I 43 43]` of Ray.
_NOT_FATAL = re.compile(r"\b(?:WARNING|INFO|DEBUG) \d\d-\d\d |\[\d{4}-\S+ \S+ [WID] \d+ \d+\]")
# `ValueError: …`, `pydantic_core._pydantic_core.ValidationError: …`, `AssertionError`: how Python
# ends a traceback.
_RAISED = re.compile(r"(?:^|[\]\s)])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?::\s.*|$))")
# How C++ and CUDA end a process without a traceback: a failed assertion of a kernel, and what the
# next call returns for it.
_CUDA = re.compile(r"(\S+\.cuh?:\d+: .*Assertion `.*` failed|CUDA error \(\S+:\d+\): .*)")
# pydantic's header; each field's name and, on the next line, its error follow.
_INVALID = re.compile(r"\d+ validation errors? for \w+$")
_FIELD_ERROR = re.compile(r"((?:Value|Assertion) error, .*?|\S.*?(?= \[type=))(?: \[type=|$)")
_FIELD_NAME = re.compile(r"[\w.\[\]-]+$")
_SIGNS = ("Error", "Exception", "CUDA error (", "Assertion `")  # of a line worth a regex
# These only report that something else failed before.
_CONSEQUENCE = re.compile(
    upstream.any_of(
        *("vllm.engine-failed", "vllm.engine-dead", "vllm.engine-encountered"),
        *("vllm.died-unexpectedly", "vllm.executor-failed", "vllm.stack-trace-consequence"),
        *("ray.actor-handle", "ray.actor-died", "ray.user-exception", "ray.not-serializable"),
    )
    # Python's tracker of shared memory loses names that several processes register.
    + r"|CancelledError|resource_tracker|KeyError: '/(?:psm|mp)[_-]|cancelled|BrokenPipeError"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# `(RayWorkerProc pid=284, ip=192.168.0.2) (Worker_PP1 pid=284) ERROR 11-24 11:16:45 [core.py:15] `
_PREFIX = re.compile(r"(?:\([^()]*\bpid=[^()]*\) ?)*(?:[A-Z]+ \d\d-\d\d \S+ \[[^\]]*\] ?)?")
_PROCESS = re.compile(r"\(([\w-]+) pid=(\d+)(?:, ip=([\w.:-]+))?")
# Ray's line before a traceback: `ray::RayWorkerProc.initialize_worker() (pid=7, ip=…, …)`
_REMOTE = re.compile(upstream.text("ray.remote-call"))
# Lines that end the traceback below a `_REMOTE` line.
_REMOTE_END = re.compile(
    r"Traceback \(|The above exception was|During handling of the above|the engine did not start"
)
MAX_CAUSE_CHARS = 400


@dataclass(frozen=True)
class LoggedException:
    """An exception in a log: its text, the process that raised it, the address of its node if
    logged, and the indices of its first and last line.
    """

    text: str
    process: str = ""
    address: str = ""
    first: int = 0
    last: int = 0


def is_relevant(line: str, before: str = "") -> bool:
    """True for a line that may explain an engine's death; `before` is the line above it."""
    is_error = _RELEVANT.search(line) or _INVALID.search(before)
    return bool(is_error) and not _NOT_FATAL.search(line)


def root_cause(lines: Iterable[str], *, or_consequence: bool = False) -> str:
    """Return the text of the exception from `find_exception`; empty if there is none."""
    raised = find_exception(lines, or_consequence=or_consequence)
    return raised.text if raised else ""


def find_exception(lines: Iterable[str], *, or_consequence: bool = False) -> LoggedException | None:
    """Return the exception that caused a death: the first that is no consequence of another
    failure, preferably a worker's; Python prints the innermost of a chain first.

    With `or_consequence`, fall back to the first consequence.
    """
    ranked: list[tuple[bool, bool, LoggedException]] = []
    plain_lines = [_ESCAPES.sub("", line) for line in lines]
    remote, remote_index = None, 0
    for index, line in enumerate(plain_lines):
        if match := _REMOTE.search(line):
            remote, remote_index = match, index
            continue
        if _REMOTE_END.search(line):
            remote = None
        if not any(sign in line for sign in _SIGNS):
            continue
        if line.startswith("(raylet) ") or _NOT_FATAL.search(line):
            continue
        if match := _RAISED.search(line) or _CUDA.search(line):
            before = line[: match.start(1)]
            text, below = _exception_text(match[1].strip(), plain_lines[index + 1 : index + 3])
            process, address = _parse_process(before, remote)
            start = remote_index if remote else index
            raised = LoggedException(text[:MAX_CAUSE_CHARS], process, address, start, index + below)
            ranked.append((bool(_CONSEQUENCE.search(text)), "Worker" not in before, raised))
    # Stable: the first stays first among equals. Workers' lines reach the driver's log late.
    consequence, _, first = min(
        ranked, key=lambda candidate: candidate[:2], default=(True, False, None)
    )
    return first if or_consequence or not consequence else None


def _parse_process(before: str, remote: re.Match[str] | None) -> tuple[str, str]:
    """Return the name of the process that wrote a line, and its node's address."""
    names = list(_PROCESS.finditer(before))
    writer = remote or (names[-1] if names else None)
    if writer is None:
        return "", ""
    address = writer[3] or next((name[3] for name in names if name[3]), "")
    return f"{writer[1]} pid={writer[2]}", address


def _exception_text(raised: str, after: Sequence[str]) -> tuple[str, int]:
    """Return an exception's text, and its additional lines: pydantic puts the reason there."""
    if not _INVALID.search(raised):
        return raised, 0
    below = [_PREFIX.sub("", line, count=1).strip() for line in after]
    for number, line in enumerate(below):
        if match := _FIELD_ERROR.match(line):
            field = below[0] if number and _FIELD_NAME.match(below[0]) else ""
            return (f"{field}: {match[1]}" if field else match[1]), number + 1
    return raised, 0
