"""Sanitising of output from nodes: strict JSON, text without terminal codes, bounded lines.

A node may be broken or compromised. The transport bounds the size of its output, this module its
effects.
"""

import json
import math
import re
from typing import Any, Final

from launcher.core.redaction import redact

# Patterns may take time quadratic in a line's length.
MAX_LINE_LENGTH: Final = 4000
_MAX_LINES: Final = 100_000
_TAIL_LENGTH: Final = 2 * 2**20  # characters of a log
_MAX_DEPTH: Final = 50  # levels of nesting; our formats have fewer than ten
_MAX_DIGITS: Final = 40  # of an integer
_EXCERPT_LENGTH: Final = 300
_LINE_LENGTH: Final = 2000  # characters of a line in a message
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Control characters except tabs and line breaks, bidirectional (UAX 9) and invisible characters,
# and surrogates, which cannot be printed.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f"
    r"\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]+"
)


def loads(text: str) -> Any:
    """Parse JSON from a node; raises only ValueError.

    Rejects values that Python accepts but RFC 8259 leaves undefined: NaN and Infinity, numbers
    beyond a float, unbounded nesting. Lone surrogates become question marks.
    """
    try:
        value = json.loads(
            text, parse_constant=_reject_constant, parse_float=_parse_float, parse_int=_parse_int
        )
        if "\\ud" in text or "\\uD" in text:  # most are complete pairs
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        _check_depth(value)
    return value


def truncate(text: str, *, last: bool = False) -> str:
    """Truncate long lines, and drop lines after the first 100,000; with `last`, keep the end, of at
    most 2 MiB. Known secrets are redacted first, before one can be split.
    """
    if len(text) <= MAX_LINE_LENGTH:
        return text
    text = redact(text)
    lines = (text[-_TAIL_LENGTH:] if last else text).split("\n")
    return "\n".join(
        line[:MAX_LINE_LENGTH] for line in (lines[-_MAX_LINES:] if last else lines[:_MAX_LINES])
    )


def sanitize(line: str) -> str:
    """Remove terminal codes, unprintable characters and known secrets from a log line."""
    return redact(_UNPRINTABLE.sub("", _CODES.sub("", line)))


def single_line(text: str) -> str:
    """Return text as one sanitised, bounded line that cannot imitate our own output."""
    line = " ".join(sanitize(redact(text)[: 4 * _LINE_LENGTH]).splitlines())
    return line if len(line) <= _LINE_LENGTH else line[:_LINE_LENGTH] + "…"


def excerpt(value: object, *, last: bool = False) -> str:
    """Return the first characters of any value as evidence; with `last`, the last ones."""
    try:
        text = sanitize(value if isinstance(value, str) else json.dumps(value))
        return text[-_EXCERPT_LENGTH:] if last else text[:_EXCERPT_LENGTH]
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def _reject_constant(literal: str) -> float:
    raise ValueError(f"{literal} is not a number")


def _parse_float(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _reject_constant(literal[:_EXCERPT_LENGTH])


def _parse_int(literal: str) -> int:
    if len(literal) > _MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return int(literal)


def _check_depth(value: object) -> None:
    """Raise ValueError for deep nesting; iterative, because recursion would overflow the stack."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError("nested too deeply")
