"""What differs between two identities of a job, in lines that a person reads.

The old one comes from a node: anything may be in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_LONGEST = 60
_FILE = re.compile(r"[0-9a-f]{64}, ([0-9]{1,18}) bytes")
_FILES = ("input ", "code ")
_ORDER = "input order"


def difference(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return one line for each thing that changed: `prompt.template: "a" → "b"`, `input x.jsonl:
    changed (1 → 2 bytes)`.
    """
    keys = [*new, *(key for key in old if key not in new)]
    files = any(_is_file(key) and (key in old) != (key in new) for key in keys)
    # A file that is new or gone changes the order, too: it is told once.
    changed = [
        key for key in keys if old.get(key) != new.get(key) and not (key == _ORDER and files)
    ]
    return [f"{_clean(key)}: {_change(key, old.get(key), new.get(key))}" for key in changed]


def _change(key: str, old: object, new: object) -> str:
    if not _is_file(key):
        return f"{_value(old, new)} → {_value(new, old)}"
    if old is None:
        return "new"
    if new is None:
        return "gone"
    before, after = _bytes(old), _bytes(new)
    if before is None or after is None:
        return "changed"
    if before == after:
        return f"changed (still {after:,} bytes)"
    return f"changed ({before:,} → {after:,} bytes)"


def _is_file(key: str) -> bool:
    return key.startswith(_FILES) and key != _ORDER


def _bytes(value: object) -> int | None:
    match = _FILE.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) if match else None


def _value(value: object, other: object) -> str:
    """Write one side, around the place where it differs from the other one when it is long."""
    if value is None:
        return "nothing"
    text, beside = _written(value), _written(other)
    if len(text) <= _LONGEST:
        return text
    same = next(
        (at for at, (one, two) in enumerate(zip(text, beside, strict=False)) if one != two),
        min(len(text), len(beside)),
    )
    start = max(0, min(same - _LONGEST // 3, len(text) - _LONGEST))
    return (
        ("…" if start else "")
        + text[start : start + _LONGEST]
        + ("…" if start + _LONGEST < len(text) else "")
    )


def _written(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return _clean(", ".join(value))
    return _clean(json.dumps(value, ensure_ascii=False, sort_keys=True))


def _clean(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
