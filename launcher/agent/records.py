"""Dataclasses that travel as JSON between agents and launcher: pydantic checks what arrives.

pydantic is in every image of vLLM. It is imported with the first record, so that `vlaunch --help`
does not wait for it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
_LARGEST = 2**62  # of a number: larger ones are no times, and some cannot even become a float


class _Bounded:
    """Bounds of a number that a node reports: sums over several nodes are still valid records."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), "ge": 0, "lt": 2**50}


Count = Annotated[int, _Bounded()]
Amount = Annotated[float, _Bounded()]


def parse_record(kind: Callable[..., T], data: object, name: str, *, complete: bool = False) -> T:
    """Parse JSON, as bytes or plain data, into a dataclass; raise ValueError with one line that
    names the field.

    Types are not converted. With `complete` every field must be present, and no other.
    """
    from pydantic import ValidationError
    from pydantic_core import from_json

    problem = f"invalid {name}"
    try:
        text = data if isinstance(data, bytes) else json.dumps(data, allow_nan=False).encode()
        plain = from_json(text, allow_inf_nan=False)
        if not _is_bounded(plain):
            raise ValueError("a number is too large")
        record: T = _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise ValueError(f"{problem}: {path!r:.80}: {first['msg']:.200}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{problem}: {error!s:.200}") from None
    if complete:
        expected = _adapter(kind).dump_python(record, mode="json")
        names = {*expected, *plain}
        if differing := sorted(
            key for key in names if expected.get(key, ...) != plain.get(key, ...)
        ):
            raise ValueError(f"{problem}: a field is missing or unknown: {differing!r:.200}")
    return record


def as_bytes(record: Any) -> bytes:
    """Return a dataclass as JSON."""
    kind: Any = type(record)
    text: bytes = _adapter(kind).dump_json(record)
    return text


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _is_bounded(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_bounded, value.values()))
    if isinstance(value, list):
        return all(map(_is_bounded, value))
    return not isinstance(value, (int, float)) or abs(value) < _LARGEST
