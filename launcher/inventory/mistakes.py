"""One mistake in a file: where it is and what to write instead; how paths and values are
spelled.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass

Where = tuple[str | int, ...]

_LONGEST = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """`text` says what is wrong at `where`.

    `line` is set when it is not the line of `where`; `about_key` when `text` itself names the last
    key of `where`; `unknown` when that is a key that nobody knows.
    """

    where: Where
    text: str
    line: int | None = None
    about_key: bool = False
    unknown: bool = False


def spell(yaml_path: Where) -> str:
    """Write a path as its reader would: `('nodes', 1, 'gpus')` → `nodes[1].gpus`."""
    text = ""
    for step in yaml_path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{name(step)}" if text else name(step)
    return text


def name(key: str) -> str:
    """Write a key so that it stays on one line and can be printed."""
    return _shorten(key) if key.isprintable() and key else json.dumps(_shorten(key))


def shown(value: object) -> str:
    """Write a value for the `not …` half of a message: text in quotes, collections by their
    kind.
    """
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        short = _shorten(value)
        return json.dumps(short, ensure_ascii=not short.isprintable())
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return str(value)


def did_you_mean(text: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean `near`?`` when one of `known` is close to `word`, else nothing."""
    near = difflib.get_close_matches(text[:_LONGEST].lower(), list(candidates), n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
