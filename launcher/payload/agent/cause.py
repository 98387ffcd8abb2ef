"""Which line of an engine's log says why it died: its first error, and not one that only reports
another.

Standard library only; the launcher reads logs with the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_TELLING = re.compile(
    r"died unexpectedly|fatal error|EngineDeadError|Error:|Exception:|CUDA error|out of"
    r" memory|Killed|NCCL WARN|SIGSEGV|"
    r"Connection closed|Connection reset|Segmentation fault|Aborted|timed"
    r" out|(?:Error|Exception)$|(?:Value|Assertion) error, "
)
_TALK = re.compile(r"\b(?:WARNING|INFO|DEBUG) \d\d-\d\d ")  # of vLLM: what it goes on after
# `ValueError: …`, `pydantic_core._pydantic_core.ValidationError: …`, `AssertionError`: how Python
# ends a traceback.
_RAISED = re.compile(r"(?:^|[\]\s)])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?::\s.*|$))")
_DETAIL = re.compile(r"((?:Value|Assertion) error, .*?)(?: \[type=|$)")
# These only report that something else failed before.
_CONSEQUENCE = re.compile(
    r"Engine core initialization"
    r" failed|EngineDeadError|ActorHandleNotFoundError|ActorDiedError|EngineCore encountered|"
    r"CancelledError|resource_tracker|cancelled|BrokenPipeError|died unexpectedly|Executor failed"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LONGEST = 400  # characters of a cause


def telling(line: str) -> bool:
    """True for a line that may say why an engine died."""
    return bool(_TELLING.search(line)) and not _TALK.search(line)


def root(lines: Iterable[str], *, reports: bool = False) -> str:
    """Return the exception that a death is about: the first that does not only report another, a
    worker's preferred.

    Empty where no line is one. With `reports`, the first that only reports another has to do where
    there is nothing else.
    """
    found: list[tuple[bool, bool, str]] = []
    kept = [_ESCAPES.sub("", line) for line in lines]
    for line, after in zip(kept, [*kept, ""][1:]):  # noqa: B905 - one longer on purpose
        if "Error" not in line and "Exception" not in line:
            continue
        if match := _RAISED.search(line):
            # pydantic says what is wrong on the line after.
            detail = _DETAIL.search(after) if "ValidationError" in line else None
            raised = detail[1].strip() if detail else match[1].strip()
            found.append(
                (bool(_CONSEQUENCE.search(raised)), "Worker" not in line[: match.start(1)], raised)
            )
    # Stable: what came first stays first among equals. Workers' lines reach the driver's log late.
    first = min(found, key=lambda each: each[:2], default=(False, False, ""))
    return "" if first[0] and not reports else first[2][:LONGEST]
