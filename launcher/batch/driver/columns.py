"""Types of input columns in answers: inferred from the first rows, then enforced, for a Parquet
file has one schema.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

# Kinds as shown in messages; `any` is stored as text.
KIND_LABELS = {
    "text": "text",
    "integer": "whole numbers",
    "number": "numbers",
    "boolean": "true or false",
    "json": "JSON",
    "binary": "bytes",
    "any": "other values",
}
LARGEST = 2**63
BOOLEANS = {"true": True, "false": False, "1": True, "0": False, "": None}


def kind_of(value: Any) -> str:
    """Return the kind of a value; `big` is an integer beyond 64 bits, `none` fits every kind."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -LARGEST <= value < LARGEST else "big"
    for types, name in (
        (float, "number"),
        (str, "text"),
        (bytes, "binary"),
        ((list, tuple, dict), "json"),
    ):
        if isinstance(value, types):
            return name
    return "any"


def infer_kind(kinds: Iterable[str]) -> str:
    """Return the kind that holds all these: numbers for integers and floats, JSON for a mixture."""
    distinct = set(kinds) - {"none"}
    if not distinct or (distinct <= {"any", "text"} and "any" in distinct):
        return "any"
    if distinct == {"integer", "number"}:
        return "number"
    return distinct.pop() if len(distinct) == 1 and "big" not in distinct else "json"


def converter(column: str, target_kind: str, declared: bool) -> Callable[[Any], Any]:
    """Return a function that converts a value to a kind; it raises ValueError for one that does not
    fit.
    """
    change = {
        "text": as_any if declared else require_type(str),
        "any": as_any,
        "json": to_json,
        "binary": require_type(bytes),
        "integer": as_integer,
        "number": as_number,
        "boolean": as_boolean,
    }[target_kind]

    def fitted(value: Any) -> Any:
        if value is None:
            return None
        try:
            return change(value)
        except (ValueError, TypeError, OverflowError) as error:
            if isinstance(error, UnicodeError):
                raise
            actual = (
                "a number too large for 64 bits"
                if kind_of(value) == "big"
                else KIND_LABELS[kind_of(value)]
            )
            before = "is declared as" if declared else "the rows before it"
            remedy = "" if declared else f"; set `keep: {{{column}: text}}`"
            raise ValueError(
                f"column {column} holds {actual}, {before} {KIND_LABELS[target_kind]}{remedy}"
            ) from error

    return fitted


def require_type(type_: type) -> Callable[[Any], Any]:
    def same(value: Any) -> Any:
        if isinstance(value, type_):
            return value
        raise TypeError

    return same


def as_any(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float, list, tuple, dict, bytes)):
        encoded = to_json(value)
        return json.loads(encoded) if isinstance(value, bytes) else encoded
    encoded = json_default(value)
    return encoded if isinstance(encoded, str) else to_json(encoded)


def as_integer(value: Any) -> int | None:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        value = value.strip()
        if not value:
            return None  # an empty cell of a CSV
        if len(value) > 30:
            raise ValueError
    number = int(value) if isinstance(value, (int, str)) else float(value)
    if number != int(number) or not -LARGEST <= number < LARGEST:
        raise ValueError
    return int(number)


def as_number(value: Any) -> float | None:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str) and not value.strip():
        return None
    return float(value)


def as_boolean(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value.strip().lower()
        if text in BOOLEANS:
            return BOOLEANS[text]
    raise TypeError


def to_json(value: Any) -> str:
    return json.dumps(replace_nonfinite(value), ensure_ascii=False, default=json_default)


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, with null; copies only containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return value


def json_default(value: Any) -> Any:
    """Return the JSON form of numpy values, dates, decimals, bytes (base64) and the like.

    Raises:
        TypeError: the type has no JSON form.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    for method in ("tolist", "item", "isoformat"):
        if callable(convert := getattr(value, method, None)):
            return replace_nonfinite(convert())
    if type(value).__name__ in ("Decimal", "UUID", "timedelta", "MonthDayNano"):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")


def arrow_type(kind: str) -> Any:
    """Return the Arrow type of a column."""
    import pyarrow

    types = {
        "integer": pyarrow.int64,
        "number": pyarrow.float64,
        "boolean": pyarrow.bool_,
        "binary": pyarrow.binary,
        "vector": pyarrow.binary,
    }
    return types.get(kind, pyarrow.string)()
