"""Records that travel as JSON and are dataclasses at both ends: pydantic checks what arrives.

pydantic is in every image of vLLM. It is imported by the first record that is read, so that
`vlaunch --help` does not wait for it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_LARGEST = 2**62  # of a number: larger ones are no times, and some cannot even become a float


def read(kind: Callable[..., T], said: object, name: str, *, whole: bool = False) -> T:
    """Return what JSON said as a dataclass; raises ValueError with one line for what is none.

    Types are not converted. With `whole` every field must be there, and no other.
    """
    from pydantic import ValidationError

    wrong = f"this is no {name}"
    try:
        text = json.dumps(said, allow_nan=False)
        if not _bounded(said):
            raise ValueError("a number is too large")
        found: T = _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{wrong}: {place!r:.80}: {first['msg']:.200}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{wrong}: {error!s:.200}") from None
    if whole and (names := _differing(found, json.loads(text))):
        raise ValueError(f"{wrong}: a field is missing or unknown: {names!r:.200}")
    return found


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _bounded(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_bounded, value.values()))
    if isinstance(value, list):
        return all(map(_bounded, value))
    return not isinstance(value, (int, float)) or abs(value) < _LARGEST


def _differing(found: Any, said: dict[str, Any]) -> list[str]:
    """Return the fields that were not said as they were understood."""
    plain = json.loads(json.dumps(dataclasses.asdict(found)))
    return sorted(
        key
        for key in {**plain, **said}
        if key not in plain or key not in said or plain[key] != said[key]
    )
