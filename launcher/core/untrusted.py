"""What a node wrote, before anybody reads it: JSON without surprises, text that draws on no
terminal, and lines without end made short.

A node may be broken, or somebody else's. What it answers is bounded by the transport; here it is
bounded in what it can mean.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from launcher.core.redaction import redact

# characters of a line that are looked at: patterns take a square of a line's length at their worst
LONGEST: Final = 4000
_LINES: Final = 100_000
_ENDING: Final = 2 * 2**20  # characters of a log
_DEEPEST: Final = 50  # levels of nesting; what we ask for has less than ten
_DIGITS: Final = 40  # of a whole number: more than any count, size or time has
_SHOWN: Final = 300
_BRIEF: Final = 2000  # characters of a line in a message
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Control characters, but not tabs and line breaks; what turns the direction of the text around it
# (Unicode, UAX 9) or is not seen; halves of UTF-16 pairs, which cannot be printed.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f"
    r"\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]+"
)


def loads(text: str) -> Any:
    """Read JSON as a node wrote it.

    Raises ValueError, and nothing else, for what is no JSON, and for what Python takes for it
    though RFC 8259 does not say what it means: NaN and Infinity, numbers that no float holds,
    nesting without end. Halves of UTF-16 pairs, which nobody can print, become question marks.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_float, parse_int=_int)
        if "\\ud" in text or "\\uD" in text:  # most are whole pairs
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > _DEEPEST:
        _shallow(value)
    return value


def cut(text: str, *, last: bool = False) -> str:
    """Return text without the ends of lines that are too long; of too many lines the first are
    there, or the `last`, of 2 MiB at most. Known secrets are replaced before one is cut in two.
    """
    if len(text) <= LONGEST:
        return text
    text = redact(text)
    lines = (text[-_ENDING:] if last else text).split("\n")
    return "\n".join(line[:LONGEST] for line in (lines[-_LINES:] if last else lines[:_LINES]))


def plain(line: str) -> str:
    """Return a log line without terminal codes, which are not to draw on anybody's terminal, and
    without known secrets.
    """
    return redact(_UNPRINTABLE.sub("", _CODES.sub("", line)))


def brief(text: str) -> str:
    """Return text as one line of bounded length, and plain: what a node says must not pass for
    another line of ours.
    """
    line = " ".join(plain(redact(text)[: 4 * _BRIEF]).splitlines())
    return line if len(line) <= _BRIEF else line[:_BRIEF] + "…"


def shown(value: object, *, last: bool = False) -> str:
    """Return the beginning of a value, or its end, as evidence, whatever it is."""
    try:
        text = plain(value if isinstance(value, str) else json.dumps(value))
        return text[-_SHOWN:] if last else text[:_SHOWN]
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def _no_number(literal: str) -> float:
    raise ValueError(f"{literal} is no number")


def _float(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _no_number(literal[:_SHOWN])


def _int(literal: str) -> int:
    if len(literal) > _DIGITS:
        raise ValueError("a number has too many digits")
    return int(literal)


def _shallow(value: object) -> None:
    """Raise ValueError for deep nesting; level by level, for who recurses meets the end of the
    stack.
    """
    level = [value]
    for _ in range(_DEEPEST):
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
